//! Assigning a backend: pick, charge, and wait in line where all are full.

use std::sync::Arc;
use std::task::Poll;

use prefixlb_common::framing::Body;

use super::exchange::{Exchange, Fail};
use super::fields;
use super::reason::Reason;
use super::request::{push_field, push_number};
use super::usage;
use super::waiters::Ticket;
use crate::config::{HashOn, PolicyKind, SessionFrom};
use crate::picker::{Charge, NoPick, Pick, PickRequest};
use crate::state::{Backend, Phase, Pool};

/// Another worker may take the last place between pick and charge; after so many times it is full.
const CHARGE_TRIES: usize = 4;

/// A backend that is charged for this request until this is dropped.
#[derive(Debug)]
pub struct Assigned {
    /// The backend.
    pub backend: Arc<Backend>,
    /// Why it.
    pub pick: Pick,
    pool: Arc<Pool>,
    charge: Option<Charge>,
}

impl Assigned {
    /// The first body byte came.
    pub fn first_byte(&mut self) {
        if let Some(charge) = &mut self.charge {
            charge.first_byte();
        }
    }

    /// Writes the fields that say who answered and, if asked for, why.
    pub fn write_fields(&self, out: &mut Vec<u8>, with_pick: bool) {
        push_field(
            out,
            b"x-prefixlb-backend",
            self.backend.settings.name.as_bytes(),
        );
        if !with_pick {
            return;
        }
        out.extend_from_slice(b"x-prefixlb-pick: policy=");
        out.extend_from_slice(self.pool.picker.policy().kind.as_str().as_bytes());
        out.extend_from_slice(b"; reason=");
        out.extend_from_slice(self.pick.reason.as_str().as_bytes());
        for (name, number) in [
            (&b"; match="[..], self.pick.matched_tokens),
            (b"; uncached=", self.pick.uncached_tokens),
            (b"; load=", self.pick.load),
        ] {
            out.extend_from_slice(name);
            push_number(out, number);
        }
        out.extend_from_slice(b"\r\n");
    }
}

impl Drop for Assigned {
    fn drop(&mut self) {
        self.charge.take();
        self.pool.waiters.wake_first();
    }
}

/// A place in a pool's queue, given up however the wait ends.
struct InLine<'p> {
    pool: &'p Pool,
    ticket: Ticket,
}

impl Drop for InLine<'_> {
    fn drop(&mut self) {
        self.pool.metrics.queued.add(-1);
        self.pool.waiters.leave(&self.ticket);
    }
}

