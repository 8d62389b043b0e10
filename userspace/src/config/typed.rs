//! What was typed: the shape of the file, every key optional, unknown keys refused.
//!
//! Values that need more than a type (URLs, durations, sizes, names of policies) stay text here, with their
//! place in the file; `reader` and `values` read them.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, SeqAccess, Visitor};
use toml::Spanned;

/// Text with its place.
pub type Text = Spanned<String>;
/// A number with its place.
pub type Number = Spanned<f64>;
/// A whole number with its place.
pub type Whole = Spanned<i64>;

/// One text or several.
///
/// Read by hand, because an untagged enum loses places and can only say that nothing matched.
#[derive(Debug)]
pub struct OneOrMany(pub Vec<Spanned<String>>);

impl<'de> Deserialize<'de> for OneOrMany {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Reads;
        impl<'de> Visitor<'de> for Reads {
            type Value = OneOrMany;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of strings")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<OneOrMany, E> {
                // Its place is that of the whole value, which the caller has.
                Ok(OneOrMany(vec![Spanned::new(0..0, text.to_owned())]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<OneOrMany, A::Error> {
                let mut many = Vec::new();
                while let Some(item) = items.next_element()? {
                    many.push(item);
                }
                Ok(OneOrMany(many))
            }
        }
        from.deserialize_any(Reads)
    }
}

/// A number of bytes: 65536 or "64KiB".
#[derive(Debug)]
pub enum Size {
    /// In bytes.
    Bytes(i64),
    /// With a unit.
    Text(String),
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Reads;
        impl Visitor<'_> for Reads {
            type Value = Size;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of bytes or a size like \"64KiB\"")
            }
            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<Size, E> {
                Ok(Size::Bytes(bytes))
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Size, E> {
                Ok(Size::Text(text.to_owned()))
            }
        }
        from.deserialize_any(Reads)
    }
}

/// The whole file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct File {
    pub listen: Option<Spanned<OneOrMany>>,
    pub workers: Option<Whole>,
    pub kernel: Option<Text>,
    pub drain_limit: Option<Text>,
    pub admin: Admin,
    pub http: Http,
    pub key: Key,
    pub log: Log,
    pub defaults: Defaults,
    pub pool: Vec<Pool>,
}

/// See [`AdminSettings`](super::AdminSettings).
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Admin {
    pub listen: Option<Text>,
    pub token: Option<Text>,
}

/// See [`HttpSettings`](super::HttpSettings).
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Http {
    pub head_bytes: Option<Spanned<Size>>,
    pub head_fields: Option<Whole>,
    pub body_bytes: Option<Spanned<Size>>,
    pub head_deadline: Option<Text>,
    pub body_idle: Option<Text>,
    pub keep_alive_idle: Option<Text>,
    pub connect_deadline: Option<Text>,
    pub response_deadline: Option<Text>,
    pub response_idle: Option<Text>,
    pub pool_idle: Option<Text>,
    pub pool_size: Option<Whole>,
    pub half_close_grace: Option<Text>,
    pub via: Option<bool>,
    pub pick_header: Option<bool>,
    pub replay_fresh: Option<bool>,
    pub trust_forwarded: Option<bool>,
}

/// See [`KeySettings`](super::KeySettings).
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Key {
    pub window_bytes: Option<Spanned<Size>>,
    pub block_bytes: Option<Spanned<Size>>,
    pub header: Option<Text>,
    pub bytes_per_token: Option<Number>,
}

/// See [`LogSettings`](super::LogSettings).
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Log {
    pub format: Option<Text>,
    pub sample: Option<Number>,
}

/// What pools have where they do not say otherwise.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Defaults {
    pub policy: Policy,
    pub health: Health,
    pub signals: Signals,
}

/// See [`PolicySettings`](super::PolicySettings).
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Policy {
    pub kind: Option<Text>,
    pub gate: Option<Text>,
    pub scorer: Option<Text>,
    pub threshold: Option<Number>,
    pub tau: Option<Whole>,
    pub r_peak: Option<Number>,
    pub t_max: Option<Text>,
    pub hysteresis: Option<Number>,
    pub hash_on: Option<Text>,
    pub session: Option<Text>,
    pub weights: Option<Spanned<Vec<f64>>>,
}

/// See [`HealthSettings`](super::HealthSettings).
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Health {
    pub active: Option<bool>,
    pub path: Option<Text>,
    pub interval: Option<Text>,
    pub timeout: Option<Text>,
    pub fall: Option<Whole>,
    pub rise: Option<Whole>,
    pub eject_after: Option<Whole>,
    pub eject_for: Option<Text>,
    pub slow_start: Option<Text>,
    pub panic: Option<bool>,
}

/// See [`SignalSettings`](super::SignalSettings).
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Signals {
    pub scrape: Option<bool>,
    pub path: Option<Text>,
    pub interval: Option<Text>,
    pub stale_after: Option<Text>,
}

/// See [`PoolSettings`](super::PoolSettings).
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pool {
    pub name: Text,
    #[serde(default)]
    pub models: Vec<Text>,
    #[serde(default)]
    pub paths: Vec<Text>,
    pub cache_tokens: Option<Whole>,
    pub queue_limit: Option<Whole>,
    pub queue_deadline: Option<Text>,
    pub retry_after: Option<Text>,
    pub resolve_interval: Option<Text>,
    #[serde(default)]
    pub policy: Policy,
    #[serde(default)]
    pub health: Health,
    #[serde(default)]
    pub signals: Signals,
    #[serde(default)]
    pub backend: Vec<Backend>,
}

/// See [`BackendSettings`](super::BackendSettings).
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Backend {
    pub url: Text,
    pub name: Option<Text>,
    pub weight: Option<Number>,
    pub max_active: Option<Whole>,
}
