//! Deadlines of flows, cheaply: a flow stores a number, one sweep a tick looks at all of them.
//!
//! A timer of the runtime would be re-armed several times a request and once an event; here moving a
//! deadline is one store. The price is a resolution of [`TICK`], which no deadline of a balancer minds.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::task::Waker;
use std::time::{Duration, Instant};

/// How often deadlines are looked at.
pub const TICK: Duration = Duration::from_millis(100);

const NEVER: u64 = u64::MAX;

#[derive(Debug)]
struct Slot {
    due_ms: Cell<u64>,
    waker: RefCell<Option<Waker>>,
    closed: Cell<bool>,
}

/// All deadlines of one worker.
#[derive(Debug)]
pub struct Timers {
    slots: RefCell<Vec<Rc<Slot>>>,
    start: Instant,
    now_ms: Cell<u64>,
}

impl Timers {
    /// No deadlines yet.
    pub fn new() -> Rc<Self> {
        Rc::new(Self {
            slots: RefCell::default(),
            start: Instant::now(),
            now_ms: Cell::new(0),
        })
    }

    /// A deadline for the task that holds `waker`.
    pub fn register(self: &Rc<Self>, waker: Waker) -> Timer {
        let slot = Rc::new(Slot {
            due_ms: Cell::new(NEVER),
            waker: RefCell::new(Some(waker)),
            closed: Cell::new(false),
        });
        self.slots.borrow_mut().push(slot.clone());
        Timer {
            timers: self.clone(),
            slot,
        }
    }

    /// Milliseconds at the last tick.
    pub fn now_ms(&self) -> u64 {
        self.now_ms.get()
    }

    /// One tick: wakes the flows whose deadline has passed, forgets those that ended.
    pub fn sweep(&self) {
        self.now_ms.set(self.start.elapsed().as_millis() as u64);
        let now = self.now_ms.get();
        self.retain(|slot| {
            if slot.due_ms.get() <= now {
                wake(slot);
            }
        });
    }

    /// Wakes every flow: the phase of the process changed.
    pub fn wake_all(&self) {
        self.retain(wake);
    }

    /// Flows alive.
    pub fn len(&self) -> usize {
        self.slots
            .borrow()
            .iter()
            .filter(|s| !s.closed.get())
            .count()
    }

    fn retain(&self, mut each: impl FnMut(&Slot)) {
        self.slots.borrow_mut().retain(|slot| {
            let open = !slot.closed.get();
            if open {
                each(slot);
            }
            open
        });
    }
}

fn wake(slot: &Slot) {
    if let Some(waker) = &*slot.waker.borrow() {
        waker.wake_by_ref();
    }
}

/// One flow's deadline.
#[derive(Debug)]
pub struct Timer {
    timers: Rc<Timers>,
    slot: Rc<Slot>,
}

impl Timer {
    /// Due `after` from now (from the last tick, so up to one tick early or late).
    pub fn set(&self, after: Duration) {
        let ms = after.as_millis() as u64;
        self.slot
            .due_ms
            .set(self.timers.now_ms().saturating_add(ms.max(1)));
    }

    /// Whether the deadline has passed.
    pub fn expired(&self) -> bool {
        self.slot.due_ms.get() <= self.timers.now_ms()
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.slot.closed.set(true);
        self.slot.waker.borrow_mut().take();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moved_deadline_is_not_due() {
        let timers = Timers::new();
        let timer = timers.register(Waker::noop().clone());
        assert!(!timer.expired());
        timer.set(Duration::from_millis(50));
        timers.now_ms.set(50);
        assert!(timer.expired());
        timer.set(Duration::from_millis(50));
        assert!(!timer.expired());
    }

    #[test]
    fn ended_flows_are_forgotten() {
        let timers = Timers::new();
        drop(timers.register(Waker::noop().clone()));
        timers.sweep();
        assert_eq!(timers.slots.borrow().len(), 0);
    }
}
