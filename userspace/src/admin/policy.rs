//! A pool's policy as JSON, and changes to it at run time.
//!
//! The words are those of the configuration file. A change names only what it changes; everything is checked
//! before anything is put in force. A change lasts until the next reload that changes the pool's policy, or
//! the end of the process: the file stays the truth.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::config::{GateKind, HashOn, PolicyKind, PolicySettings, Scorer, SessionFrom};
use crate::state::{Pool, Shared};

const KINDS: &[(&str, PolicyKind)] = &[
    ("sticky", PolicyKind::Sticky),
    ("round-robin", PolicyKind::RoundRobin),
    ("least-load", PolicyKind::LeastLoad),
    ("power-of-two", PolicyKind::PowerOfTwo),
    ("consistent-hash", PolicyKind::ConsistentHash),
    ("session", PolicyKind::Session),
    ("always-sticky", PolicyKind::AlwaysSticky),
    ("weighted", PolicyKind::Weighted),
];
const GATES: &[(&str, GateKind)] = &[("gap", GateKind::Gap), ("absolute", GateKind::Absolute)];
const SCORERS: &[(&str, Scorer)] = &[
    ("token-load", Scorer::TokenLoad),
    ("active-requests", Scorer::ActiveRequests),
];

/// What may be sent; `None` stays as it is.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Change {
    kind: Option<String>,
    gate: Option<String>,
    scorer: Option<String>,
    threshold: Option<f64>,
    /// `null` goes back to `r_peak` × `t_max`.
    #[serde(default, deserialize_with = "given")]
    tau: Option<Option<u64>>,
    r_peak: Option<f64>,
    t_max: Option<String>,
    hysteresis: Option<f64>,
    hash_on: Option<String>,
    session: Option<String>,
    weights: Option<[f64; 3]>,
}

/// Tells a field that is null from one that is absent.
fn given<'de, D: serde::Deserializer<'de>>(value: D) -> Result<Option<Option<u64>>, D::Error> {
    Option::<u64>::deserialize(value).map(Some)
}

/// `now` with the changes in `body`, or one sentence on what is wrong with them.
pub fn changed(now: &PolicySettings, body: &[u8]) -> Result<PolicySettings, String> {
    let change: Change = serde_json::from_slice(body).map_err(|error| {
        format!("The policy must be a JSON object of the known fields: {error}.")
    })?;
    let mut fresh = now.clone();
    if let Some(name) = &change.kind {
        fresh.kind = named("policy", KINDS, name)?;
    }
    if let Some(name) = &change.gate {
        fresh.gate = named("gate", GATES, name)?;
    }
    if let Some(name) = &change.scorer {
        fresh.scorer = named("scorer", SCORERS, name)?;
    }
    if let Some(threshold) = change.threshold {
        fresh.threshold = within(
            "threshold",
            threshold,
            (0.0..=1.0).contains(&threshold),
            "between 0 and 1",
        )?;
    }
    if let Some(tau) = change.tau {
        fresh.tau = tau;
    }
    if let Some(rate) = change.r_peak {
        fresh.r_peak = within("r_peak", rate, rate > 0.0 && rate.is_finite(), "above 0")?;
    }
    if let Some(time) = &change.t_max {
        fresh.t_max = duration("t_max", time)?;
    }
    if let Some(share) = change.hysteresis {
        fresh.hysteresis = within(
            "hysteresis",
            share,
            (0.0..=1.0).contains(&share),
            "between 0 and 1",
        )?;
    }
    if let Some(what) = &change.hash_on {
        fresh.hash_on = hash_on(what)?;
    }
    if let Some(place) = &change.session {
        fresh.session = session(place)?;
    }
    if let Some(weights) = change.weights {
        let sound = weights.iter().all(|w| *w >= 0.0 && w.is_finite());
        if !sound || weights.iter().sum::<f64>() <= 0.0 {
            return Err("weights must be three numbers of 0 or more, not all 0.".into());
        }
        fresh.weights = weights;
    }
    Ok(fresh)
}

fn named<T: Copy>(what: &str, names: &[(&str, T)], name: &str) -> Result<T, String> {
    names
        .iter()
        .find(|(known, _)| *known == name)
        .map(|&(_, value)| value)
        .ok_or_else(|| {
            let known: Vec<&str> = names.iter().map(|&(known, _)| known).collect();
            format!(
                "There is no {what} named {name:?}; there are: {}.",
                known.join(", ")
            )
        })
}

