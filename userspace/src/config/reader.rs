//! From a file's text to [`Settings`]: every mistake is one sentence with file, line and column.

use std::collections::HashSet;
use std::fmt;
use std::net::SocketAddr;
use std::ops::{Range, RangeInclusive};
use std::path::Path;
use std::time::Duration;

use toml::Spanned;

use super::check::check;
use super::place;
use super::settings::*;
use super::typed::{self, Number, OneOrMany, Size, Text, Whole};
use super::values;

/// A mistake in the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError(String);

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ConfigError {}

impl From<String> for ConfigError {
    fn from(message: String) -> Self {
        Self(message)
    }
}

/// What is wrong, and where.
type Wrong = (Range<usize>, String);
type Read<T> = Result<T, Wrong>;

const MS: Duration = Duration::from_millis(1);
const DAY: Duration = Duration::from_secs(86_400);

/// Reads the file at `path`.
pub fn read_file(path: &Path) -> Result<Settings, ConfigError> {
    let shown = path.display();
    let text = std::fs::read_to_string(path)
        .map_err(|error| ConfigError(format!("{shown}: cannot be read: {error}")))?;
    let mut settings = read(&text, &shown.to_string())?;
    settings.source = Some(path.to_owned());
    Ok(settings)
}

/// Reads configuration text; `name` stands before each message.
pub fn read(text: &str, name: &str) -> Result<Settings, ConfigError> {
    let file: typed::File = toml::from_str(text).map_err(|error| {
        let message = place::reworded(error.message());
        match error.span() {
            Some(span) if !message.starts_with("unknown key") => {
                in_file(text, name, span, &message)
            }
            Some(span) => at_offset(text, name, span.start, &message),
            None => ConfigError(format!("{name}: {message}")),
        }
    })?;
    let settings = resolve(file).map_err(|(span, message)| in_file(text, name, span, &message))?;
    check(&settings).map_err(|fault| {
        let span = place::span_of(text, &fault.path);
        let offset = span.map_or(0, |span| span.start);
        at_offset(text, name, offset, &fault.message)
    })?;
    Ok(settings)
}

/// A mistake in a value: its place and its key.
fn in_file(text: &str, name: &str, span: Range<usize>, message: &str) -> ConfigError {
    match place::key_at(text, span.start) {
        Some(key) => at_offset(text, name, span.start, &format!("{key}: {message}")),
        None => at_offset(text, name, span.start, message),
    }
}

fn at_offset(text: &str, name: &str, offset: usize, message: &str) -> ConfigError {
    let (line, column) = place::line_and_column(text, offset);
    ConfigError(format!("{name}:{line}:{column}: {message}"))
}

fn at<T>(value: &Spanned<T>, message: String) -> Wrong {
    (value.span(), message)
}

fn text<T>(
    slot: &mut T,
    typed: Option<Text>,
    read: impl Fn(&str) -> Result<T, String>,
) -> Read<()> {
    if let Some(typed) = typed {
        *slot = read(typed.get_ref()).map_err(|message| at(&typed, message))?;
    }
    Ok(())
}

fn time(slot: &mut Duration, typed: Option<Text>, range: RangeInclusive<Duration>) -> Read<()> {
    text(slot, typed, |text| values::duration(text, range.clone()))
}

fn flag(slot: &mut bool, typed: Option<bool>) {
    *slot = typed.unwrap_or(*slot);
}

fn number(slot: &mut f64, typed: Option<Number>, range: RangeInclusive<f64>) -> Read<()> {
    if let Some(typed) = typed {
        let value = *typed.get_ref();
        if !range.contains(&value) {
            let (low, high) = (range.start(), range.end());
            return Err(at(
                &typed,
                format!("{value} is out of range: from {low} to {high}"),
            ));
        }
        *slot = value;
    }
    Ok(())
}

fn whole<T: TryFrom<i64>>(
    slot: &mut T,
    typed: Option<Whole>,
    range: RangeInclusive<i64>,
) -> Read<()> {
    if let Some(typed) = typed {
        let value = *typed.get_ref();
        let good = T::try_from(value).ok().filter(|_| range.contains(&value));
        *slot = good.ok_or_else(|| {
            let (low, high) = (range.start(), range.end());
            at(
                &typed,
                format!("{value} is out of range: from {low} to {high}"),
            )
        })?;
    }
    Ok(())
}

fn size<T: TryFrom<u64>>(
    slot: &mut T,
    typed: Option<Spanned<Size>>,
    range: RangeInclusive<u64>,
) -> Read<()> {
    let Some(typed) = typed else {
        return Ok(());
    };
    let bytes = match typed.get_ref() {
        Size::Bytes(bytes) => u64::try_from(*bytes).map_err(|_| format!("{bytes} is negative")),
        Size::Text(text) => values::size(text),
    };
    let bytes = bytes.map_err(|message| at(&typed, message))?;
    let good = T::try_from(bytes).ok().filter(|_| range.contains(&bytes));
    *slot = good.ok_or_else(|| {
        let (low, high) = (range.start(), range.end());
        at(
            &typed,
            format!("{bytes} bytes is out of range: from {low} to {high}"),
        )
    })?;
    Ok(())
}

