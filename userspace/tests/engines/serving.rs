//! Answers, cache hits and cancellation, by the engines' own counters.

use serde_json::{Value, json};

use crate::harness::{Client, Config, Proxy, eventually, request};
use crate::llama::Engine;

fn start(engines: &[&Engine]) -> Proxy {
    let mut config = Config::default().policy("kind = \"sticky\"");
    for (i, engine) in engines.iter().enumerate() {
        config = config.backend_table(&format!(
            "name = \"e{i}\"\nurl = \"http://{}\"",
            engine.addr
        ));
    }
    config.start()
}

fn chat(messages: &[Value], extra: Value) -> String {
    let mut body = json!({"model":"tiny","messages":messages,"max_tokens":8,"ignore_eos":true});
    for (name, value) in extra.as_object().into_iter().flatten() {
        body[name] = value.clone();
    }
    let fields = ["Content-Type: application/json"];
    request("POST", "/v1/chat/completions", &fields, &body.to_string())
}

fn user(text: &str) -> Value {
    json!({"role":"user","content":text})
}

#[test]
fn plain_and_streamed_answers_come_through() {
    let (a, b) = (Engine::start(), Engine::start());
    let proxy = start(&[&a, &b]);
    let plain = proxy.exchange(chat(&[user("hello")], json!({})));
    assert_eq!(plain.status, 200, "{}", plain.head);
    let answer: Value = serde_json::from_slice(&plain.body).expect("JSON");
    assert_eq!(answer["usage"]["completion_tokens"], 8);
    let streamed = proxy.exchange(chat(&[user("hello")], json!({"stream":true})));
    let text = String::from_utf8_lossy(&streamed.body).into_owned();
    assert!(text.matches("data: ").count() >= 8, "{text}");
    assert!(text.trim_end().ends_with("data: [DONE]"), "{text}");
    let models = proxy.exchange(request("GET", "/v1/models", &[], ""));
    assert!(models.text().contains("tiny"), "{}", models.text());
    proxy.wait_idle();
}

#[test]
fn the_second_turn_hits_the_engines_own_cache() {
    let (a, b) = (Engine::start(), Engine::start());
    let proxy = start(&[&a, &b]);
    let cached = |engine: &Engine| engine.metric("llamacpp:prompt_tokens_cached_total");
    for dialogue in 0..4 {
        let document = format!("document {dialogue}: the quick brown fox. ").repeat(60);
        let mut messages = vec![user(&document)];
        let before = cached(&a) + cached(&b);
        let first = proxy.exchange(chat(&messages, json!({})));
        assert_eq!(first.status, 200, "{}", first.text());
        let answer: Value = serde_json::from_slice(&first.body).expect("JSON");
        messages.push(answer["choices"][0]["message"].clone());
        messages.push(user("go on"));
        let second = proxy.exchange(chat(&messages, json!({})));
        assert_eq!(second.backend(), first.backend(), "the warm engine");
        let answer: Value = serde_json::from_slice(&second.body).expect("JSON");
        let usage = &answer["usage"];
        let hit = usage["prompt_tokens_details"]["cached_tokens"].as_f64();
        let prompt = usage["prompt_tokens"].as_f64().expect("a count");
        assert!(hit.expect("a count") > 0.8 * prompt, "{usage}");
        assert!(cached(&a) + cached(&b) > before + 0.8 * prompt);
    }
    let matched = proxy.metric("prefixlb_backend_matched_tokens_total", &[]);
    assert!(matched > 0.0, "prefixlb's own estimate saw hits too");
}

#[test]
fn a_client_that_leaves_stops_the_generation() {
    let engine = Engine::start();
    let proxy = start(&[&engine]);
    let long = json!({"stream":true,"max_tokens":4000});
    let mut client: Client = proxy.client();
    client.send(chat(&[user("count")], long));
    assert_eq!(client.read_head().status, 200);
    client.read_chunk().expect("a first event");
    assert_eq!(engine.metric("llamacpp:requests_processing"), 1.0);
    let made = || engine.metric("llamacpp:tokens_predicted_total");
    drop(client);
    eventually("the engine stops", || {
        engine.metric("llamacpp:requests_processing") == 0.0
    });
    assert!(made() < 3900.0, "it was stopped and did not just finish");
    proxy.wait_idle();
    assert_eq!(
        proxy.metric("prefixlb_backend_client_aborts_total", &[]),
        1.0
    );
}

#[test]
fn an_engine_that_dies_within_an_answer_is_a_broken_transfer() {
    let engine = Engine::start();
    let proxy = start(&[&engine]);
    let long = json!({"stream":true,"max_tokens":4000});
    let mut client = proxy.client();
    client.send(chat(&[user("count")], long));
    assert_eq!(client.read_head().status, 200);
    client.read_chunk().expect("a first event");
    drop(engine);
    let rest = client.read_to_end();
    assert!(!rest.ends_with(b"0\r\n\r\n"), "never a clean end");
    proxy.wait_failures("upstream_truncated", 1);
}