fn name_of<T: PartialEq>(names: &[(&'static str, T)], value: &T) -> &'static str {
    names
        .iter()
        .find(|(_, known)| known == value)
        .map_or("unknown", |&(name, _)| name)
}

fn within(field: &str, value: f64, sound: bool, range: &str) -> Result<f64, String> {
    sound
        .then_some(value)
        .ok_or_else(|| format!("{field} is {value}; it must be {range}."))
}

fn duration(field: &str, text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .ok()
        .filter(|time| !time.is_zero())
        .ok_or_else(|| {
            format!("{field} is {text:?}; write a time above 0 such as \"14s\" or \"500ms\".")
        })
}

fn hash_on(text: &str) -> Result<HashOn, String> {
    match text.split_once(':') {
        None if text == "key" => Ok(HashOn::Key),
        None if text == "session" => Ok(HashOn::Session),
        Some(("header", name)) if is_token(name) => Ok(HashOn::Header(name.to_ascii_lowercase())),
        _ => Err(format!(
            "hash_on is {text:?}; it must be key, session or header:NAME."
        )),
    }
}

fn session(text: &str) -> Result<SessionFrom, String> {
    match text.split_once(':') {
        Some(("header", name)) if is_token(name) => {
            Ok(SessionFrom::Header(name.to_ascii_lowercase()))
        }
        Some(("cookie", name)) if is_token(name) => Ok(SessionFrom::Cookie(name.into())),
        _ => Err(format!(
            "session is {text:?}; it must be header:NAME or cookie:NAME."
        )),
    }
}

/// An RFC 9110 token: what a header or cookie can be named.
fn is_token(name: &str) -> bool {
    let allowed = |c: u8| c.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&c);
    !name.is_empty() && name.bytes().all(allowed)
}

/// A policy's name.
pub fn kind_name(kind: PolicyKind) -> &'static str {
    name_of(KINDS, &kind)
}

/// The policy, in the words of the configuration file.
pub fn to_json(policy: &PolicySettings) -> Value {
    let hash_on = match &policy.hash_on {
        HashOn::Key => "key".to_owned(),
        HashOn::Session => "session".to_owned(),
        HashOn::Header(name) => format!("header:{name}"),
    };
    let session = match &policy.session {
        SessionFrom::Header(name) => format!("header:{name}"),
        SessionFrom::Cookie(name) => format!("cookie:{name}"),
    };
    json!({
        "kind": kind_name(policy.kind),
        "gate": name_of(GATES, &policy.gate),
        "scorer": name_of(SCORERS, &policy.scorer),
        "threshold": policy.threshold,
        "tau": policy.tau,
        "effective_tau": policy.effective_tau(),
        "r_peak": policy.r_peak,
        "t_max": humantime::format_duration(policy.t_max).to_string(),
        "hysteresis": policy.hysteresis,
        "hash_on": hash_on,
        "session": session,
        "weights": policy.weights,
    })
}

/// Makes `policy` the pool's: the gate in the ledger first, which the kernel's programs read too.
pub fn put_in_force(shared: &Shared, pool: &Pool, policy: PolicySettings) {
    let tau = policy.effective_tau();
    for backend in &pool.backends {
        shared.ledger.cell(backend.slot).tau.store(tau, Relaxed);
    }
    tracing::info!(
        pool = pool.settings.name,
        kind = kind_name(policy.kind),
        tau,
        "an operator changed a pool's policy"
    );
    pool.picker.set_policy(policy);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_changes_and_the_rest_stays() {
        let now = PolicySettings {
            tau: Some(7),
            ..PolicySettings::default()
        };
        let body =
            br#"{"kind":"weighted","t_max":"500ms","weights":[3,5,2],"hash_on":"header:X-User"}"#;
        let fresh = changed(&now, body).unwrap();
        let wanted = PolicySettings {
            kind: PolicyKind::Weighted,
            t_max: Duration::from_millis(500),
            weights: [3.0, 5.0, 2.0],
            hash_on: HashOn::Header("x-user".into()),
            ..now.clone()
        };
        assert_eq!(fresh, wanted);
        assert_eq!(changed(&now, br#"{"tau":null}"#).unwrap().tau, None);
        assert_eq!(changed(&now, b"{}").unwrap(), now);
    }

    #[test]
    fn what_is_wrong_is_said_in_one_sentence() {
        let table = [
            (r#"{"kind":"stiky"}"#, "always-sticky"),
            (r#"{"gate":"wide"}"#, "absolute"),
            (r#"{"scorer":"x"}"#, "active-requests"),
            (r#"{"thresold":1}"#, "`threshold`"),
            (r#"{"threshold":1.5}"#, "between 0 and 1"),
            (r#"{"r_peak":0}"#, "above 0"),
            (r#"{"t_max":"soon"}"#, "14s"),
            (r#"{"t_max":"0s"}"#, "14s"),
            (r#"{"tau":-1}"#, "-1"),
            (r#"{"hash_on":"header:"}"#, "header:NAME"),
            (r#"{"session":"a b"}"#, "cookie:NAME"),
            (r#"{"weights":[0,0,0]}"#, "not all 0"),
            ("nonsense", "JSON object"),
        ];
        for (body, word) in table {
            let why = changed(&PolicySettings::default(), body.as_bytes()).unwrap_err();
            assert!(why.contains(word) && why.ends_with('.'), "{body}: {why}");
        }
    }

    #[test]
    fn what_is_shown_can_be_sent_back() {
        let policy = PolicySettings::default();
        let mut shown = to_json(&policy);
        shown.as_object_mut().unwrap().remove("effective_tau");
        let back = changed(&policy, shown.to_string().as_bytes()).unwrap();
        assert_eq!(back, policy);
    }
}
