//! Single values: text that was typed → what it means, or one clause that says what it must be.

use std::net::SocketAddr;
use std::time::Duration;

use crate::config::{
    BackendSettings, GateKind, HashOn, KernelMode, LogFormat, PolicyKind, Scorer, SessionFrom,
};

/// A duration within `range`: "30s", "500ms", "1m 30s".
pub fn duration(text: &str, range: std::ops::RangeInclusive<Duration>) -> Result<Duration, String> {
    let value = humantime::parse_duration(text).map_err(|_| {
        format!("\"{text}\" is not a duration: write one like \"30s\" or \"500ms\"")
    })?;
    if range.contains(&value) {
        return Ok(value);
    }
    Err(format!(
        "\"{text}\" is out of range: from {} to {}",
        humantime::format_duration(*range.start()),
        humantime::format_duration(*range.end())
    ))
}

/// A number of bytes with a unit: "64KiB".
pub fn size(text: &str) -> Result<u64, String> {
    let wrong = || {
        format!(
            "\"{text}\" is not a size: write bytes as a number, or like \"64KiB\" or \"512MiB\""
        )
    };
    let digits = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let number: u64 = text[..digits].parse().map_err(|_| wrong())?;
    let factor: u64 = match text[digits..].trim() {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "KB" | "kB" => 1000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        _ => return Err(wrong()),
    };
    number.checked_mul(factor).ok_or_else(wrong)
}

/// An address to listen on.
pub fn listen(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        format!("\"{text}\" is not an address: write IP:PORT, like 127.0.0.1:8080 or [::]:8080")
    })
}

/// A backend's URL: `http://HOST:PORT`, or `HOST:PORT` alone.
pub fn backend(text: &str) -> Result<BackendSettings, String> {
    let rest = match text.split_once("://") {
        None => text,
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => rest,
        Some((scheme, _)) if scheme.eq_ignore_ascii_case("https") => {
            return Err(format!(
                "\"{text}\" asks for TLS, which prefixlb does not speak to backends: use http://"
            ));
        }
        Some((scheme, _)) => {
            return Err(format!(
                "\"{text}\" has the scheme {scheme}: only http:// is known"
            ));
        }
    };
    let authority = rest.strip_suffix('/').unwrap_or(rest);
    if let Some(odd) = authority.find(['/', '?', '#', '@']) {
        return Err(format!(
            "\"{text}\" has more than host and port (from \"{}\" on): write http://HOST:PORT",
            &authority[odd..]
        ));
    }
    let no_port = || format!("\"{text}\" has no port: write http://HOST:PORT");
    let (host, port) = match authority.strip_prefix('[') {
        Some(bracketed) => {
            let (host, after) = bracketed
                .split_once(']')
                .ok_or_else(|| format!("\"{text}\" has a [ without its ]"))?;
            (
                ipv6(host, text)?,
                after.strip_prefix(':').ok_or_else(no_port)?,
            )
        }
        None => {
            let (host, port) = authority.rsplit_once(':').ok_or_else(no_port)?;
            if host.contains(':') {
                return Err(format!(
                    "\"{text}\" is an IPv6 address without brackets: write http://[ADDRESS]:PORT"
                ));
            }
            (name_or_ipv4(host, text)?, port)
        }
    };
    let number = port.parse::<u16>().ok().filter(|port| *port != 0);
    let port = number
        .filter(|_| port.bytes().all(|b| b.is_ascii_digit()))
        .ok_or_else(|| format!("\"{text}\" has no valid port: it must be 1 to 65535"))?;
    let mut backend = BackendSettings {
        name: String::new(),
        host,
        port,
        weight: 1.0,
        max_active: None,
    };
    backend.name = backend.authority();
    Ok(backend)
}

fn ipv6(host: &str, text: &str) -> Result<String, String> {
    // In a URL the % of a zone is written %25 (RFC 6874).
    let plain = host.replacen("%25", "%", 1);
    let address = plain
        .split_once('%')
        .map_or(&*plain, |(address, _)| address);
    match address.parse::<std::net::Ipv6Addr>() {
        Ok(_) => Ok(plain),
        Err(_) => Err(format!("\"{text}\": {host} is not an IPv6 address")),
    }
}

fn name_or_ipv4(host: &str, text: &str) -> Result<String, String> {
    let numeric = !host.is_empty() && host.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    if numeric && host.parse::<std::net::Ipv4Addr>().is_err() {
        return Err(format!("\"{text}\": \"{host}\" is not an IPv4 address"));
    }
    let named = !host.is_empty()
        && host.len() <= 253
        && host
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_'));
    if named {
        Ok(host.to_owned())
    } else {
        Err(format!("\"{text}\": \"{host}\" is not a host name"))
    }
}

/// The name of a field or cookie.
fn field_name(name: &str) -> Result<String, String> {
    if prefixlb_common::framing::is_token(name.as_bytes()) {
        Ok(name.to_owned())
    } else {
        Err(format!("\"{name}\" is not a valid field name"))
    }
}

