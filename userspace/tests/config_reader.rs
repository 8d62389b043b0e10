//! The configuration reader from outside: what is typed, what is meant, and what is said of mistakes.

use std::path::Path;

use prefixlb::config::{
    BackendSettings, GateKind, HashOn, PolicyKind, PoolSettings, SessionFrom, Settings, read,
    read_file,
};
use proptest::prelude::*;

const MINIMAL: &str = "[[pool]]\nname = 'p'\n[[pool.backend]]\nurl = 'http://127.0.0.1:8000'\n";

fn backend(port: u16) -> BackendSettings {
    BackendSettings {
        name: format!("127.0.0.1:{port}"),
        host: "127.0.0.1".into(),
        port,
        weight: 1.0,
        max_active: None,
    }
}

/// The sentence that `text` earns; its place first.
fn refused(text: &str) -> String {
    let said = read(text, "f.toml").expect_err(text).to_string();
    assert!(!said.contains('\n'), "more than a line: {said}");
    said
}

#[test]
fn the_example_shows_every_default() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/prefixlb.toml");
    let mut example = read_file(&path).expect("the example is right");
    assert_eq!(example.source.take().as_deref(), Some(&*path));
    let pool = PoolSettings::new("default", vec![backend(8000), backend(8001)]);
    assert_eq!(example, Settings::new(vec![pool]));

    // Shown: each key that the reader knows stands in the example, if only in a comment.
    let text = std::fs::read_to_string(&path).expect("still there");
    let shown = |key: &&str| {
        let mut lines = text.lines().map(|line| line.trim_start_matches("# "));
        lines.any(|line| line.starts_with(&format!("{key} = ")))
    };
    for table in [
        "",
        "[http]",
        "[key]",
        "[log]",
        "[admin]",
        "[defaults.policy]",
        "[defaults.health]",
        "[defaults.signals]",
        "[[pool]]",
        "[[pool]]\nname='p'\n[[pool.backend]]",
    ] {
        let said = refused(&format!("{table}\nqqqqqqqqqqqqqqq = 1\n"));
        let (_, known) = said.split_once("known here are ").expect(&said);
        let tables = [
            "admin", "http", "key", "log", "defaults", "pool", "policy", "health", "signals",
            "backend",
        ];
        let hidden: Vec<&str> = known
            .split(", ")
            .filter(|key| !tables.contains(key) && !shown(key))
            .collect();
        assert!(hidden.is_empty(), "{table}: not in the example: {hidden:?}");
    }
}

#[test]
fn a_minimal_file_means_the_defaults() {
    let settings = read(MINIMAL, "f.toml").expect("right");
    let pool = PoolSettings::new("p", vec![backend(8000)]);
    assert_eq!(settings, Settings::new(vec![pool]));
}

#[test]
fn what_is_typed_is_what_is_meant() {
    let text = r#"
        listen = ["0.0.0.0:80", "[::1]:81"]
        workers = 3
        drain_limit = "1m 30s"
        [admin]
        listen = "0.0.0.0:9090"
        token = "s3cret"
        [http]
        head_bytes = "8KiB"
        body_bytes = 1000
        [defaults.policy]
        threshold = 0.6
        [defaults.health]
        fall = 7
        [[pool]]
        name = "a"
        models = ["m1", "m2"]
        [pool.policy]
        kind = "consistent-hash"
        gate = "absolute"
        hash_on = "header:X-User"
        session = "cookie:Sid"
        tau = 5
        [[pool.backend]]
        url = "http://[fe80::1%25lo]:9001"
        weight = 2
        max_active = 8
        [[pool]]
        name = "b"
        [pool.policy]
        threshold = 1
        [[pool.backend]]
        url = "[::1]:9002"
        name = "two"
    "#;
    let settings = read(text, "f.toml").expect("right");
    assert_eq!(settings.listen.len(), 2);
    assert_eq!((settings.workers, settings.drain_limit.as_secs()), (3, 90));
    assert_eq!(settings.admin.token.as_deref(), Some("s3cret"));
    assert_eq!(
        (settings.http.head_bytes, settings.http.body_bytes),
        (8192, 1000)
    );
    let [a, b] = &settings.pools[..] else {
        panic!("two pools")
    };
    assert_eq!(a.models, ["m1", "m2"]);
    assert_eq!(a.policy.kind, PolicyKind::ConsistentHash);
    assert_eq!(a.policy.gate, GateKind::Absolute);
    assert_eq!(a.policy.hash_on, HashOn::Header("x-user".into()));
    assert_eq!(a.policy.session, SessionFrom::Cookie("Sid".into()));
    assert_eq!((a.policy.tau, a.policy.threshold), (Some(5), 0.6));
    assert_eq!((b.policy.tau, b.policy.threshold), (None, 1.0));
    assert_eq!((a.health.fall, b.health.fall), (7, 7));
    let first = &a.backends[0];
    assert_eq!(
        (&*first.host, first.port, first.weight),
        ("fe80::1%lo", 9001, 2.0)
    );
    assert_eq!(first.max_active, Some(8));
    assert_eq!((&*b.backends[0].host, &*b.backends[0].name), ("::1", "two"));
}

