//! The data path beside HAProxy, nginx and Envoy: CPU of the balancer alone, in one run.
//!
//! `cargo xtask bench relay [stream|small|prompts|memory|start]`

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use clap::Parser;
use prefixlb_bench::run::Running;
use prefixlb_bench::side::cpu::{on_cpu_ns, resident_kib};
use prefixlb_bench::side::drive::{self, Pace, requests};
use prefixlb_bench::side::proxies::{Contender, Ground, direct, envoy, haproxy, nginx, prefixlb};
use prefixlb_bench::side::streams::{self, quiet, streams};
use prefixlb_bench::side::stub;
use prefixlb_bench::side::table::{Cell, Round, against, against_better, median, rows, verdict};

/// Backends of every contender, so that a pick chooses.
const BACKENDS: usize = 4;
/// Backends of the start.
const MANY_BACKENDS: usize = 64;

#[derive(Debug, Parser)]
struct Args {
    /// Which runs: stream, small, prompts, memory, start; none: all
    #[arg(value_parser = ["stream", "small", "prompts", "memory", "start"])]
    runs: Vec<String>,
    /// Rounds of each contender; medians are shown
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u8).range(1..=50))]
    rounds: u8,
    /// Length of a timed round, milliseconds
    #[arg(long, default_value_t = 2000)]
    round_ms: u64,
    /// Leave it to the kernel where balancers, stub and load run
    #[arg(long)]
    no_pin: bool,
    /// Where the report goes; with some of the runs only, the default has their names
    #[arg(long)]
    out: Option<PathBuf>,
    /// Serve as the stub on so many free ports, told on standard output, and nothing else
    #[arg(long, hide = true)]
    stub: Option<usize>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let core = args.stub.is_none().then(|| pin(&args)).flatten();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let done = runtime.and_then(|runtime| {
        runtime.block_on(async {
            match args.stub {
                Some(ports) => serve_stub(ports).await,
                // Ended by a signal, it still drops, and so ends, what it started.
                None => tokio::select! {
                    done = compare(&args, core) => done,
                    () = told_to_end() => Err(io::Error::other("told to end")),
                },
            }
        })
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("relay: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Keeps this process, and the stub after it, off the last core, which is left to the balancer.
fn pin(args: &Args) -> Option<usize> {
    let last = std::thread::available_parallelism()
        .map_or(1, usize::from)
        .checked_sub(1)?;
    if args.no_pin || last == 0 {
        return None;
    }
    let others = format!("0-{}", last - 1);
    let mut command = Command::new("taskset");
    command.args(["-pc", &others, &std::process::id().to_string()]);
    let status = command.stdout(Stdio::null()).status();
    status.is_ok_and(|status| status.success()).then_some(last)
}

async fn told_to_end() {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut term), Ok(mut int)) = (
        signal(SignalKind::terminate()),
        signal(SignalKind::interrupt()),
    ) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
}

async fn serve_stub(ports: usize) -> io::Result<()> {
    let bind = |_| TcpListener::bind("127.0.0.1:0");
    let listeners: Vec<TcpListener> = (0..ports).map(bind).collect::<io::Result<_>>()?;
    let addresses: Vec<String> = listeners
        .iter()
        .map(|listener| Ok(listener.local_addr()?.to_string()))
        .collect::<io::Result<_>>()?;
    println!("{}", addresses.join(" "));
    stub::serve(listeners).await
}

fn start_stub() -> io::Result<(Running, Vec<SocketAddr>)> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--stub", &MANY_BACKENDS.to_string()]);
    let mut running = Running(command.stdout(Stdio::piped()).spawn()?);
    let mut line = String::new();
    if let Some(output) = running.0.stdout.take() {
        io::BufRead::read_line(&mut io::BufReader::new(output), &mut line)?;
    }
    let addresses: Result<Vec<SocketAddr>, _> = line.split_whitespace().map(str::parse).collect();
    let addresses = addresses.map_err(|error| io::Error::other(format!("{line:?}: {error}")))?;
    Ok((running, addresses))
}