/// A header field's name, lower case.
pub fn header(name: &str) -> Result<String, String> {
    field_name(&name.to_ascii_lowercase())
}

/// `header:NAME` or `cookie:NAME`.
pub fn session(text: &str) -> Result<SessionFrom, String> {
    match text.split_once(':') {
        Some(("header", name)) => header(name).map(SessionFrom::Header),
        Some(("cookie", name)) => field_name(name).map(SessionFrom::Cookie),
        _ => Err(format!(
            "\"{text}\" is not a place for a session id: write \"header:NAME\" or \"cookie:NAME\""
        )),
    }
}

/// `key`, `session` or `header:NAME`.
pub fn hash_on(text: &str) -> Result<HashOn, String> {
    match text.split_once(':') {
        None if text == "key" => Ok(HashOn::Key),
        None if text == "session" => Ok(HashOn::Session),
        Some(("header", name)) => header(name).map(HashOn::Header),
        _ => Err(format!(
            "\"{text}\" cannot be hashed on: write \"key\", \"session\" or \"header:NAME\""
        )),
    }
}

/// One of a few names.
fn one_of<T: Copy>(what: &str, text: &str, known: &[(&str, T)]) -> Result<T, String> {
    if let Some((_, value)) = known.iter().find(|(name, _)| *name == text) {
        return Ok(*value);
    }
    let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
    Err(format!(
        "\"{text}\" is no {what}: it is one of {}",
        names.join(", ")
    ))
}

/// A policy's name.
pub fn policy(text: &str) -> Result<PolicyKind, String> {
    one_of(
        "policy",
        text,
        &PolicyKind::ALL.map(|kind| (kind.as_str(), kind)),
    )
}

/// A gate's name.
pub fn gate(text: &str) -> Result<GateKind, String> {
    one_of(
        "gate",
        text,
        &[("gap", GateKind::Gap), ("absolute", GateKind::Absolute)],
    )
}

/// A scorer's name.
pub fn scorer(text: &str) -> Result<Scorer, String> {
    one_of(
        "scorer",
        text,
        &[
            ("token-load", Scorer::TokenLoad),
            ("active-requests", Scorer::ActiveRequests),
        ],
    )
}

/// A log format's name.
pub fn log_format(text: &str) -> Result<LogFormat, String> {
    one_of(
        "log format",
        text,
        &[
            ("json", LogFormat::Json),
            ("logfmt", LogFormat::Logfmt),
            ("off", LogFormat::Off),
        ],
    )
}

/// Whether BPF is used.
pub fn kernel(text: &str) -> Result<KernelMode, String> {
    one_of(
        "kernel mode",
        text,
        &[
            ("auto", KernelMode::Auto),
            ("off", KernelMode::Off),
            ("require", KernelMode::Require),
        ],
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backends_are_read_in_every_usual_form() {
        for (text, host, port, name) in [
            ("http://10.0.0.1:8000", "10.0.0.1", 8000, "10.0.0.1:8000"),
            (
                "engine-1.local:80",
                "engine-1.local",
                80,
                "engine-1.local:80",
            ),
            ("http://[::1]:9001/", "::1", 9001, "[::1]:9001"),
            (
                "[fe80::1%25lo]:9003",
                "fe80::1%lo",
                9003,
                "[fe80::1%lo]:9003",
            ),
        ] {
            let backend = backend(text).expect(text);
            assert_eq!(
                (&*backend.host, backend.port, &*backend.name),
                (host, port, name)
            );
        }
    }

    #[test]
    fn a_bad_backend_is_told_what_is_wrong_with_it() {
        for (text, says) in [
            ("https://a:1", "TLS"),
            ("ftp://a:1", "scheme ftp"),
            ("http://a", "no port"),
            ("http://a:0", "1 to 65535"),
            ("http://a:+1", "1 to 65535"),
            ("http://a:70000", "1 to 65535"),
            ("http://a:1/v1", "\"/v1\""),
            ("http://u@a:1", "\"@a:1\""),
            ("http://::1:80", "brackets"),
            ("http://[::g]:80", "IPv6"),
            ("http://[::1:80", "without its ]"),
            ("http://999.1.1.1:80", "IPv4"),
            ("http://:80", "host name"),
            ("http://a b:80", "host name"),
            ("", "no port"),
        ] {
            let error = backend(text).expect_err(text);
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn sizes_and_durations_have_units() {
        assert_eq!(size("64KiB"), Ok(65_536));
        assert_eq!(size("12"), Ok(12));
        assert!(size("64K").is_err() && size("KiB").is_err() && size("-1").is_err());
        assert!(size("99999999999GiB").is_err());
        let range = Duration::from_millis(1)..=Duration::from_secs(60);
        assert_eq!(
            duration("1s 500ms", range.clone()),
            Ok(Duration::from_millis(1500))
        );
        assert!(duration("2h", range.clone()).is_err());
        assert!(duration("5", range).is_err());
    }
}