/// `(what stands before the minimal file's pool, or within it; place; words of the sentence)`.
#[test]
fn a_mistake_earns_one_sentence_with_its_place() {
    for (text, place, says) in [
        ("", "1:1", "no pool is configured"),
        ("[[pool]]\nname = 'p'", "2:8", "pool p has no backend"),
        ("[[pool]]\nmodels = []", "1:1", "missing field `name`"),
        ("listne = 'x'", "1:1", "did you mean \"listen\"?"),
        (
            "[http]\nheadbytes = 1",
            "2:1",
            "did you mean \"head_bytes\"?",
        ),
        ("[http]\ncolour = 1", "2:1", "known here are head_bytes"),
        (
            "workers = 'two'",
            "1:11",
            "workers: invalid type: string \"two\"",
        ),
        (
            "workers = 0",
            "1:11",
            "workers: 0 is out of range: from 1 to 256",
        ),
        ("workers = 1\nworkers = 2", "2:1", "duplicate key"),
        (
            "listen = 7",
            "1:10",
            "listen: invalid type: integer `7`, expected a string or a list",
        ),
        ("listen = []", "1:10", "listen is empty"),
        (
            "listen = 'localhost:80'",
            "1:10",
            "listen: \"localhost:80\" is not an address",
        ),
        (
            "listen = ['127.0.0.1:80', 'x']",
            "1:27",
            "listen: \"x\" is not an address",
        ),
        ("kernel = 'maybe'", "1:10", "one of auto, off, require"),
        (
            "drain_limit = '30'",
            "1:15",
            "drain_limit: \"30\" is not a duration",
        ),
        ("drain_limit = 30", "1:15", "invalid type: integer `30`"),
        ("drain_limit = '9000h'", "1:15", "out of range"),
        (
            "[http]\nhead_bytes = '64K'",
            "2:14",
            "http.head_bytes: \"64K\" is not a size",
        ),
        ("[http]\nhead_bytes = -1", "2:14", "-1 is negative"),
        (
            "[http]\nhead_bytes = true",
            "2:14",
            "expected a number of bytes or a size",
        ),
        (
            "[log]\nsample = 1.5",
            "2:10",
            "log.sample: 1.5 is out of range: from 0 to 1",
        ),
        ("[log]\nformat = 'xml'", "2:10", "one of json, logfmt, off"),
        (
            "[defaults.policy]\nthreshold = 2",
            "2:13",
            "defaults.policy.threshold: 2 is out",
        ),
        ("[defaults.policy]\nthreshold = nan", "2:13", "out of range"),
        (
            "[defaults.policy]\nkind = 'stikcy'",
            "2:8",
            "one of sticky, round-robin",
        ),
        (
            "[defaults.policy]\nweights = [0, 0, 0]",
            "2:11",
            "weights are three numbers",
        ),
        (
            "[defaults.policy]\nweights = [1, 2]",
            "2:11",
            "weights are three numbers",
        ),
        (
            "[defaults.policy]\nhash_on = 'ip'",
            "2:11",
            "\"key\", \"session\" or \"header:NAME\"",
        ),
        (
            "[defaults.health]\npath = 'health'",
            "2:8",
            "must begin with /",
        ),
        ("[key]\nheader = 'a b'", "2:10", "not a valid field name"),
        (
            "[admin]\nlisten = '0.0.0.0:9090'",
            "2:10",
            "set admin.token",
        ),
        (
            "[admin]\nlisten = '127.0.0.1:8080'",
            "2:10",
            "clashes with listen 127.0.0.1:8080",
        ),
        (
            "listen = ['127.0.0.1:80', '0.0.0.0:80']",
            "1:27",
            "0.0.0.0:80 clashes with 127.0.0.1:80",
        ),
        ("[admin]\ntoken = ''", "2:9", "visible ASCII"),
        ("x = [[[", "3:1", "missing comma"),
        ("\"\u{e9}\u{e9}\" = 1", "1:1", "unknown key \"éé\""),
    ] {
        let tail = if text.is_empty() || text.starts_with("[[pool]]") {
            ""
        } else {
            MINIMAL
        };
        let said = refused(&format!("{text}\n{tail}"));
        assert!(
            said.starts_with(&format!("f.toml:{place}: ")),
            "{text:?}: {said}"
        );
        assert!(said.contains(says), "{text:?}: {said}");
    }
}

