//! The data path beside HAProxy, nginx and Envoy: CPU of the balancer alone, in one run.
//!
//! `cargo xtask bench relay [stream|small|prompts|memory|start]`

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use clap::Parser;
use prefixlb_bench::run::Running;
use prefixlb_bench::side::cpu::{on_cpu_ns, resident_kib};
use prefixlb_bench::side::drive::{Round, closed_loop, quiet_streams, streams};
use prefixlb_bench::side::proxies::{Contender, direct, envoy, haproxy, nginx, prefixlb};
use prefixlb_bench::side::stub;

#[derive(Debug, Parser)]
struct Args {
    /// Which runs: stream, small, prompts, memory, start; none: all
    runs: Vec<String>,
    /// Rounds of each contender; medians are shown
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Where the report goes
    #[arg(long, default_value = "bench/results/relay.md")]
    out: PathBuf,
    /// Serve as the stub on this port, and nothing else
    #[arg(long, hide = true)]
    stub: Option<u16>,
}

fn main() -> std::process::ExitCode {
    let args = Args::parse();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let done = runtime.and_then(|runtime| {
        runtime.block_on(async {
            match args.stub {
                Some(port) => stub::serve(TcpListener::bind(("127.0.0.1", port))?).await,
                None => compare(&args).await,
            }
        })
    });
    match done {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("relay: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}

/// What one contender did in one kind of run: medians over the rounds.
#[derive(Debug, Default)]
struct Cell {
    cpu_us: Vec<f64>,
    rate: Vec<f64>,
    p50_us: Vec<f64>,
    p99_us: Vec<f64>,
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

async fn compare(args: &Args) -> io::Result<()> {
    let folder = std::env::temp_dir().join(format!("prefixlb-relay-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let (_stub, backend) = start_stub().await?;
    let mut contenders = vec![
        direct(backend),
        prefixlb(&folder, &[backend]).await?,
        haproxy(&folder, backend).await?,
        nginx(&folder, backend).await?,
    ];
    match envoy(&folder, backend).await {
        Ok(envoy) => contenders.push(envoy),
        Err(error) => eprintln!("relay: without Envoy: {error}"),
    }
    let mut report = report_head(&contenders, args);
    let wanted = |name: &str| args.runs.is_empty() || args.runs.iter().any(|run| run == name);
    if wanted("stream") {
        for (count, events, ms) in [(100, 300, 10), (1000, 30, 100)] {
            let title = format!("{count} streams, a 130-byte event each every {ms} ms");
            let run = async |target| streams(target, count, events, ms).await;
            report += &table(&title, "event", &contenders, args.rounds, run).await?;
        }
    }
    if wanted("small") {
        let title = "Small keep-alive requests (600-byte chats), 16 connections";
        let run = async |target| closed_loop(target, 16, 600, Duration::from_secs(2)).await;
        report += &table(title, "request", &contenders, args.rounds, run).await?;
        let title = "The same, 1 connection";
        let run = async |target| closed_loop(target, 1, 600, Duration::from_secs(1)).await;
        report += &table(title, "request", &contenders, args.rounds, run).await?;
    }
    if wanted("prompts") {
        let title = "220 KB prompts, 4 connections";
        let run = async |target| closed_loop(target, 4, 220_000, Duration::from_secs(2)).await;
        report += &table(title, "request", &contenders, args.rounds, run).await?;
    }
    if wanted("memory") {
        report += &memory(&contenders).await?;
    }
    if wanted("start") {
        report += &start_time(&folder, backend).await?;
    }
    println!("{report}");
    if let Some(parent) = args.out.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(&args.out, report)?;
    fs::remove_dir_all(&folder)
}

async fn start_stub() -> io::Result<(Running, SocketAddr)> {
    let address = prefixlb_bench::run::free_address()?;
    let mut command = Command::new(std::env::current_exe()?);
    let child = command
        .args(["--stub", &address.port().to_string()])
        .spawn()?;
    let running = Running(child);
    wait_for_port(address).await?;
    Ok((running, address))
}

async fn wait_for_port(address: SocketAddr) -> io::Result<()> {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        match tokio::net::TcpStream::connect(address).await {
            Ok(_) => return Ok(()),
            Err(error) if Instant::now() > deadline => return Err(error),
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

/// Runs all contenders in turn, `rounds` times, and writes the table.
async fn table(
    title: &str,
    unit: &str,
    contenders: &[Contender],
    rounds: usize,
    run: impl AsyncFn(SocketAddr) -> io::Result<Round>,
) -> io::Result<String> {
    let mut cells: Vec<Cell> = contenders.iter().map(|_| Cell::default()).collect();
    for round in 0..=rounds {
        for (contender, cell) in contenders.iter().zip(&mut cells) {
            eprintln!("relay: {title}: round {round}: {}", contender.name);
            let before = contender.pid().map_or(0, on_cpu_ns);
            let mut seen = run(contender.target).await?;
            let spent = contender.pid().map_or(0, on_cpu_ns) - before;
            if round == 0 {
                continue; // warms up, and checks the answers
            }
            cell.cpu_us.push(spent as f64 / 1e3 / seen.count as f64);
            cell.rate
                .push(seen.count as f64 / seen.elapsed.as_secs_f64());
            cell.p50_us.push(seen.quantile(0.5).as_secs_f64() * 1e6);
            cell.p99_us.push(seen.quantile(0.99).as_secs_f64() * 1e6);
        }
    }
    let ours = contenders
        .iter()
        .position(|c| c.name == "prefixlb")
        .unwrap_or(0);
    let our_cpu = median(&cells[ours].cpu_us);
    let reference = median(&cells[0].rate);
    let mut text = format!(
        "\n## {title}\n\n| | CPU a {unit}, µs | prefixlb / it | {unit}s/s | of direct | p50, µs | p99, µs |\n| --- | --- | --- | --- | --- | --- | --- |\n"
    );
    for (contender, cell) in contenders.iter().zip(&cells) {
        let (cpu, rate) = (median(&cell.cpu_us), median(&cell.rate));
        let ratio = if contender.pid().is_some() {
            format!("{cpu:.2} | {:.2}", our_cpu / cpu)
        } else {
            "– | –".into()
        };
        text += &format!(
            "| {} | {ratio} | {rate:.0} | {:.2} | {:.0} | {:.0} |\n",
            contender.name,
            rate / reference,
            median(&cell.p50_us),
            median(&cell.p99_us)
        );
    }
    Ok(text)
}

async fn memory(contenders: &[Contender]) -> io::Result<String> {
    const STREAMS: usize = 1000;
    let mut text =
        format!("\n## {STREAMS} open streams\n\n| | KiB a stream, beyond idle |\n| --- | --- |\n");
    for contender in contenders {
        let Some(pid) = contender.pid() else { continue };
        let before = resident_kib(pid);
        let open = quiet_streams(contender.target, STREAMS).await?;
        let grown = resident_kib(pid).saturating_sub(before);
        drop(open);
        text += &format!(
            "| {} | {:.1} |\n",
            contender.name,
            grown as f64 / STREAMS as f64
        );
    }
    Ok(text)
}

/// From the start of the process to the first answer from a backend, with 64 of them.
async fn start_time(folder: &std::path::Path, backend: SocketAddr) -> io::Result<String> {
    let mut times = Vec::new();
    let backends: Vec<SocketAddr> = (0..64u8)
        .map(|i| SocketAddr::from(([127, 0, 1, i + 1], backend.port())))
        .collect();
    let _forwarders = forward(&backends, backend).await?;
    for _ in 0..5 {
        let start = Instant::now();
        let started = prefixlb(folder, &backends).await?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
        drop(started);
    }
    Ok(format!(
        "\n## Start to first served request, 64 backends\n\nprefixlb: {:.0} ms (median of {})\n",
        median(&times),
        times.len()
    ))
}

/// The stub listens on one address; these pass connections on from 64 more.
async fn forward(from: &[SocketAddr], to: SocketAddr) -> io::Result<tokio::task::JoinSet<()>> {
    let mut set = tokio::task::JoinSet::new();
    for address in from {
        let listener = tokio::net::TcpListener::bind(address).await?;
        set.spawn(async move {
            while let Ok((mut a, _)) = listener.accept().await {
                tokio::spawn(async move {
                    if let Ok(mut b) = tokio::net::TcpStream::connect(to).await {
                        let _ = tokio::io::copy_bidirectional(&mut a, &mut b).await;
                    }
                });
            }
        });
    }
    Ok(set)
}

fn report_head(contenders: &[Contender], args: &Args) -> String {
    let first = |path: &str, key: &str| {
        let text = fs::read_to_string(path).unwrap_or_default();
        let line = text
            .lines()
            .find(|line| line.starts_with(key))
            .unwrap_or_default()
            .to_owned();
        line.split(": ").nth(1).unwrap_or_default().to_owned()
    };
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let mut text = format!(
        "# prefixlb's data path beside others\n\nMachine: {}, {cores} cores, Linux {}. {} rounds of each in turn, medians; one thread each; load and stub run on the same cores, so rates are low for all. CPU is the balancer's alone (schedstat).\nCommand: `cargo xtask bench relay {}`\n\n",
        first("/proc/cpuinfo", "model name"),
        kernel.trim(),
        args.rounds,
        args.runs.join(" ")
    );
    for contender in contenders.iter().skip(1) {
        text += &format!("- {}: {}\n", contender.name, contender.version);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn a_median_is_in_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert!(median(&[]).is_nan());
    }
}
