//! What engines last said about themselves, one cell a ledger slot. Written by the scraper, read by picks.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use prefixlb_common::ledger::LEDGER_SLOTS;

/// One engine's signals at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineSignal {
    /// Requests waiting in the engine's queue.
    pub waiting: Option<u32>,
    /// Requests running.
    pub running: Option<u32>,
    /// KV cache in use, 0–1.
    pub kv_use: Option<f32>,
}

const UNKNOWN: u32 = u32::MAX;

#[derive(Debug)]
struct SignalCell {
    waiting: AtomicU32,
    running: AtomicU32,
    /// In 1/1,000,000, so that the cell is made of integers.
    kv_use: AtomicU32,
    /// When the signal stops being believed; milliseconds of the caller's clock.
    good_until_ms: AtomicU64,
}

/// The signals of every slot.
#[derive(Debug)]
pub struct SignalTable(Box<[SignalCell]>);

impl Default for SignalTable {
    fn default() -> Self {
        Self(
            (0..LEDGER_SLOTS)
                .map(|_| SignalCell {
                    waiting: AtomicU32::new(UNKNOWN),
                    running: AtomicU32::new(UNKNOWN),
                    kv_use: AtomicU32::new(UNKNOWN),
                    good_until_ms: AtomicU64::new(0),
                })
                .collect(),
        )
    }
}

impl SignalTable {
    /// Stores what the engine on `slot` said; believed until `good_until_ms`.
    pub fn store(&self, slot: u16, signal: EngineSignal, good_until_ms: u64) {
        let cell = &self.0[usize::from(slot)];
        cell.waiting
            .store(signal.waiting.unwrap_or(UNKNOWN), Relaxed);
        cell.running
            .store(signal.running.unwrap_or(UNKNOWN), Relaxed);
        let kv = signal
            .kv_use
            .map_or(UNKNOWN, |use_| (use_.clamp(0.0, 1.0) * 1e6) as u32);
        cell.kv_use.store(kv, Relaxed);
        cell.good_until_ms.store(good_until_ms, Relaxed);
    }

    /// What is known of `slot` at `now_ms`; nothing if it is stale.
    #[must_use]
    pub fn load(&self, slot: u16, now_ms: u64) -> EngineSignal {
        let cell = &self.0[usize::from(slot)];
        if now_ms > cell.good_until_ms.load(Relaxed) {
            return EngineSignal::default();
        }
        let known = |word: &AtomicU32| Some(word.load(Relaxed)).filter(|&v| v != UNKNOWN);
        EngineSignal {
            waiting: known(&cell.waiting),
            running: known(&cell.running),
            kv_use: known(&cell.kv_use).map(|v| v as f32 / 1e6),
        }
    }

    /// Forgets `slot`: its backend is gone.
    pub fn clear(&self, slot: u16) {
        self.store(slot, EngineSignal::default(), 0);
    }
}
