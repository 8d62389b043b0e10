//! The command line.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::config::{
    ConfigError, KernelMode, PolicyKind, PoolSettings, Settings, check, read_file, values,
};

/// Exit codes, all of them.
pub mod exit {
    /// Everything was done; after SIGTERM too, even if streams had to be cut at the drain limit.
    pub const OK: u8 = 0;
    /// Something failed that is none of the below.
    pub const FAILED: u8 = 1;
    /// The configuration or the command line is wrong; no port was bound.
    pub const CONFIG: u8 = 2;
    /// A port cannot be bound.
    pub const BIND: u8 = 3;
    /// `kernel = "require"`, and the kernel path is not to be had.
    pub const KERNEL: u8 = 4;
}

/// A prefix-aware load balancer for LLM engines.
#[derive(Debug, Parser)]
#[command(name = "prefixlb", version, about, after_help = EXIT_CODES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

const EXIT_CODES: &str = "Exit codes: 0 done, 1 failed, 2 bad configuration or usage (no port was bound), \
3 a port cannot be bound, 4 the required kernel path is not to be had.";

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Serve, from a configuration file or from flags
    #[command(after_help = RUN_EXAMPLES)]
    Run(Run),
    /// Read a configuration file and say whether it is right
    Check {
        /// The file
        file: PathBuf,
    },
}

const RUN_EXAMPLES: &str = "Examples:
  prefixlb run --backend http://127.0.0.1:8000 --backend http://127.0.0.1:8001
  prefixlb run --config /etc/prefixlb.toml

SIGHUP, or a change of the file, reads the configuration again; SIGTERM lets streams finish; a second one ends \
at once.";

/// Flags of `run`.
#[derive(Debug, Default, Args)]
pub struct Run {
    /// Configuration file (TOML); what it says of addresses, workers and kernel yields to flags
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Address for clients; may be repeated [default: 127.0.0.1:8080]
    #[arg(long, value_name = "IP:PORT", value_parser = values::listen)]
    pub listen: Vec<SocketAddr>,
    /// Address for health, metrics and orders [default: 127.0.0.1:9090]
    #[arg(long, value_name = "IP:PORT", value_parser = values::listen)]
    pub admin: Option<SocketAddr>,
    /// How backends are chosen [default: sticky]
    #[arg(long, value_name = "NAME", value_parser = values::policy, conflicts_with = "config")]
    pub policy: Option<PolicyKind>,
    /// A backend, http://HOST:PORT; repeated for each
    #[arg(long, value_name = "URL", conflicts_with = "config")]
    pub backend: Vec<String>,
    /// Most active requests a backend [default: no cap]
    #[arg(long, value_name = "N", conflicts_with = "config",
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub max_active: Option<u32>,
    /// Worker threads [default: one a core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub workers: Option<u16>,
    /// Use of BPF: auto, off or require [default: auto]
    #[arg(long, value_name = "MODE", value_parser = values::kernel)]
    pub kernel: Option<KernelMode>,
}

impl Run {
    /// The settings that file and flags amount to.
    pub fn settings(&self) -> Result<Settings, ConfigError> {
        let mut settings = match &self.config {
            Some(path) => read_file(path)?,
            None => Settings::new(vec![self.pool()?]),
        };
        if !self.listen.is_empty() {
            settings.listen.clone_from(&self.listen);
        }
        settings.admin.listen = self.admin.unwrap_or(settings.admin.listen);
        settings.workers = self.workers.map_or(settings.workers, usize::from);
        settings.kernel = self.kernel.unwrap_or(settings.kernel);
        check(&settings).map_err(|fault| ConfigError::from(fault.message))?;
        Ok(settings)
    }

    fn pool(&self) -> Result<PoolSettings, ConfigError> {
        if self.backend.is_empty() {
            return Err(ConfigError::from(
                "no backend: give --backend http://HOST:PORT, once for each engine, or --config FILE"
                    .to_owned(),
            ));
        }
        let mut backends = Vec::new();
        for url in &self.backend {
            let mut backend = values::backend(url).map_err(|m| format!("--backend: {m}"))?;
            backend.max_active = self.max_active;
            if backends.contains(&backend) {
                return Err(format!("--backend: {url} is given twice").into());
            }
            backends.push(backend);
        }
        let mut pool = PoolSettings::new("default", backends);
        pool.policy.kind = self.policy.unwrap_or(pool.policy.kind);
        Ok(pool)
    }
}