#[test]
fn a_mistake_in_a_backend_is_found_where_it_stands() {
    for (more, place, says) in [
        (
            "weight = 0",
            "5:10",
            "pool.backend.weight: 0 is out of range",
        ),
        ("weight = -1", "5:10", "-1 is out of range"),
        ("weight = nan", "5:10", "NaN is out of range"),
        ("weight = inf", "5:10", "inf is out of range"),
        ("max_active = 0", "5:14", "from 1 to"),
        ("name = ''", "5:8", "cannot name a backend"),
        ("wieght = 1", "5:1", "did you mean \"weight\"?"),
        (
            "[[pool.backend]]\nurl = 'http://127.0.0.1:8000'",
            "6:7",
            "two backends named",
        ),
        (
            "[[pool.backend]]\nurl = '127.0.0.1:8000'\nname = 'x'",
            "6:7",
            "127.0.0.1:8000 twice",
        ),
        (
            "name = 'x'\n[[pool.backend]]\nurl = 'a:1'\nname = 'x'",
            "8:8",
            "two backends named x",
        ),
        ("[[pool.backend]]\nurl = 'https://a:1'", "6:7", "TLS"),
        ("[[pool.backend]]\nurl = 'http://a'", "6:7", "no port"),
        (
            "[[pool.backend]]\nurl = 'http://u@a:1'",
            "6:7",
            "more than host and port",
        ),
        ("[[pool]]\nname = 'p'", "6:8", "two pools named \"p\""),
        (
            "[[pool]]\nname = 'q'\n[[pool.backend]]\nurl = 'a:1'",
            "6:8",
            "pool q is never reached",
        ),
    ] {
        let said = refused(&format!("{MINIMAL}{more}\n"));
        assert!(
            said.starts_with(&format!("f.toml:{place}: ")),
            "{more:?}: {said}"
        );
        assert!(said.contains(says), "{more:?}: {said}");
    }
    let mut many = "[[pool]]\nname = 'p'\n".to_owned();
    for port in 1..=1025 {
        many.push_str(&format!(
            "[[pool.backend]]\nurl = 'http://10.0.0.1:{port}'\n"
        ));
    }
    assert!(
        refused(&many).contains("room for 1024"),
        "{}",
        refused(&many)
    );
}

#[test]
fn an_absent_file_is_named() {
    let said = read_file(Path::new("/nonexistent/p.toml"))
        .expect_err("absent")
        .to_string();
    assert!(
        said.starts_with("/nonexistent/p.toml: cannot be read: "),
        "{said}"
    );
}

/// Bits of configuration, so that random files get past the parser.
fn piece() -> impl Strategy<Value = String> {
    let key = prop::sample::select(vec![
        "listen",
        "workers",
        "kernel",
        "drain_limit",
        "name",
        "url",
        "weight",
        "tau",
        "threshold",
        "weights",
        "head_bytes",
        "models",
        "paths",
        "token",
        "kind",
        "sample",
        "max_active",
        "header",
        "session",
        "x",
    ]);
    let value = prop_oneof![
        any::<i64>().prop_map(|n| n.to_string()),
        any::<f64>().prop_map(|n| format!("{n:?}").replace("NaN", "nan")),
        any::<bool>().prop_map(|b| b.to_string()),
        "\\PC{0,20}".prop_map(|text| format!("'{}'", text.replace('\'', ""))),
        "(http://)?[a-z\\[\\]:%.0-9@/]{0,16}".prop_map(|text| format!("\"{text}\"")),
        "[0-9]{1,22}(ms|s|h|KiB|GiB|y)?".prop_map(|text| format!("\"{text}\"")),
        Just("[1, 2, 3]".to_owned()),
        Just("['a', 'b']".to_owned()),
        Just("{ x = 1 }".to_owned()),
    ];
    prop_oneof![
        (key, value).prop_map(|(key, value)| format!("{key} = {value}\n")),
        prop::sample::select(vec![
            "[[pool]]\n",
            "[[pool.backend]]\n",
            "[pool.policy]\n",
            "[admin]\n",
            "[http]\n",
            "[log]\n",
            "[key]\n",
            "[defaults.policy]\n",
            "[defaults.health]\n",
            "[defaults.signals]\n",
        ])
        .prop_map(str::to_owned),
        "\\PC{0,30}\n".prop_map(|text| text),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_file_makes_the_reader_panic(pieces in prop::collection::vec(piece(), 0..12)) {
        if let Err(error) = read(&pieces.concat(), "f.toml") {
            let said = error.to_string();
            prop_assert!(said.starts_with("f.toml:") && !said.contains('\n'), "{}", said);
        }
    }

    #[test]
    fn a_broken_example_is_refused_or_read_but_never_a_panic(at in 0usize..7000, with in "\\PC{0,3}") {
        let good = include_str!("../../deploy/prefixlb.toml");
        let at = (0..=at.min(good.len())).rev().find(|at| good.is_char_boundary(*at)).unwrap_or(0);
        let rest = good[at..].chars().next().map_or(0, char::len_utf8);
        let _ = read(&format!("{}{with}{}", &good[..at], &good[at + rest..]), "f.toml");
    }
}
