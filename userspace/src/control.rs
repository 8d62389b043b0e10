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
    pub async fn run(self) {
        if let Err(error) = self.signals().await {
            tracing::error!(%error, "signals cannot be received: only SIGKILL ends this process");
            std::future::pending::<()>().await;
        }
    }

    async fn signals(&self) -> std::io::Result<()> {
        let mut hangup = signal(SignalKind::hangup())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut watch = tokio::time::interval(WATCH);
        watch.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let path = self.flags.config.as_deref();
        let mut file = FileWatch::new(path.and_then(digest));
        loop {
            tokio::select! {
                _ = hangup.recv() => {
                    file.take(path.and_then(digest));
                    let _ = self.reload().await; // told in the log
                }
                _ = watch.tick() => {
                    if file.changed(path.and_then(digest)) {
                        let _ = self.reload().await; // told in the log
                    }
                }
                () = either(&mut terminate, &mut interrupt) => break,
            }
        }
        let limit = self.shared.snapshot.load().settings.drain_limit;
        tracing::info!(limit = ?limit, "draining: no new requests, streams may finish");
        self.shared.phase.send_replace(Phase::Draining);
        tokio::select! {
            () = tokio::time::sleep(limit) => tracing::warn!("drain limit reached: streams are cut"),
            () = either(&mut terminate, &mut interrupt) => tracing::warn!("told twice: streams are cut"),
        }
        self.shared.phase.send_replace(Phase::Aborting);
        Ok(())
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

async fn either(a: &mut Signal, b: &mut Signal) {
    tokio::select! { _ = a.recv() => {}, _ = b.recv() => {} }
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
