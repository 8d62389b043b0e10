//! The official OpenAI client through prefixlb.

use std::process::Command;

use crate::harness::Config;
use crate::llama::{Engine, python, root};

#[test]
fn the_official_openai_client_works_unchanged() {
    let (a, b) = (Engine::start(), Engine::start());
    let mut config = Config::default().pool("models = [\"tiny\"]");
    for engine in [&a, &b] {
        config = config.backend_table(&format!("url = \"http://{}\"", engine.addr));
    }
    let proxy = config.start();
    let output = Command::new(python("openai"))
        .arg(root().join("bench/engines/openai_check.py"))
        .arg(format!("http://{}", proxy.addr))
        .output()
        .expect("python starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    for done in [
        "models",
        "plain",
        "stream",
        "abandoned stream",
        "error",
        "our own error",
    ] {
        assert!(
            text.lines().any(|line| line == format!("{done}: ok")),
            "{text}"
        );
    }
    proxy.wait_idle();
}