impl Exchange<'_> {
    /// Picks and charges a backend of `pool`; at the caps, waits in line.
    pub(super) async fn assign(&mut self, pool: &Arc<Pool>) -> Result<(), Fail> {
        let full = if pool.waiters.is_empty() {
            match self.try_assign(&self.as_now(pool)) {
                Ok(assigned) => return self.accept(assigned),
                Err(none) => none == NoPick::AllFull,
            }
        } else {
            true // others came first
        };
        if !full {
            return Err(none_alive());
        }
        let assigned = self.wait_in_line(pool).await?;
        self.accept(assigned)
    }

    fn accept(&mut self, assigned: Assigned) -> Result<(), Fail> {
        let backend = &assigned.backend.metrics;
        let pick = &assigned.pick;
        backend.picks[pick.reason as usize].inc();
        backend
            .prompt_tokens
            .add(pick.matched_tokens + pick.uncached_tokens);
        backend.matched_tokens.add(pick.matched_tokens);
        if pick.panic {
            assigned.pool.metrics.panic_picks.inc();
        }
        self.assigned = Some(assigned);
        Ok(())
    }

    /// The pool of this name as it is now. A reload may have come since the request was read: who waits in line
    /// must see the backends that came with it, and not stand in the way of those behind for ones that left.
    fn as_now(&self, pool: &Arc<Pool>) -> Arc<Pool> {
        let now = self.flow.worker.shared.snapshot.load();
        if std::ptr::eq(&raw const **now, self.snapshot) {
            return pool.clone();
        }
        let named = |other: &&Arc<Pool>| other.settings.name == pool.settings.name;
        now.pools.iter().find(named).unwrap_or(pool).clone()
    }

    fn try_assign(&self, pool: &Arc<Pool>) -> Result<Assigned, NoPick> {
        let worker = &self.flow.worker;
        let shared = &worker.shared;
        let request = PickRequest {
            key: Some(&self.key).filter(|_| self.has_key),
            session: self.session(pool),
            prompt_tokens: self.prompt_tokens(pool),
            tried: &self.tried,
            now_ms: shared.now_ms(),
            random: worker.random(),
        };
        for _ in 0..CHARGE_TRIES {
            let pick =
                pool.picker
                    .pick(&request, &pool.members, &shared.ledger, &shared.signals)?;
            let Some(backend) = pool.backend(pick.slot) else {
                return Err(NoPick::NoneAlive);
            };
            if let Some(charge) = shared.ledger.try_charge(pick.slot, pick.uncached_tokens) {
                if let Some(key) = request.key {
                    pool.picker.learn(key, pick.slot);
                }
                return Ok(Assigned {
                    backend: backend.clone(),
                    pick,
                    pool: pool.clone(),
                    charge: Some(charge),
                });
            }
        }
        Err(NoPick::AllFull)
    }

    async fn wait_in_line(&mut self, pool: &Arc<Pool>) -> Result<Assigned, Fail> {
        let limit = pool.settings.queue_limit;
        let joined = std::future::poll_fn(|cx| Poll::Ready(pool.waiters.join(limit, cx.waker())));
        let Some(ticket) = joined.await else {
            return Err(Fail::new(
                Reason::QueueFull,
                "every backend is at its cap and the queue is full; try again later",
            ));
        };
        pool.metrics.queued.add(1);
        pool.metrics.queued_total.inc();
        let place = InLine { pool, ticket };
        let watched = self.upload_may_be_watched();
        if watched {
            self.flow.arm(pool.settings.queue_deadline);
        } else {
            self.flow.arm_unread(pool.settings.queue_deadline);
        }
        std::future::poll_fn(|cx| {
            if pool.waiters.is_first(&place.ticket) {
                match self.try_assign(&self.as_now(pool)) {
                    Ok(assigned) => return Poll::Ready(Ok(assigned)),
                    Err(NoPick::NoneAlive) => return Poll::Ready(Err(none_alive())),
                    Err(NoPick::AllFull) => {}
                }
            }
            if watched && self.flow.poll_gone(cx).is_ready() {
                return Poll::Ready(Err(Fail::GONE));
            }
            if !self.flow.interrupted() || (!watched && self.flow.waits_on()) {
                return Poll::Pending;
            }
            Poll::Ready(Err(if self.flow.half_closed() {
                Fail::GONE
            } else if self.flow.worker.phase() == Phase::Aborting {
                Fail::new(Reason::ShuttingDown, "prefixlb is shutting down")
            } else {
                Fail::new(
                    Reason::QueueTimeout,
                    "every backend stayed at its cap; try again later",
                )
            }))
        })
        .await
    }

    /// Before the body is read whole, what the client sends is body: it is left where it is.
    fn upload_may_be_watched(&self) -> bool {
        self.incoming.is_done()
    }

    fn session(&self, pool: &Pool) -> Option<&[u8]> {
        let head = &self.flow.inbuf[..self.head.len];
        let policy = pool.picker.policy();
        let from = |session: &SessionFrom| match session {
            SessionFrom::Header(name) => fields::find(head, name),
            SessionFrom::Cookie(name) => fields::cookie(head, name),
        };
        let found = match (policy.kind, &policy.hash_on) {
            (PolicyKind::Session, _) | (PolicyKind::ConsistentHash, HashOn::Session) => {
                from(&policy.session)
            }
            (PolicyKind::ConsistentHash, HashOn::Header(name)) => fields::find(head, name),
            _ => None,
        };
        found.filter(|id| !id.is_empty())
    }

    /// The prompt's length, from the body's and the ratio learned for the pool.
    fn prompt_tokens(&self, pool: &Pool) -> u64 {
        usage::tokens(self.body_bytes(), &pool.bytes_per_token_fp)
    }

    /// The body's length as far as it is known now.
    pub(super) fn body_bytes(&self) -> u64 {
        match self.head.body {
            Body::Length(length) => length,
            _ => (self.prefix_end - self.head.len) as u64,
        }
    }
}

const fn none_alive() -> Fail {
    Fail::new(
        Reason::NoBackend,
        "no backend of the pool is alive; try again later",
    )
}
