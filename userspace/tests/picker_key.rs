//! The prefix key: what must and what must not change it, and that no bytes harm it.

use prefixlb::config::KeySettings;
use prefixlb::picker::key::{NoKey, Shape, from_header};
use prefixlb::picker::{KeyParser, PrefixKey};
use proptest::prelude::*;
use serde_json::{Value, json};

fn parser() -> KeyParser {
    KeyParser::new(&KeySettings::default())
}

fn parse(shape: Shape, body: &[u8], whole: bool) -> Result<Vec<u64>, NoKey> {
    let mut key = PrefixKey::default();
    parser().parse(shape, body, whole, &mut key)?;
    Ok(key.chain().to_vec())
}

fn key(shape: Shape, body: &str) -> Vec<u64> {
    parse(shape, body.as_bytes(), true).unwrap_or_else(|why| panic!("{why:?} for {body}"))
}

fn chat(body: &Value) -> Vec<u64> {
    key(Shape::Chat, &body.to_string())
}

/// Blocks that two keys have in common from the start.
fn common(a: &[u64], b: &[u64]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[test]
fn a04_how_a_request_is_written_does_not_change_its_key() {
    let plain = r#"{"model":"m","messages":[{"role":"user","content":"café a/b"}]}"#;
    let want = key(Shape::Chat, plain);
    for same in [
        r#"{"messages":[{"role":"user","content":"café a/b"}],"model":"m"}"#,
        r#"{"model":"m","messages":[{"content":"café a/b","role":"user"}]}"#,
        r#"{"model":"m","messages":[{"role":"user","content":"caf\u00e9 a\/b"}]}"#,
        r#"{"model":"m","messages":[{"role":"user","content":"caf\u00E9 a/b"}]}"#,
        "{ \"model\" : \"m\" ,\r\n\t\"messages\" : [ { \"role\" : \"user\" , \"content\" : \"café a/b\" } ] }\n",
        r#"{"stream":true,"temperature":0.2,"max_tokens":9,"user":"u","model":"m","messages":[{"role":"user","content":"café a/b"}]}"#,
        r#"{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"café a/b"}]}]}"#,
        r#"{"model":"m","messages":[{"role":"user","content":[{"text":"café ","type":"text"},{"type":"text","text":"a/b"}]}],"n":1}"#,
        r#"{"model":"m","messages":[{"role":"user","content":"\u0063af\u00e9 a\u002fb"}]}"#,
        r#"{"mo\u0064el":"m","messages":[{"role":"user","content":"café a/b"}],"tools":[]}"#,
    ] {
        assert_eq!(key(Shape::Chat, same), want, "{same}");
    }
}

#[test]
fn a04_every_spelling_of_a_character_is_the_same_character() {
    let plain = r#"{"prompt":"a\n\"\\\t\r\b\f😀/\u0001\\u0041"}"#;
    let spelt = r#"{"prompt":"\u0061\u000a\u0022\u005C\u0009\u000d\u0008\u000c\ud83d\uDE00\/\u0001\u005cu0041"}"#;
    assert_eq!(
        key(Shape::Completions, plain),
        key(Shape::Completions, spelt)
    );
    // The same text through the quick way, which knows no \u and no \/.
    let quick = r#"{"prompt":"a\n\"\\\t\r\b\f😀"}"#;
    let taken_apart = r#"{"prompt":"a\n\"\\\t\r\b\f😀","x":"\/"}"#;
    assert_eq!(
        key(Shape::Completions, quick),
        key(Shape::Completions, taken_apart)
    );
}

#[test]
fn what_the_engine_would_see_differently_is_another_key() {
    let base = json!({"model":"m","messages":[{"role":"user","content":"hello"}]});
    let want = chat(&base);
    let mut others = vec![want];
    for (pointer, value) in [
        ("/model", json!("m2")),
        ("/messages/0/content", json!("hello ")),
        ("/messages/0/role", json!("system")),
        ("/messages/0/name", json!("bob")),
        ("/messages/0/tool_calls", json!([{"id":"1"}])),
        (
            "/tools",
            json!([{"type":"function","function":{"name":"f"}}]),
        ),
        (
            "/tools",
            json!([{"type":"function","function":{"name":"g"}}]),
        ),
        ("/cache_salt", json!("s")),
        (
            "/messages/0/content",
            json!([{"type":"image_url","image_url":{"url":"data:a"}}]),
        ),
        (
            "/messages/0/content",
            json!([{"type":"image_url","image_url":{"url":"data:b"}}]),
        ),
    ] {
        let mut body = base.clone();
        let (parent, name) = pointer.rsplit_once('/').expect("a pointer");
        body.pointer_mut(parent).expect("a parent")[name] = value;
        let key = chat(&body);
        assert!(!others.contains(&key), "{body}");
        others.push(key);
    }
}

#[test]
fn tools_and_images_are_keyed_whatever_the_order_of_their_members() {
    let a = r#"{"model":"m","tools":[{"type":"function","function":{"name":"f","parameters":{"a":1,"b":[1,2]}}}],"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"u","detail":"low"}}]}]}"#;
    let b = r#"{"messages":[{"content":[{"image_url":{"detail":"low","url":"u"},"type":"image_url"}],"role":"user"}],"tools":[{"function":{"parameters":{"b":[1, 2],"a":1},"name":"f"},"type":"function"}],"model":"m"}"#;
    assert_eq!(key(Shape::Chat, a), key(Shape::Chat, b));
    assert_ne!(
        key(Shape::Chat, a),
        key(Shape::Chat, &a.replace("[1,2]", "[2,1]"))
    );
}

#[test]
fn a02_a_growing_conversation_keeps_its_blocks_and_tools_and_system_come_first() {
    let system = "You are terse. ".repeat(140); // about 2 KiB
    let mut messages = vec![json!({"role":"system","content":system})];
    let tools = json!([{"type":"function","function":{"name":"f","description":"d".repeat(600)}}]);
    let mut before = Vec::new();
    for turn in 0..5 {
        messages.push(json!({"role":"user","content":format!("question {turn} ").repeat(40)}));
        let now = chat(&json!({"model":"m","messages":messages,"tools":tools}));
        // All but the last, partial block of the turn before.
        assert!(common(&before, &now) + 1 >= before.len(), "turn {turn}");
        before = now;
        messages.push(json!({"role":"assistant","content":format!("answer {turn} ").repeat(40)}));
    }
    let other = chat(
        &json!({"model":"m","messages":messages,"tools":[{"type":"function","function":{"name":"g"}}]}),
    );
    assert_eq!(common(&before, &other), 0, "other tools, another prefix");
    let first_question = |text: &str| {
        chat(
            &json!({"model":"m","messages":[{"role":"system","content":system},{"role":"user","content":text.repeat(100)}]}),
        )
    };
    let (a, b) = (first_question("one thing "), first_question("another "));
    let shared = common(&a, &b);
    assert_eq!(
        shared,
        system.len() / 256,
        "the system prompt is shared, no more"
    );
}

#[test]
fn a15_a_block_is_what_it_is_only_after_what_precedes_it() {
    let (p1, p2) = ("alpha block ".repeat(64), "omega block ".repeat(64));
    let of = |prompt: &str| {
        key(
            Shape::Completions,
            &json!({"model":"m","prompt":prompt}).to_string(),
        )
    };
    let p3 = of(&format!("{p2}{p1}"));
    assert_eq!(common(&p3, &of(&p2)), 3);
    assert_eq!(common(&p3, &of(&p1)), 0);
}

#[test]
fn a01_prompts_come_in_every_shape() {
    let of = |prompt: Value| {
        key(
            Shape::Completions,
            &json!({"model":"m","prompt":prompt}).to_string(),
        )
    };
    assert_ne!(of(json!([12, 3])), of(json!([1, 23])));
    assert_eq!(of(json!([[1, 2], [3]])), of(json!([[1, 2], [4, 5]])));
    assert_eq!(of(json!([[1, 2], [3]])), of(json!([1, 2])));
    assert_eq!(of(json!(["a", "b"])), of(json!("a")));
    let ids: Vec<u32> = (0..4096).collect();
    let with_tail = |tail: u32| {
        let mut ids = ids.clone();
        ids.extend([tail; 40]);
        of(json!(ids))
    };
    // The window ends before the tails.
    let (a, b) = (with_tail(1), with_tail(2));
    assert!(a.len() > 40 && common(&a, &b) == a.len());
    let embed = json!({"model":"m","input":["x","y"]}).to_string();
    assert_eq!(key(Shape::Embeddings, &embed).len(), 1);
    for odd in [
        json!(null),
        json!(7),
        json!({"a":1}),
        json!([]),
        json!([[]]),
    ] {
        let body = json!({"model":"m","prompt":odd}).to_string();
        assert_eq!(
            parse(Shape::Completions, body.as_bytes(), true),
            Err(NoKey::NoPrompt),
            "{body}"
        );
    }
}

#[test]
fn responses_and_messages_have_their_own_members() {
    let text = "x".repeat(600);
    let a = key(
        Shape::Responses,
        &json!({"model":"m","instructions":text,"input":"hi"}).to_string(),
    );
    let b = key(
        Shape::Responses,
        &json!({"input":[{"type":"message","role":"user","content":[{"type":"input_text","text":"hi"}]}],"instructions":text,"model":"m"}).to_string(),
    );
    let c = key(
        Shape::Responses,
        &json!({"model":"m","instructions":text,"input":"ho"}).to_string(),
    );
    assert_eq!(a, b);
    assert_eq!(common(&a, &c), 3);
    let anthropic = |system: Value| {
        key(
            Shape::Messages,
            &json!({"messages":[{"role":"user","content":"hi"}],"system":system,"model":"m"})
                .to_string(),
        )
    };
    let blocks = json!([{"type":"text","text":text,"cache_control":{"type":"ephemeral"}}]);
    assert_eq!(anthropic(json!(text)), anthropic(blocks));
    assert_ne!(anthropic(json!(text)), anthropic(json!("other")));
}

#[test]
fn what_lies_beyond_the_window_changes_nothing() {
    let long = "word ".repeat(100_000);
    let body = json!({"model":"m","prompt":long}).to_string();
    let window = KeySettings::default().window_bytes;
    let whole = key(Shape::Completions, &body);
    assert_eq!(
        parse(Shape::Completions, &body.as_bytes()[..window], false).expect("a key"),
        whole
    );
    assert!(whole.len() >= 63);
    let broken = format!("{}\u{0}", &body[..window * 2]);
    assert_eq!(key(Shape::Completions, &broken), whole);
}

#[test]
fn odd_bodies_have_no_key_and_say_why() {
    let deep = format!(
        r#"{{"model":"m","x":{}1{},"prompt":"p"}}"#,
        "[".repeat(5000),
        "]".repeat(5000)
    );
    for (body, why) in [
        ("", NoKey::Malformed),
        ("null", NoKey::Malformed),
        ("[1]", NoKey::Malformed),
        ("{", NoKey::Malformed),
        (r#"{"prompt":"a"} x"#, NoKey::Malformed),
        (r#"{"prompt":"a\x\/"}"#, NoKey::Malformed),
        (r#"{"prompt":"\ud800"}"#, NoKey::Malformed),
        (r#"{"prompt":"\udc00\ud800"}"#, NoKey::Malformed),
        (r#"{"prompt":"\u12"}"#, NoKey::Malformed),
        (r#"{"prompt" "a"}"#, NoKey::Malformed),
        (r#"{"prompt":tru}"#, NoKey::Malformed),
        ("{}", NoKey::NoPrompt),
        (r#"{"model":"m","messages":[]}"#, NoKey::NoPrompt),
        (&deep, NoKey::TooDeep),
    ] {
        assert_eq!(
            parse(Shape::Completions, body.as_bytes(), true),
            Err(why),
            "{}",
            &body[..body.len().min(40)]
        );
    }
    let invalid = b"{\"prompt\":\"a\xff\"}";
    assert_eq!(
        parse(Shape::Completions, invalid, true),
        Err(NoKey::Malformed)
    );
}

#[test]
fn only_a_whole_model_name_chooses_a_pool() {
    let mut parser = parser();
    let mut key = PrefixKey::default();
    let mut model = |body: &str| {
        let _ = parser.parse(Shape::Chat, body.as_bytes(), true, &mut key);
        parser.model().map(str::to_owned)
    };
    assert_eq!(model(r#"{"model":"a\/b"}"#).as_deref(), Some("a/b"));
    assert_eq!(model(r#"{"model":7}"#), None);
    assert_eq!(
        model(&format!(r#"{{"model":"{}"}}"#, "x".repeat(300))),
        None
    );
    assert_eq!(model("{}"), None, "nothing is left of the body before");
}

#[test]
fn a_header_key_is_hex_or_it_is_ignored() {
    let mut key = PrefixKey::default();
    assert!(from_header(b"00ff", &mut key));
    assert_eq!(key.chain(), [255]);
    assert!(!from_header(b"xyz", &mut key));
    assert_eq!(key.chain(), [255], "what was known before stays");
}

#[test]
fn paths_tell_the_shape() {
    for (path, shape) in [
        ("/v1/chat/completions", Some(Shape::Chat)),
        ("/openai/v1/completions", Some(Shape::Completions)),
        ("/v1/responses", Some(Shape::Responses)),
        ("/v1/embeddings", Some(Shape::Embeddings)),
        ("/v1/messages", Some(Shape::Messages)),
        ("/v1/models", None),
        ("/", None),
        ("", None),
    ] {
        assert_eq!(Shape::of_path(path.as_bytes()), shape, "{path}");
    }
}

/// Any JSON that stays within the depth that is followed.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        ".{0,20}".prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 40, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::vec((".{0,8}", inner), 0..6)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn any_bytes_are_survived(body in prop::collection::vec(any::<u8>(), 0..600), whole: bool) {
        for shape in [Shape::Chat, Shape::Completions, Shape::Responses, Shape::Messages] {
            let _ = parse(shape, &body, whole);
        }
    }

    /// A good request, bent in a few places: more of the parser is reached than by noise.
    #[test]
    fn bent_requests_are_survived(
        content in any_json(),
        bends in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut body = json!({"messages":[{"content":content,"role":"user"}],"model":"m"})
            .to_string()
            .into_bytes();
        for (place, byte) in bends {
            let place = place.index(body.len());
            body[place] = byte;
        }
        body.truncate(cut.index(body.len()) + 1);
        for whole in [true, false] {
            let _ = parse(Shape::Chat, &body, whole);
        }
    }

    #[test]
    fn good_json_is_never_malformed(value in any_json(), text in ".{1,40}") {
        let body = json!({"x": value, "model": "m", "prompt": text}).to_string();
        let one = parse(Shape::Completions, body.as_bytes(), true);
        let pretty = serde_json::to_string_pretty(&serde_json::from_str::<Value>(&body).expect("JSON"))
            .expect("JSON");
        prop_assert!(one.is_ok(), "{body}");
        prop_assert_eq!(one, parse(Shape::Completions, pretty.as_bytes(), true));
    }

    /// A cut at any place gives a beginning of the whole key.
    #[test]
    fn a_cut_body_gives_a_beginning(text in "[a-z\\n\"é]{900,1200}", cut in any::<prop::sample::Index>()) {
        let body = json!({"model": "m", "prompt": text}).to_string();
        let whole = key(Shape::Completions, &body);
        let cut = cut.index(body.len());
        if let Ok(part) = parse(Shape::Completions, &body.as_bytes()[..cut], false)
            && cut > 300
        {
            prop_assert!(common(&part, &whole) == part.len() || part.len() == 1);
        }
    }
}
