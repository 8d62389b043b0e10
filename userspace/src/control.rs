//! The control plane: one thread for all that is not a request. Reload, signals, the end of the process.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use xxhash_rust::xxh3::xxh3_64;

use crate::cli::Run;
use crate::config::Settings;
use crate::generation;
use crate::state::{Phase, Shared};

/// How often the file is looked at.
const WATCH: Duration = Duration::from_millis(500);

/// The signals that are orders.
///
/// Registered before the process says that it serves: until then SIGHUP would end it, and SIGTERM would end it
/// with another code than 0.
#[derive(Debug)]
pub struct Signals {
    hangup: Signal,
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Takes the signals over; within a runtime.
    pub fn register() -> std::io::Result<Self> {
        Ok(Self {
            hangup: signal(SignalKind::hangup())?,
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) -> Order {
        tokio::select! {
            _ = self.hangup.recv() => Order::Reload,
            _ = self.terminate.recv() => Order::End,
            _ = self.interrupt.recv() => Order::End,
        }
    }

    /// SIGTERM or SIGINT.
    async fn end(&mut self) {
        while self.next().await != Order::End {}
    }
}

#[derive(PartialEq, Eq)]
enum Order {
    Reload,
    End,
}

/// A handle for giving orders to the control plane.
#[derive(Clone, Debug)]
pub struct Control {
    shared: Arc<Shared>,
    flags: Arc<Run>,
    /// One reload at a time.
    reloading: Arc<tokio::sync::Mutex<()>>,
}

impl Control {
    /// A handle for the process that was started with `flags`.
    #[must_use]
    pub fn new(shared: Arc<Shared>, flags: Run) -> Self {
        Self {
            shared,
            flags: Arc::new(flags),
            reloading: Arc::default(),
        }
    }

    /// Reads the configuration again; the new generation's number, or why the old one stays in force.
    pub async fn reload(&self) -> Result<u64, String> {
        let _one = self.reloading.lock().await;
        let metrics = &self.shared.metrics;
        match self.try_reload() {
            Ok(generation) => {
                metrics.reloads.inc();
                tracing::info!(generation, "configuration reloaded");
                Ok(generation)
            }
            Err(error) => {
                metrics.reloads_refused.inc();
                tracing::error!(%error, "configuration refused; the old one stays in force");
                Err(error)
            }
        }
    }

    fn try_reload(&self) -> Result<u64, String> {
        if self.flags.config.is_none() {
            return Err(
                "prefixlb was started without a configuration file: nothing to reload".into(),
            );
        }
        let mut settings = self.flags.settings().map_err(|error| error.to_string())?;
        let current = self.shared.snapshot.load_full();
        let old = &current.settings;
        let fixed = keep_what_is_fixed(&mut settings, old);
        let log = settings.log.clone();
        let next = generation::build(settings, Some(&current), self.shared.ledger)?;
        let generation = next.generation;
        generation::install(&self.shared, next);
        self.shared.log.configure(&log);
        if !fixed.is_empty() {
            tracing::warn!(
                settings = fixed.join(", "),
                "changed in the file, but cannot change while running: restart to apply"
            );
        }
        Ok(generation)
    }

    /// Serves orders until the process ends: signals, and changes of the file.
    pub async fn run(self, mut signals: Signals) {
        let mut watch = tokio::time::interval(WATCH);
        watch.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let path = self.flags.config.as_deref();
        let mut file = FileWatch::new(path.and_then(digest));
        if !self.file_is_in_force() {
            file.in_force = None;
        }
        loop {
            tokio::select! {
                order = signals.next() => {
                    if order == Order::End {
                        break;
                    }
                    file.take(path.and_then(digest));
                    let _ = self.reload().await; // told in the log
                }
                _ = watch.tick() => {
                    if file.changed(path.and_then(digest)) {
                        let _ = self.reload().await; // told in the log
                    }
                }
            }
        }
        self.drain(&mut signals).await;
    }

    /// Whether the file still says what the process was started with.
    ///
    /// It was read before the ports were bound; a change between then and the first look must not be missed.
    fn file_is_in_force(&self) -> bool {
        let current = self.shared.snapshot.load();
        self.flags.config.is_none()
            || self
                .flags
                .settings()
                .is_ok_and(|settings| settings == current.settings)
    }

    /// The end: streams finish, until the limit or a second signal.
    async fn drain(&self, signals: &mut Signals) {
        let limit = self.shared.snapshot.load().settings.drain_limit;
        tracing::info!(limit = ?limit, "draining: no new requests, streams may finish");
        self.shared.phase.send_replace(Phase::Draining);
        tokio::select! {
            () = tokio::time::sleep(limit) => tracing::warn!("drain limit reached: streams are cut"),
            () = signals.end() => tracing::warn!("told twice: streams are cut"),
        }
        self.shared.phase.send_replace(Phase::Aborting);
    }
}

/// Puts back what only a restart can change, and names it.
fn keep_what_is_fixed(settings: &mut Settings, old: &Settings) -> Vec<&'static str> {
    let mut fixed = Vec::new();
    let mut keep = |name, differs| {
        if differs {
            fixed.push(name);
        }
    };
    keep("listen", settings.listen != old.listen);
    keep("admin", settings.admin != old.admin);
    keep("workers", settings.workers != old.workers);
    keep("kernel", settings.kernel != old.kernel);
    settings.listen.clone_from(&old.listen);
    settings.admin.clone_from(&old.admin);
    settings.workers = old.workers;
    settings.kernel = old.kernel;
    fixed
}

/// Tells a finished change of the file from one that is still being written.
///
/// Half a file may well be right by itself, with fewer backends. So new content counts once two looks in a row
/// have found it; and a file that is away for a moment, as it is when editors rename, is no change.
#[derive(Debug)]
struct FileWatch {
    in_force: Option<u64>,
    last: Option<u64>,
}

impl FileWatch {
    fn new(now: Option<u64>) -> Self {
        Self {
            in_force: now,
            last: now,
        }
    }

    /// The file was read for another reason.
    fn take(&mut self, now: Option<u64>) {
        *self = Self::new(now);
    }

    fn changed(&mut self, now: Option<u64>) -> bool {
        let settled = now.is_some() && now == self.last;
        self.last = now;
        let changed = settled && now != self.in_force;
        if changed {
            self.in_force = now;
        }
        changed
    }
}

fn digest(path: &Path) -> Option<u64> {
    std::fs::read(path).ok().map(|bytes| xxh3_64(&bytes))
}

#[cfg(test)]
mod tests {
    use super::FileWatch;

    #[test]
    fn a_change_counts_once_and_only_when_it_has_settled() {
        let mut file = FileWatch::new(Some(1));
        assert!(!file.changed(Some(1)));
        assert!(!file.changed(Some(2)), "may be half written");
        assert!(!file.changed(Some(3)), "was half written");
        assert!(file.changed(Some(3)));
        assert!(!file.changed(Some(3)), "once");
        assert!(!file.changed(None) && !file.changed(None), "away");
        assert!(
            !file.changed(Some(3)) && !file.changed(Some(3)),
            "back as it was"
        );
        file.take(Some(4));
        assert!(!file.changed(Some(4)), "read by SIGHUP");
    }
}
