//! Key and pick against what others do with the same bytes, and the ratios that must hold.
//!
//! `cargo bench -p prefixlb-bench --bench picker` times each; before that, and even if nothing is timed, the
//! answers are checked: a fast wrong key is worth nothing.

use std::hint::black_box;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use prefixlb::config::{BackendSettings, KeySettings, PoolSettings};
use prefixlb::picker::key::{Shape, from_header};
use prefixlb::picker::{KeyParser, Ledger, Member, PickRequest, Picker, PrefixKey, SignalTable};
use prefixlb_bench::ratio::Table;
use xxhash_rust::xxh3::xxh3_64;

const BACKENDS: u16 = 16;
const WINDOW: usize = 16 << 10;

/// A chat as an agent sends it: a system prompt, then turns; escapes every line.
fn chat(bytes: usize) -> String {
    let mut messages = vec![serde_json::json!({"role": "system", "content": prose(2000, 0)})];
    let mut turn = 1;
    loop {
        for role in ["user", "assistant"] {
            messages.push(serde_json::json!({"role": role, "content": prose(900, turn)}));
            turn += 1;
        }
        let body = serde_json::json!({
            "model": "some-org/some-model-32b", "stream": true, "temperature": 0.7,
            "messages": messages,
        })
        .to_string();
        if body.len() >= bytes {
            return body;
        }
    }
}

/// Real prose and real code, as dialogues about code have them: this project's own.
fn prose(bytes: usize, seed: usize) -> String {
    let texts = [
        include_str!("../../ARCHITECTURE.md"),
        include_str!("../../userspace/src/proxy/exchange.rs"),
        include_str!("../../LICENSE-APACHE"),
        include_str!("../../userspace/src/picker/index.rs"),
    ];
    let text = texts[seed % texts.len()];
    let cut = |at: usize| (at % text.len()..).find(|at| text.is_char_boundary(*at));
    let start = cut(seed * 977).unwrap_or(0);
    let end = cut(start + bytes).filter(|end| *end > start);
    format!("part {seed}: {}", &text[start..end.unwrap_or(text.len())])
}

/// A pool with a warm index, and the parser of one worker.
struct Bench {
    picker: Picker,
    members: Vec<Member>,
    ledger: Ledger,
    signals: SignalTable,
}

impl Bench {
    fn new() -> Self {
        use prefixlb_common::ledger::{STATE_HEALTHY, STATE_PRESENT, WEIGHT_ONE};
        let backend = BackendSettings {
            name: "b".into(),
            host: "b".into(),
            port: 1,
            weight: 1.0,
            max_active: None,
        };
        let pool = PoolSettings::new("p", vec![backend]);
        let ledger = Ledger::in_process();
        for slot in 0..BACKENDS {
            let cell = ledger.cell(slot);
            cell.state.store(STATE_PRESENT | STATE_HEALTHY, Relaxed);
            cell.weight.store(WEIGHT_ONE, Relaxed);
            cell.tau.store(pool.policy.effective_tau(), Relaxed);
        }
        let members = (0..BACKENDS).map(|slot| Member {
            slot,
            identity: xxh3_64(&slot.to_le_bytes()),
            weight: WEIGHT_ONE,
        });
        let bench = Self {
            picker: Picker::new(&pool, &KeySettings::default()),
            members: members.collect(),
            ledger,
            signals: SignalTable::default(),
        };
        bench.picker.set_members(&bench.members);
        bench
    }

    /// What the proxy does for a request: pick, charge, learn, give back.
    fn pick(&self, key: &PrefixKey, random: u64) -> u16 {
        let request = PickRequest {
            key: Some(key),
            session: None,
            prompt_tokens: 4096,
            tried: &[],
            now_ms: 0,
            random,
        };
        let pick = self
            .picker
            .pick(&request, &self.members, &self.ledger, &self.signals)
            .expect("a backend");
        let charge = self.ledger.try_charge(pick.slot, pick.uncached_tokens);
        self.picker.learn(key, pick.slot);
        drop(charge);
        pick.slot
    }
}

/// Time of one call: the least of many short runs, which is what the work itself takes.
fn time(mut call: impl FnMut()) -> Duration {
    const RUNS: u32 = 60;
    const CALLS: u32 = 50;
    let run = |call: &mut dyn FnMut()| {
        let start = Instant::now();
        (0..CALLS).for_each(|_| call());
        start.elapsed() / CALLS
    };
    (0..RUNS).map(|_| run(&mut call)).min().unwrap_or_default()
}

