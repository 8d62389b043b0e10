//! Passive health: what traffic itself says of a backend.
//!
//! Workers report every exchange. While all is well that is two relaxed loads: the word of strikes is zero,
//! and that the backend is alive is already noted.
//! Whether to eject is not theirs to say: two workers that see two backends fail at once would eject both,
//! and the last one with them. They only wake the control plane's one thread, which decides ([`super::eject`]).
//!
//! What counts: a connection that could not be had or that broke before a response byte, and any 5xx, the
//! 503 of an engine that is loading or overloaded among them, since as many of those in a row as
//! `eject_after` mean that requests are better off elsewhere. 501 and 505 judge the request and not the
//! server, and so do 4xx and 429: they are neutral, neither strike nor proof of health.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use prefixlb_common::ledger::STATE_EJECTED;
use tokio::sync::Notify;

use crate::config::HealthSettings;
use crate::picker::Ledger;

/// What one exchange with a backend showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A response head with this status came.
    Status(u16),
    /// No connection, or it broke before a response byte.
    Failed,
}

/// Passive health of one backend: failures in a row, and what it still has to prove after an ejection.
#[derive(Debug)]
pub struct Passive {
    ledger: Ledger,
    slot: u16,
    /// Low half: failures in a row. High half: good answers owed before an ejection is forgotten.
    /// Zero while all is well.
    word: AtomicU64,
    eject_after: AtomicU32,
    /// No good byte came since the prober last looked.
    quiet: AtomicBool,
    wake: Notify,
}

const fn split(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

const fn join(strikes: u32, owed: u32) -> u64 {
    (owed as u64) << 32 | strikes as u64
}

impl Passive {
    /// The passive health of the backend on `slot`, with nothing held against it.
    #[must_use]
    pub fn new(ledger: Ledger, slot: u16, health: &HealthSettings) -> Self {
        Self {
            ledger,
            slot,
            word: AtomicU64::new(0),
            eject_after: AtomicU32::new(health.eject_after),
            quiet: AtomicBool::new(true),
            wake: Notify::new(),
        }
    }

    /// Notes an exchange. Called by workers; takes no lock, and is two loads when all is well.
    pub fn report(&self, outcome: Outcome) {
        match outcome {
            Outcome::Status(501 | 505 | 400..=499) => {}
            Outcome::Failed | Outcome::Status(500..) => self.strike(),
            Outcome::Status(_) => {
                self.alive();
                if self.word.load(Relaxed) != 0 {
                    self.update(|_, owed| (0, owed.saturating_sub(1)));
                }
            }
        }
    }

    /// Bytes of a good answer came. Called by workers for each read of a stream: a load, and a store for the
    /// first of them after each probe.
    pub fn alive(&self) {
        if self.quiet.load(Relaxed) {
            self.quiet.store(false, Relaxed);
        }
    }

    /// Whether good bytes came since the last call.
    pub(super) fn was_alive(&self) -> bool {
        !self.quiet.swap(true, Relaxed)
    }

    fn strike(&self) {
        let limit = self.eject_after.load(Relaxed);
        if limit == 0 {
            return;
        }
        let strikes = self.update(|strikes, owed| {
            let owed = if owed == 0 { 0 } else { limit };
            (strikes.saturating_add(1), owed)
        });
        let ejected = self.ledger.cell(self.slot).state.load(Relaxed) & STATE_EJECTED != 0;
        if strikes >= limit && !ejected {
            self.wake.notify_one();
        }
    }

    /// Applies `change` to (strikes, owed) and returns the strikes that it left.
    fn update(&self, change: impl Fn(u32, u32) -> (u32, u32)) -> u32 {
        let mut seen = self.word.load(Relaxed);
        loop {
            let (strikes, owed) = split(seen);
            let (strikes, owed) = change(strikes, owed);
            match self
                .word
                .compare_exchange_weak(seen, join(strikes, owed), Relaxed, Relaxed)
            {
                Ok(_) => return strikes,
                Err(now) => seen = now,
            }
        }
    }

    /// Takes over changed settings.
    pub(super) fn apply(&self, health: &HealthSettings) {
        self.eject_after.store(health.eject_after, Relaxed);
    }

    /// Waits until failures in a row have reached the limit; may wake once too often.
    pub(super) async fn struck(&self) {
        self.wake.notified().await;
    }

    /// Whether failures in a row are at the limit now.
    pub(super) fn is_due(&self) -> bool {
        let limit = self.eject_after.load(Relaxed);
        limit != 0 && split(self.word.load(Relaxed)).0 >= limit
    }

    /// Whether nothing is owed from an earlier ejection.
    pub(super) fn has_proved_itself(&self) -> bool {
        split(self.word.load(Relaxed)).1 == 0
    }

    /// The ejection is over: as many good answers are owed as failures led to it.
    pub(super) fn readmit(&self) {
        let owed = self.eject_after.load(Relaxed).max(1);
        self.word.store(join(0, owed), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passive(eject_after: u32) -> Passive {
        let health = HealthSettings {
            eject_after,
            ..HealthSettings::default()
        };
        Passive::new(Ledger::in_process(), 0, &health)
    }

    #[test]
    fn what_counts_as_a_strike() {
        let table = [
            (Outcome::Failed, true),
            (Outcome::Status(500), true),
            (Outcome::Status(502), true),
            (Outcome::Status(503), true),
            (Outcome::Status(599), true),
            (Outcome::Status(501), false),
            (Outcome::Status(505), false),
            (Outcome::Status(400), false),
            (Outcome::Status(404), false),
            (Outcome::Status(429), false),
            (Outcome::Status(200), false),
            (Outcome::Status(304), false),
        ];
        for (outcome, strikes) in table {
            let passive = passive(1);
            passive.report(outcome);
            assert_eq!(passive.is_due(), strikes, "{outcome:?}");
        }
    }

    #[test]
    fn only_failures_in_a_row_count_and_neutral_answers_do_not_break_the_row() {
        let passive = passive(3);
        for outcome in [500, 500, 200, 500, 500].map(Outcome::Status) {
            passive.report(outcome);
        }
        assert!(!passive.is_due());
        passive.report(Outcome::Status(429));
        passive.report(Outcome::Failed);
        assert!(passive.is_due());
    }

    #[test]
    fn good_answers_and_their_bytes_are_signs_of_life() {
        let passive = passive(3);
        assert!(!passive.was_alive());
        passive.report(Outcome::Status(200));
        assert!(passive.was_alive() && !passive.was_alive());
        passive.alive();
        assert!(passive.was_alive());
        for outcome in [Outcome::Status(500), Outcome::Status(429), Outcome::Failed] {
            passive.report(outcome);
        }
        assert!(!passive.was_alive());
    }

    #[test]
    fn zero_never_ejects() {
        let passive = passive(0);
        for _ in 0..100 {
            passive.report(Outcome::Failed);
        }
        assert!(!passive.is_due());
    }

    #[test]
    fn an_ejection_is_forgotten_after_as_many_good_answers() {
        let passive = passive(2);
        passive.readmit();
        passive.report(Outcome::Status(200));
        assert!(!passive.has_proved_itself());
        passive.report(Outcome::Failed);
        passive.report(Outcome::Status(200));
        assert!(
            !passive.has_proved_itself(),
            "a failure in between starts the count anew"
        );
        passive.report(Outcome::Status(200));
        assert!(passive.has_proved_itself());
    }
}