fn resolve(file: typed::File) -> Read<Settings> {
    let mut settings = Settings::new(Vec::new());
    if let Some(typed) = file.listen {
        settings.listen = listen(&typed)?;
    }
    whole(&mut settings.workers, file.workers, 1..=256)?;
    text(&mut settings.kernel, file.kernel, values::kernel)?;
    time(
        &mut settings.drain_limit,
        file.drain_limit,
        Duration::ZERO..=DAY,
    )?;
    text(
        &mut settings.admin.listen,
        file.admin.listen,
        values::listen,
    )?;
    if let Some(token) = file.admin.token {
        if token.get_ref().is_empty() || !token.get_ref().bytes().all(|b| b.is_ascii_graphic()) {
            return Err(at(
                &token,
                "the token must be visible ASCII characters without spaces".into(),
            ));
        }
        settings.admin.token = Some(token.into_inner());
    }
    http(&mut settings.http, file.http)?;
    key(&mut settings.key, file.key)?;
    text(
        &mut settings.log.format,
        file.log.format,
        values::log_format,
    )?;
    number(&mut settings.log.sample, file.log.sample, 0.0..=1.0)?;
    let mut defaults = PoolSettings::new("", Vec::new());
    policy(&mut defaults.policy, file.defaults.policy)?;
    health(&mut defaults.health, file.defaults.health)?;
    signals(&mut defaults.signals, file.defaults.signals)?;
    let mut names = HashSet::new();
    for typed in file.pool {
        let name = typed.name.clone();
        if !names.insert(name.get_ref().clone()) {
            return Err(at(
                &name,
                format!("there are two pools named {:?}", name.get_ref()),
            ));
        }
        settings.pools.push(pool(defaults.clone(), typed)?);
    }
    Ok(settings)
}

fn listen(typed: &Spanned<OneOrMany>) -> Read<Vec<SocketAddr>> {
    let read = |text: &Text| {
        let span = if text.span().is_empty() {
            typed.span()
        } else {
            text.span()
        };
        values::listen(text.get_ref()).map_err(|message| (span, message))
    };
    typed.get_ref().0.iter().map(read).collect()
}

fn http(http: &mut HttpSettings, typed: typed::Http) -> Read<()> {
    size(&mut http.head_bytes, typed.head_bytes, 1024..=1 << 20)?;
    whole(&mut http.head_fields, typed.head_fields, 8..=512)?;
    size(&mut http.body_bytes, typed.body_bytes, 0..=1 << 50)?;
    time(&mut http.head_deadline, typed.head_deadline, MS..=DAY)?;
    time(&mut http.body_idle, typed.body_idle, MS..=DAY)?;
    time(&mut http.keep_alive_idle, typed.keep_alive_idle, MS..=DAY)?;
    time(&mut http.connect_deadline, typed.connect_deadline, MS..=DAY)?;
    time(
        &mut http.response_deadline,
        typed.response_deadline,
        MS..=DAY,
    )?;
    time(&mut http.response_idle, typed.response_idle, MS..=DAY)?;
    time(&mut http.pool_idle, typed.pool_idle, Duration::ZERO..=DAY)?;
    whole(&mut http.pool_size, typed.pool_size, 0..=65_536)?;
    time(
        &mut http.half_close_grace,
        typed.half_close_grace,
        Duration::ZERO..=DAY,
    )?;
    flag(&mut http.via, typed.via);
    flag(&mut http.pick_header, typed.pick_header);
    flag(&mut http.replay_fresh, typed.replay_fresh);
    flag(&mut http.trust_forwarded, typed.trust_forwarded);
    Ok(())
}

fn key(key: &mut KeySettings, typed: typed::Key) -> Read<()> {
    size(&mut key.window_bytes, typed.window_bytes, 256..=4 << 20)?;
    size(&mut key.block_bytes, typed.block_bytes, 16..=65_536)?;
    text(&mut key.header, typed.header, values::header)?;
    number(&mut key.bytes_per_token, typed.bytes_per_token, 0.5..=64.0)
}

fn policy(policy: &mut PolicySettings, typed: typed::Policy) -> Read<()> {
    text(&mut policy.kind, typed.kind, values::policy)?;
    text(&mut policy.gate, typed.gate, values::gate)?;
    text(&mut policy.scorer, typed.scorer, values::scorer)?;
    number(&mut policy.threshold, typed.threshold, 0.0..=1.0)?;
    if typed.tau.is_some() {
        let mut tau = 0u64;
        whole(&mut tau, typed.tau, 0..=1 << 40)?;
        policy.tau = Some(tau);
    }
    number(&mut policy.r_peak, typed.r_peak, 1.0..=1e9)?;
    time(&mut policy.t_max, typed.t_max, MS..=DAY)?;
    number(&mut policy.hysteresis, typed.hysteresis, 0.0..=1.0)?;
    text(&mut policy.hash_on, typed.hash_on, values::hash_on)?;
    text(&mut policy.session, typed.session, values::session)?;
    if let Some(weights) = typed.weights {
        policy.weights = match weights.get_ref()[..] {
            [a, b, c] if [a, b, c].iter().all(|w| (0.0..=1e6).contains(w)) && a + b + c > 0.0 => {
                [a, b, c]
            }
            _ => {
                return Err(at(
                    &weights,
                    "weights are three numbers from 0 on, not all 0: prefix, queue, KV use".into(),
                ));
            }
        };
    }
    Ok(())
}