fn ratios() {
    let bench = Bench::new();
    let mut parser = KeyParser::new(&KeySettings::default());
    let mut key = PrefixKey::default();
    let large = chat(400_000);
    let large = large.as_bytes();
    let window = &large[..WINDOW];
    // serde_json needs a whole document; this one just fits the window.
    let whole = chat(WINDOW - 2200);
    let whole = whole.as_bytes();
    assert!(whole.len() <= WINDOW && whole.len() > WINDOW - 2200);
    check(&mut parser, whole);

    let mut key_and_pick = |window: &[u8], is_whole: bool| {
        time(|| {
            parser
                .parse(Shape::Chat, black_box(window), is_whole, &mut key)
                .expect("a key");
            black_box(bench.pick(&key, 1));
        })
    };
    let ours = key_and_pick(whole, true);
    let ours_window = key_and_pick(window, false);
    let ours_large = key_and_pick(&large[..WINDOW], false);
    let tree = |body: &[u8]| {
        time(|| {
            black_box(serde_json::from_slice::<serde_json::Value>(black_box(body)).expect("JSON"));
        })
    };
    let (tree_small, tree_large) = (tree(whole), tree(large));
    let hash = time(|| {
        black_box(xxh3_64(black_box(window)));
    });
    let head = HEAD.as_bytes();
    let httparse = time(|| {
        let mut fields = [httparse::EMPTY_HEADER; 64];
        let mut request = httparse::Request::new(&mut fields);
        black_box(request.parse(black_box(head)).expect("a head"));
    });
    let header = time(|| {
        assert!(from_header(black_box(b"9f86d081884c7d65"), &mut key));
        black_box(&key);
    });
    let header_pick = time(|| {
        assert!(from_header(black_box(b"9f86d081884c7d65"), &mut key));
        black_box(bench.pick(&key, 1));
    });

    let mut table = Table::new("Key and pick, 16 backends, window 16 KiB");
    table.row(
        "16 KiB body: key + pick / serde_json Value",
        ours,
        tree_small,
        Some(0.25),
    );
    table.row(
        "400 KB body: key + pick / serde_json Value",
        ours_large,
        tree_large,
        Some(0.02),
    );
    table.row(
        "16 KiB window: key + pick / one xxh3_64 pass",
        ours_window,
        hash,
        Some(6.0),
    );
    table.row(
        "header key / httparse of the head",
        header,
        httparse,
        Some(0.5),
    );
    table.row(
        "header key + pick / httparse of the head",
        header_pick,
        httparse,
        None,
    );
    let (one, two) = (picks_per_second(1), picks_per_second(2));
    table.rate("picks/s: two threads / one", two, one, 1.8);
    table.print();
    let place = concat!(env!("CARGO_MANIFEST_DIR"), "/results/picker.md");
    let head = prefixlb_bench::run::provenance("cargo xtask bench picker");
    let (title, rows) = table
        .text()
        .split_once("\n\n")
        .map(|(a, b)| (a.to_owned(), b.to_owned()))
        .expect("a table");
    std::fs::write(place, format!("# {title}\n\n{head}\n{rows}"))
        .expect("bench/results can be written");
}

fn check(parser: &mut KeyParser, body: &[u8]) {
    let (mut a, mut b) = (PrefixKey::default(), PrefixKey::default());
    parser
        .parse(Shape::Chat, body, true, &mut a)
        .expect("a key");
    let value: serde_json::Value = serde_json::from_slice(body).expect("JSON");
    let pretty = serde_json::to_vec_pretty(&value).expect("JSON");
    let wide = KeySettings {
        window_bytes: 1 << 20,
        ..KeySettings::default()
    };
    KeyParser::new(&wide)
        .parse(Shape::Chat, &pretty, true, &mut b)
        .expect("a key");
    assert_eq!(a.chain(), b.chain(), "the same prompt, written otherwise");
}

/// Picks of distinct conversations, by so many threads at once.
fn picks_per_second(threads: usize) -> f64 {
    let bench = Bench::new();
    let body = chat(WINDOW);
    let stop = std::sync::atomic::AtomicBool::new(false);
    let picks: u64 = std::thread::scope(|scope| {
        let work = |id: usize| {
            let (bench, stop, body) = (&bench, &stop, &body);
            move || {
                let mut parser = KeyParser::new(&KeySettings::default());
                let mut key = PrefixKey::default();
                let body = body.replace("part 1:", &format!("part {id}:"));
                let window = &body.as_bytes()[..WINDOW];
                let mut picks = 0;
                while !stop.load(Relaxed) {
                    parser
                        .parse(Shape::Chat, window, false, &mut key)
                        .expect("a key");
                    black_box(bench.pick(&key, picks));
                    picks += 1;
                }
                picks
            }
        };
        let workers: Vec<_> = (0..threads).map(|id| scope.spawn(work(id))).collect();
        std::thread::sleep(Duration::from_millis(800));
        stop.store(true, Relaxed);
        workers
            .into_iter()
            .map(|w| w.join().expect("no panic"))
            .sum()
    });
    picks as f64 / 0.8
}

const HEAD: &str = "POST /v1/chat/completions HTTP/1.1\r\nHost: lb.example:8080\r\n\
Accept: application/json\r\nAccept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\n\
User-Agent: OpenAI/Python 1.99.1\r\nX-Stainless-Lang: python\r\nX-Stainless-OS: Linux\r\n\
X-Stainless-Arch: x64\r\nX-Stainless-Runtime: CPython\r\nAuthorization: Bearer sk-0123456789abcdef\r\n\
x-prefix-hash: 9f86d081884c7d65\r\nContent-Type: application/json\r\nContent-Length: 612\r\n\r\n";

fn benches(criterion: &mut Criterion) {
    ratios();
    let bench = Bench::new();
    let mut parser = KeyParser::new(&KeySettings::default());
    let mut key = PrefixKey::default();
    let body = chat(WINDOW);
    let window = &body.as_bytes()[..WINDOW];
    let mut group = criterion.benchmark_group("picker");
    group
        .sample_size(20)
        .measurement_time(Duration::from_secs(1));
    group.bench_function("key of a 16 KiB window", |b| {
        b.iter(|| parser.parse(Shape::Chat, black_box(window), false, &mut key));
    });
    group.bench_function("pick, 16 backends, 60 blocks", |b| {
        b.iter(|| bench.pick(black_box(&key), 1));
    });
    group.finish();
}

criterion_group!(picker, benches);
criterion_main!(picker);