/// One run of this program: what is compared, how, and what was found.
struct Bench {
    contenders: Vec<Contender>,
    folder: PathBuf,
    backends: Vec<SocketAddr>,
    core: Option<usize>,
    rounds: u8,
    lasting: Duration,
    report: String,
    verdicts: String,
}

async fn compare(args: &Args, core: Option<usize>) -> io::Result<()> {
    let folder = std::env::temp_dir().join(format!("prefixlb-relay-{}", std::process::id()));
    let (_stub, backends) = start_stub()?;
    let mut bench = Bench {
        contenders: Vec::new(),
        folder,
        backends,
        core,
        rounds: args.rounds,
        lasting: Duration::from_millis(args.round_ms),
        report: String::new(),
        verdicts: String::new(),
    };
    let done = bench.run(args).await;
    // It may not have come to be.
    let _ = fs::remove_dir_all(&bench.folder);
    done?;
    let text = format!(
        "{}\n| Target | bound | measured | holds |\n| --- | --- | --- | --- |\n{}{}",
        bench.head(args),
        bench.verdicts,
        bench.report
    );
    println!("{text}");
    let out = args.out.clone().unwrap_or_else(|| {
        let names = std::iter::once("relay").chain(args.runs.iter().map(String::as_str));
        let name = names.collect::<Vec<_>>().join("-");
        PathBuf::from(format!("bench/results/{name}.md"))
    });
    if let Some(parent) = out.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(out, text)
}

impl Bench {
    fn ground(&self, name: &str, backends: usize) -> Ground {
        Ground {
            folder: self.folder.join(name),
            backends: self.backends[..backends].to_vec(),
            core: self.core,
        }
    }

    async fn run(&mut self, args: &Args) -> io::Result<()> {
        self.contenders = self.start_contenders("long").await?;
        for contender in &self.contenders {
            let checked = match drive::check(contender.target).await {
                Ok(()) => streams::check(contender.target).await,
                Err(error) => Err(error),
            };
            checked.map_err(|error| wrong(contender, &error))?;
        }
        let wanted = |name: &str| args.runs.is_empty() || args.runs.iter().any(|run| run == name);
        if wanted("memory") {
            self.memory().await?;
        }
        if wanted("stream") {
            for (count, ms) in [(100, 10), (1000, 50)] {
                self.streams(count, ms).await?;
            }
        }
        if wanted("small") {
            self.small().await?;
        }
        if wanted("prompts") {
            self.prompts().await?;
        }
        if wanted("start") {
            self.start().await?;
        }
        Ok(())
    }

    /// All of them, each with a folder of its own below `name`.
    async fn start_contenders(&mut self, name: &str) -> io::Result<Vec<Contender>> {
        let ground = |of: &str| self.ground(&format!("{name}-{of}"), BACKENDS);
        let mut contenders = vec![
            direct(self.backends[0]),
            prefixlb(&ground("prefixlb")).await?,
            haproxy(&ground("haproxy")).await?,
            nginx(&ground("nginx")).await?,
        ];
        match envoy(&ground("envoy")).await {
            Ok(envoy) => contenders.push(envoy),
            Err(error) => {
                eprintln!("relay: without Envoy: {error}");
                self.report += &format!("\nEnvoy is missing from the tables: {error}.\n");
            }
        }
        Ok(contenders)
    }

    /// Every contender in turn, as often as there are rounds; the first round warms up.
    async fn rounds(
        &self,
        title: &str,
        run: impl AsyncFn(&Contender) -> io::Result<(Round, u64)>,
    ) -> io::Result<Vec<Cell>> {
        let cell = |contender: &Contender| Cell {
            name: contender.name,
            ..Cell::default()
        };
        let mut cells: Vec<Cell> = self.contenders.iter().map(cell).collect();
        for round in 0..=self.rounds {
            eprintln!("relay: {title}: round {round} of {}", self.rounds);
            for (contender, cell) in self.contenders.iter().zip(&mut cells) {
                let done = run(contender).await;
                let (seen, spent) = done.map_err(|error| wrong(contender, &error))?;
                if round > 0 {
                    cell.note(seen, contender.pid().map(|_| spent));
                }
            }
        }
        Ok(cells)
    }

