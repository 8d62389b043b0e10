//! A pool's policy as JSON, and changes to it at run time.
//!
//! The words are those of the configuration file. A change names only what it changes; everything is checked
//! before anything is put in force. A change lasts until the next reload that changes the pool's policy, or
//! the end of the process: the file stays the truth.

use std::ops::RangeInclusive;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::config::{HashOn, PolicySettings, SessionFrom, values};
use crate::state::{Pool, Shared};

/// Ranges as in the configuration file.
const T_MAX: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(86_400);

const MOST_TAU: u64 = 1 << 40;

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
    set(&mut fresh.kind, "kind", &change.kind, values::policy)?;
    set(&mut fresh.gate, "gate", &change.gate, values::gate)?;
    set(&mut fresh.scorer, "scorer", &change.scorer, values::scorer)?;
    set(&mut fresh.t_max, "t_max", &change.t_max, |text| {
        values::duration(text, T_MAX)
    })?;
    set(
        &mut fresh.hash_on,
        "hash_on",
        &change.hash_on,
        values::hash_on,
    )?;
    set(
        &mut fresh.session,
        "session",
        &change.session,
        values::session,
    )?;
    number(
        &mut fresh.threshold,
        "threshold",
        change.threshold,
        0.0..=1.0,
    )?;
    number(&mut fresh.r_peak, "r_peak", change.r_peak, 1.0..=1e9)?;
    number(
        &mut fresh.hysteresis,
        "hysteresis",
        change.hysteresis,
        0.0..=1.0,
    )?;
    if let Some(tau) = change.tau {
        if tau.is_some_and(|tau| tau > MOST_TAU) {
            return Err(format!("tau must be from 0 to {MOST_TAU}, or null."));
        }
        fresh.tau = tau;
    }
    if let Some(weights) = change.weights {
        let sound = weights.iter().all(|w| (0.0..=1e6).contains(w));
        if !sound || weights.iter().sum::<f64>() <= 0.0 {
            return Err("weights must be three numbers from 0 to 1000000, not all 0.".into());
        }
        fresh.weights = weights;
    }
    Ok(fresh)
}

/// Reads a field that was sent, with the configuration file's own reader.
fn set<T>(
    slot: &mut T,
    field: &str,
    sent: &Option<String>,
    read: impl Fn(&str) -> Result<T, String>,
) -> Result<(), String> {
    if let Some(text) = sent {
        *slot = read(text).map_err(|why| format!("{field}: {why}."))?;
    }
    Ok(())
}

fn number(
    slot: &mut f64,
    field: &str,
    sent: Option<f64>,
    range: RangeInclusive<f64>,
) -> Result<(), String> {
    if let Some(value) = sent {
        if !range.contains(&value) {
            let (low, high) = (range.start(), range.end());
            return Err(format!(
                "{field} is {value}; it must be from {low} to {high}."
            ));
        }
        *slot = value;
    }
    Ok(())
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
        "kind": policy.kind.as_str(),
        "gate": policy.gate.as_str(),
        "scorer": policy.scorer.as_str(),
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
        kind = policy.kind.as_str(),
        tau,
        "an operator changed a pool's policy"
    );
    pool.picker.set_policy(policy);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{GateKind, PolicyKind, Scorer};

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
            (r#"{"threshold":1.5}"#, "from 0 to 1"),
            (r#"{"r_peak":0}"#, "from 1 to"),
            (r#"{"tau":2000000000000}"#, "or null"),
            (r#"{"weights":[1e9,0,0]}"#, "1000000"),
            (r#"{"t_max":"soon"}"#, "t_max: \"soon\" is not a duration"),
            (r#"{"t_max":"0s"}"#, "out of range"),
            (r#"{"tau":-1}"#, "-1"),
            (r#"{"hash_on":"header:"}"#, "field name"),
            (r#"{"hash_on":"body"}"#, "header:NAME"),
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
        for kind in PolicyKind::ALL {
            for gate in [GateKind::Gap, GateKind::Absolute] {
                for scorer in [Scorer::TokenLoad, Scorer::ActiveRequests] {
                    let policy = PolicySettings {
                        kind,
                        gate,
                        scorer,
                        hash_on: HashOn::Header("x-user".into()),
                        session: SessionFrom::Cookie("Sid".into()),
                        ..PolicySettings::default()
                    };
                    let mut shown = to_json(&policy);
                    shown.as_object_mut().unwrap().remove("effective_tau");
                    let body = shown.to_string();
                    let back = changed(&PolicySettings::default(), body.as_bytes()).unwrap();
                    assert_eq!(back, policy);
                }
            }
        }
    }
}
