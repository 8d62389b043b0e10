//! The control plane: one thread for all that is not a request. Reload, signals, the end of the process.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use xxhash_rust::xxh3::xxh3_64;

use crate::cli::Run;
use crate::generation;
use crate::state::{Phase, Shared};

/// How often the file is looked at.
const WATCH: Duration = Duration::from_secs(1);

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
        for (what, changed) in [
            ("listen", settings.listen != old.listen),
            ("admin.listen", settings.admin != old.admin),
            ("workers", settings.workers != old.workers),
            ("kernel", settings.kernel != old.kernel),
        ] {
            if changed {
                tracing::warn!(
                    setting = what,
                    "cannot change while running: restart to apply it"
                );
            }
        }
        settings.listen.clone_from(&old.listen);
        settings.admin.clone_from(&old.admin);
        settings.workers = old.workers;
        settings.kernel = old.kernel;
        self.shared.log.configure(&settings.log);
        let next = generation::build(settings, Some(&current), self.shared.ledger)?;
        let generation = next.generation;
        generation::install(&self.shared, next);
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
        let path = self.flags.config.as_deref();
        let mut seen = path.and_then(digest);
        loop {
            tokio::select! {
                _ = hangup.recv() => {
                    seen = path.and_then(digest);
                    let _ = self.reload().await; // told in the log
                }
                _ = watch.tick() => {
                    let now = path.and_then(digest);
                    // A file that is away for a moment, as editors do, is not a change.
                    if now.is_some() && now != seen {
                        seen = now;
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

async fn either(a: &mut Signal, b: &mut Signal) {
    tokio::select! { _ = a.recv() => {}, _ = b.recv() => {} }
}

fn digest(path: &Path) -> Option<u64> {
    std::fs::read(path).ok().map(|bytes| xxh3_64(&bytes))
}