    fn table(&mut self, title: &str, unit: &str, cells: &[Cell]) {
        self.report += &format!("\n## {title}\n\n{}", rows(unit, cells));
    }

    async fn streams(&mut self, count: usize, ms: u64) -> io::Result<()> {
        let title = format!("{count} streams, a 130-byte event each every {ms} ms");
        let lasting = self.lasting;
        let run = async |contender: &Contender| {
            let account = || contender.pid().map_or(0, on_cpu_ns);
            streams(contender.target, count, ms, lasting, account).await
        };
        let cells = self.rounds(&title, run).await?;
        self.table(&title, "event", &cells);
        self.report += "\nTimes are from the stub's write to the client's check. Events a read: ";
        let joined: Vec<String> = cells
            .iter()
            .map(|cell| format!("{} {:.2}", cell.name, median(&cell.joined)))
            .collect();
        self.report += &format!("{}.\n", joined.join(", "));
        self.verdicts += &verdict(
            &format!("CPU an event, {count} streams, of the better of HAProxy and nginx"),
            against_better(&cells, |cell| &cell.cpu_us),
            0.9,
            true,
        );
        self.times(&format!("{count} streams"), &cells);
        Ok(())
    }

    async fn small(&mut self) -> io::Result<()> {
        let closed = "Small keep-alive requests (600-byte chats)";
        for (what, connections, pace) in [
            ("16 connections", 16, Pace::Closed),
            ("1 connection", 1, Pace::Closed),
            ("16 connections, 4,000 a second", 16, Pace::Rate(4000)),
        ] {
            let title = format!("{closed}, {what}");
            let cells = self.requests(&title, connections, 600, pace).await?;
            self.table(&title, "request", &cells);
            self.verdicts += &verdict(
                &format!("CPU a small request, {what}, of the better of HAProxy and nginx"),
                against_better(&cells, |cell| &cell.cpu_us),
                1.0,
                true,
            );
            self.times(&format!("small, {what}"), &cells);
        }
        Ok(())
    }

    async fn prompts(&mut self) -> io::Result<()> {
        let title = "220 KB prompts, 4 connections";
        let cells = self.requests(title, 4, 220_000, Pace::Closed).await?;
        self.table(title, "request", &cells);
        self.verdicts += &verdict(
            "CPU a 220 KB prompt, of Envoy",
            against(&cells, "Envoy", |cell| &cell.cpu_us),
            1.0,
            true,
        );
        self.verdicts += &verdict(
            "220 KB prompts a second, of HAProxy",
            against(&cells, "HAProxy", |cell| &cell.rate),
            1.7,
            false,
        );
        Ok(())
    }

    async fn requests(
        &self,
        title: &str,
        connections: u64,
        bytes: usize,
        pace: Pace,
    ) -> io::Result<Vec<Cell>> {
        let run = async |contender: &Contender| {
            let before = contender.pid().map_or(0, on_cpu_ns);
            let round = requests(contender.target, connections, bytes, pace, self.lasting).await?;
            Ok((round, contender.pid().map_or(0, on_cpu_ns) - before))
        };
        self.rounds(title, run).await
    }

    /// Whole times, of which the direct one is a part for all: what we add is no more than what another adds just
    /// if our whole is no more than its whole, and differences of such small numbers would be noise.
    fn times(&mut self, what: &str, cells: &[Cell]) {
        type Read = fn(&Cell) -> &[f64];
        let quantiles: [(&str, Read); 2] =
            [("p50", |cell| &cell.p50_us), ("p99", |cell| &cell.p99_us)];
        for (name, value) in quantiles {
            let line = format!("{name}, {what}, of the better of HAProxy and nginx");
            self.verdicts += &verdict(&line, against_better(cells, value), 1.0, true);
        }
    }

