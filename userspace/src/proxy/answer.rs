//! Answers that prefixlb gives itself, in the shape of OpenAI's errors.

use std::time::Duration;

use super::reason::Reason;

const fn phrase(status: u16) -> &'static str {
    match status {
        400 => "Bad Request",
        404 => "Not Found",
        408 => "Request Timeout",
        413 => "Content Too Large",
        414 => "URI Too Long",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        501 => "Not Implemented",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        505 => "HTTP Version Not Supported",
        _ => "Error",
    }
}

const fn kind(status: u16) -> &'static str {
    match status {
        429 => "rate_limit_error",
        404 => "not_found_error",
        400..500 => "invalid_request_error",
        _ => "server_error",
    }
}

/// Writes the whole answer for `reason`; nothing if there is no status for it.
pub fn write(
    out: &mut Vec<u8>,
    reason: Reason,
    message: &str,
    retry_after: Duration,
    id: Option<&str>,
    close: bool,
    head_only: bool,
) {
    let Some(status) = reason.status() else {
        return;
    };
    let body = serde_json::json!({"error": {
        "message": message,
        "type": kind(status),
        "param": null,
        "code": reason.as_str(),
    }})
    .to_string();
    let mut head = format!(
        "HTTP/1.1 {status} {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n",
        phrase(status),
        body.len()
    );
    if matches!(status, 429 | 503) {
        let seconds = retry_after.as_secs_f64().ceil().max(1.0) as u64;
        head += &format!("Retry-After: {seconds}\r\n");
    }
    if let Some(id) = id {
        head += &format!("X-Request-Id: {id}\r\n");
    }
    if close {
        head += "Connection: close\r\n";
    }
    head += "\r\n";
    out.extend_from_slice(head.as_bytes());
    if !head_only {
        out.extend_from_slice(body.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_with_a_status_has_its_phrase_and_an_openai_body() {
        for reason in Reason::ALL {
            let mut out = Vec::new();
            write(
                &mut out,
                reason,
                "Say \"why\".",
                Duration::from_millis(1200),
                Some("id-1"),
                true,
                false,
            );
            let Some(status) = reason.status() else {
                assert!(out.is_empty());
                continue;
            };
            let text = String::from_utf8(out).expect("UTF-8");
            let (head, body) = text.split_once("\r\n\r\n").expect("a head and a body");
            assert!(!head.contains(" Error\r\n"), "{status} has no phrase");
            assert_eq!(head.contains("Retry-After: 2"), matches!(status, 429 | 503));
            let value: serde_json::Value = serde_json::from_str(body).expect("JSON");
            assert_eq!(value["error"]["code"], reason.as_str());
            assert_eq!(value["error"]["message"], "Say \"why\".");
        }
    }
}
