//! The `prefixlb` command: arguments → configuration → ports → ledger → snapshot → threads → drain.

use std::net::TcpListener;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;

use clap::Parser;
use prefixlb::cli::{Cli, Run, Verb, exit};
use prefixlb::config::{Settings, read_file};
use prefixlb::control::{Control, Signals};
use prefixlb::state::Shared;
use prefixlb::{admin, backend, kernel, proxy};

fn main() -> ExitCode {
    let result = match Cli::parse().verb {
        Verb::Run(flags) => run(flags),
        Verb::Check { file } => check(&file),
    };
    match result {
        Ok(()) => ExitCode::from(exit::OK),
        Err((code, message)) => {
            eprintln!("prefixlb: {message}");
            ExitCode::from(code)
        }
    }
}

type Failure = (u8, String);

fn check(file: &std::path::Path) -> Result<(), Failure> {
    let settings = read_file(file).map_err(|error| (exit::CONFIG, error.to_string()))?;
    let backends: usize = settings.pools.iter().map(|pool| pool.backends.len()).sum();
    println!(
        "{}: ok, {}, {}",
        file.display(),
        counted(settings.pools.len(), "pool"),
        counted(backends, "backend")
    );
    Ok(())
}

fn counted(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

fn run(flags: Run) -> Result<(), Failure> {
    let settings = flags
        .settings()
        .map_err(|error| (exit::CONFIG, error.to_string()))?;
    log_to_stderr();
    raise_descriptor_limit();
    let (admin_listener, listeners) = bind(&settings)?;
    let bound = |listener: &TcpListener| match listener.local_addr() {
        Ok(address) => address.to_string(),
        Err(_) => "unknown".to_owned(),
    };
    let listen: Vec<String> = listeners
        .iter()
        .flatten()
        .take(settings.listen.len())
        .map(bound)
        .collect();
    let admin = bound(&admin_listener);
    let (ledger, backing) =
        kernel::open_ledger(settings.kernel).map_err(|error| (exit::KERNEL, error))?;
    let shared = Shared::start(settings, ledger).map_err(|error| (exit::CONFIG, error))?;
    // Set once, here: it cannot be set already.
    let _ = shared.metrics.ledger_backing.set(backing.to_string());
    let control = Control::new(shared.clone(), flags);
    let started = start_control(shared.clone(), control, admin_listener);
    started.map_err(|error| (exit::FAILED, format!("no control thread: {error}")))?;
    let snapshot = shared.snapshot.load_full();
    let names: Vec<&str> = snapshot
        .pools
        .iter()
        .map(|pool| &*pool.settings.name)
        .collect();
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        listen = %listen.join(","),
        %admin,
        workers = snapshot.settings.workers,
        pools = %names.join(","),
        ledger = %backing,
        "serving"
    );
    serve(&shared, listeners)
}

/// As many descriptors as the system lets us have: a flow needs two, and shells give 1,024.
fn raise_descriptor_limit() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "the limit of open descriptors cannot be raised");
    }
}

fn log_to_stderr() {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .init();
}

/// Every port, before anything else happens: one listener an address for each worker.
fn bind(settings: &Settings) -> Result<(TcpListener, Vec<Vec<TcpListener>>), Failure> {
    let cannot = |address, error| (exit::BIND, format!("cannot listen on {address}: {error}"));
    let admin = settings.admin.listen;
    let admin_listener = TcpListener::bind(admin).map_err(|error| cannot(admin, error))?;
    admin_listener
        .set_nonblocking(true)
        .map_err(|error| cannot(admin, error))?;
    for address in &settings.listen {
        proxy::probe(*address).map_err(|error| cannot(*address, error))?;
    }
    // Port 0 is whatever port the first worker gets, for all of them.
    let mut addresses = settings.listen.clone();
    let mut listeners = Vec::with_capacity(settings.workers);
    for _ in 0..settings.workers {
        let mut of_worker = Vec::with_capacity(addresses.len());
        for address in &mut addresses {
            let listener = proxy::bind(*address).map_err(|error| cannot(*address, error))?;
            *address = listener
                .local_addr()
                .map_err(|error| cannot(*address, error))?;
            of_worker.push(listener);
        }
        listeners.push(of_worker);
    }
    Ok((admin_listener, listeners))
}

/// Probes, names, signals of engines, admin and orders: on a thread of their own, so that a busy worker
/// cannot hold them up, nor they a worker.
fn start_control(
    shared: Arc<Shared>,
    control: Control,
    admin_listener: TcpListener,
) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (listener, signals) = {
        let _in_runtime = runtime.enter();
        let listener = tokio::net::TcpListener::from_std(admin_listener)?;
        (listener, Signals::register()?)
    };
    let name = "prefixlb-control".to_owned();
    thread::Builder::new().name(name).spawn(move || {
        runtime.block_on(async {
            tokio::join!(
                backend::supervise(shared.clone()),
                admin::serve(listener, shared, control.clone()),
                control.run(signals),
            )
        });
    })?;
    Ok(())
}

/// The workers; returns when all have drained.
fn serve(shared: &Arc<Shared>, listeners: Vec<Vec<TcpListener>>) -> Result<(), Failure> {
    let mut workers = Vec::new();
    for (id, listeners) in listeners.into_iter().enumerate() {
        let shared = shared.clone();
        let worker = thread::Builder::new()
            .name(format!("prefixlb-{id}"))
            .spawn(move || proxy::run_worker(shared, listeners, id))
            .map_err(|error| (exit::FAILED, format!("no thread for worker {id}: {error}")))?;
        workers.push(worker);
    }
    let mut result = Ok(());
    for worker in workers {
        if worker.join().is_err() {
            result = Err((
                exit::FAILED,
                "a worker panicked; please report this".to_owned(),
            ));
        }
    }
    shared.log.close();
    result
}