    async fn memory(&mut self) -> io::Result<()> {
        const STREAMS: usize = 1000;
        self.report += &format!(
            "\n## {STREAMS} open streams\n\n| | idle, KiB | KiB a stream, beyond idle |\n| --- | --- | --- |\n"
        );
        let mut ours = f64::NAN;
        let fresh = self.start_contenders("memory").await?;
        for contender in fresh {
            let Some(pid) = contender.pid() else { continue };
            let before = resident_kib(pid);
            let open = quiet(contender.target, STREAMS).await;
            let open = open.map_err(|error| wrong(&contender, &error))?;
            let grown = resident_kib(pid).saturating_sub(before) as f64 / STREAMS as f64;
            drop(open);
            if contender.name == "prefixlb" {
                ours = grown;
            }
            self.report += &format!("| {} | {before} | {grown:.1} |\n", contender.name);
        }
        self.verdicts += &verdict("KiB an open stream, beyond idle", ours, 20.0, true);
        Ok(())
    }

    /// From the start of the process to the first answer from a backend.
    async fn start(&mut self) -> io::Result<()> {
        let mut times: [Vec<f64>; 3] = Default::default();
        for round in 0..=self.rounds {
            eprintln!("relay: start: round {round} of {}", self.rounds);
            for (number, times) in times.iter_mut().enumerate() {
                let ground = self.ground(&format!("start-{round}-{number}"), MANY_BACKENDS);
                let started = match number {
                    0 => prefixlb(&ground).await?,
                    1 => haproxy(&ground).await?,
                    _ => nginx(&ground).await?,
                };
                times.push(started.started_in.as_secs_f64());
            }
        }
        let [ours, haproxy, nginx] = times.map(|times| median(&times));
        self.report += &format!(
            "\n## Start to first served request, {MANY_BACKENDS} backends\n\n| | s |\n| --- | --- |\n\
             | prefixlb | {ours:.3} |\n| HAProxy | {haproxy:.3} |\n| nginx | {nginx:.3} |\n"
        );
        self.verdicts += &verdict("start to first served request, s", ours, 0.2, true);
        Ok(())
    }

    fn head(&self, args: &Args) -> String {
        let cpu = field_of(Path::new("/proc/cpuinfo"), "model name");
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let cores = std::thread::available_parallelism().map_or(0, usize::from)
            + usize::from(self.core.is_some());
        let day = Command::new("date").arg("+%F %R %Z").output();
        let day = day.map_or_else(
            |_| String::new(),
            |o| String::from_utf8_lossy(&o.stdout).trim().to_owned(),
        );
        let place = match self.core {
            Some(core) => format!("The balancer has core {core} to itself, stub and load the rest"),
            None => "Balancer, stub and load share all cores".into(),
        };
        let mut text = format!(
            "# prefixlb's data path beside others\n\nMachine: {cpu}, {cores} cores, Linux {}. {day}.\n\
             Command: `cargo xtask bench relay {}`\n\n\
             {} rounds of {} ms of each contender in turn; medians, and of ratios the median of each round's \
             (least–greatest). One thread each, {BACKENDS} backends. {place}. CPU is the balancer's alone, by the \
             scheduler's account of its threads. Every answer was checked.\n\n",
            kernel.trim(),
            args.runs.join(" "),
            self.rounds,
            self.lasting.as_millis(),
        );
        for contender in self.contenders.iter().filter(|c| c.process.is_some()) {
            text += &format!("- {}: {}\n", contender.name, contender.version);
        }
        text
    }
}

fn wrong(contender: &Contender, error: &io::Error) -> io::Error {
    io::Error::other(format!("through {}: {error}", contender.name))
}

/// The value of the first line with this name, of files such as `/proc/cpuinfo`.
fn field_of(path: &Path, name: &str) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with(name));
    let value = line.and_then(|line| line.split(": ").nth(1));
    value.unwrap_or("unknown").to_owned()
}