fn path(text: &str) -> Result<String, String> {
    if text.starts_with('/') && text.bytes().all(|b| b.is_ascii_graphic()) {
        Ok(text.to_owned())
    } else {
        Err(format!("\"{text}\" is not a path: it must begin with /"))
    }
}

fn health(health: &mut HealthSettings, typed: typed::Health) -> Read<()> {
    flag(&mut health.active, typed.active);
    text(&mut health.path, typed.path, path)?;
    time(&mut health.interval, typed.interval, 10 * MS..=DAY)?;
    time(&mut health.timeout, typed.timeout, MS..=DAY)?;
    whole(&mut health.fall, typed.fall, 1..=1000)?;
    whole(&mut health.rise, typed.rise, 1..=1000)?;
    whole(&mut health.eject_after, typed.eject_after, 0..=1_000_000)?;
    time(&mut health.eject_for, typed.eject_for, MS..=DAY)?;
    time(
        &mut health.slow_start,
        typed.slow_start,
        Duration::ZERO..=DAY,
    )?;
    flag(&mut health.panic, typed.panic);
    Ok(())
}

fn signals(signals: &mut SignalSettings, typed: typed::Signals) -> Read<()> {
    flag(&mut signals.scrape, typed.scrape);
    text(&mut signals.path, typed.path, path)?;
    time(&mut signals.interval, typed.interval, 10 * MS..=DAY)?;
    time(&mut signals.stale_after, typed.stale_after, 10 * MS..=DAY)
}

fn label(typed: &Text, what: &str) -> Read<String> {
    let name = typed.get_ref();
    let good = !name.is_empty() && name.len() <= 128 && name.bytes().all(|b| b.is_ascii_graphic());
    if good {
        return Ok(name.clone());
    }
    Err(at(
        typed,
        format!(
            "\"{name}\" cannot name a {what}: use 1 to 128 visible ASCII characters without spaces"
        ),
    ))
}

fn pool(mut pool: PoolSettings, typed: typed::Pool) -> Read<PoolSettings> {
    pool.name = label(&typed.name, "pool")?;
    if let Some(empty) = typed.models.iter().find(|model| model.get_ref().is_empty()) {
        let message = "a model needs a name; leave models out to serve any".to_owned();
        return Err(at(empty, message));
    }
    pool.models = typed.models.into_iter().map(Spanned::into_inner).collect();
    let paths = typed.paths.iter();
    pool.paths = paths
        .map(|typed| path(typed.get_ref()).map_err(|message| at(typed, message)))
        .collect::<Read<_>>()?;
    policy(&mut pool.policy, typed.policy)?;
    health(&mut pool.health, typed.health)?;
    signals(&mut pool.signals, typed.signals)?;
    whole(&mut pool.cache_tokens, typed.cache_tokens, 1..=1 << 40)?;
    whole(&mut pool.queue_limit, typed.queue_limit, 0..=1_000_000)?;
    time(
        &mut pool.queue_deadline,
        typed.queue_deadline,
        Duration::ZERO..=DAY,
    )?;
    time(
        &mut pool.retry_after,
        typed.retry_after,
        Duration::ZERO..=DAY,
    )?;
    time(
        &mut pool.resolve_interval,
        typed.resolve_interval,
        100 * MS..=DAY,
    )?;
    let mut names = HashSet::new();
    let mut addresses = HashSet::new();
    for typed_backend in typed.backend {
        let url = typed_backend.url.clone();
        let named = typed_backend.name.clone().unwrap_or_else(|| url.clone());
        let backend = backend(typed_backend)?;
        if !names.insert(backend.name.clone()) {
            let message = format!("pool {} has two backends named {}", pool.name, backend.name);
            return Err(at(&named, message));
        }
        // Host names have no case.
        if !addresses.insert(backend.authority().to_ascii_lowercase()) {
            let message = format!("pool {} has {} twice", pool.name, backend.authority());
            return Err(at(&url, message));
        }
        pool.backends.push(backend);
    }
    if pool.backends.is_empty() {
        let message = format!("pool {} has no backend: add a [[pool.backend]]", pool.name);
        return Err(at(&typed.name, message));
    }
    Ok(pool)
}

fn backend(typed: typed::Backend) -> Read<BackendSettings> {
    let mut backend =
        values::backend(typed.url.get_ref()).map_err(|message| at(&typed.url, message))?;
    if let Some(name) = &typed.name {
        backend.name = label(name, "backend")?;
    }
    // The ledger keeps weights in 1/256.
    number(&mut backend.weight, typed.weight, 0.01..=1000.0)?;
    if typed.max_active.is_some() {
        let mut cap = 0u32;
        whole(&mut cap, typed.max_active, 1..=1_000_000)?;
        backend.max_active = Some(cap);
    }
    Ok(backend)
}
