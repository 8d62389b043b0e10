//! A tolerant reader of Prometheus' text format.
//!
//! Engines write it in several dialects (OpenMetrics, time stamps, escapes, exponents, NaN). A line that
//! cannot be read is passed over: one odd series must not hide the others. Nothing is copied but a label's
//! value that has escapes in it.

use std::borrow::Cow;

/// One series at one time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample<'a> {
    /// Metric name.
    pub name: &'a str,
    /// What stands between the braces, as written.
    pub labels: &'a str,
    /// Its value; may be NaN or infinite.
    pub value: f64,
}

/// Every sample of `page` that can be read, in order.
pub fn samples(page: &str) -> impl Iterator<Item = Sample<'_>> {
    page.lines().filter_map(sample)
}

fn sample(line: &str) -> Option<Sample<'_>> {
    let line = line.trim();
    if line.starts_with('#') {
        return None;
    }
    let end = line.find(|c: char| c == '{' || c.is_ascii_whitespace())?;
    let (name, rest) = line.split_at(end);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(inner) => {
            let close = closing_brace(inner)?;
            (&inner[..close], &inner[close + 1..])
        }
        None => ("", rest),
    };
    let value = rest.split_ascii_whitespace().next()?.parse().ok()?;
    let named = !name.is_empty();
    named.then_some(Sample {
        name,
        labels,
        value,
    })
}

/// Where the label set ends: the first brace outside of quotes.
fn closing_brace(text: &str) -> Option<usize> {
    let mut quoted = false;
    let mut escaped = false;
    for (i, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b'}' if !quoted => return Some(i),
            _ => {}
        }
    }
    None
}

impl<'a> Sample<'a> {
    /// The value of label `name`, escapes undone.
    #[must_use]
    pub fn label(&self, name: &str) -> Option<Cow<'a, str>> {
        let mut rest = self.labels;
        loop {
            let (key, after) = rest.split_once('=')?;
            let quoted = after.trim_start().strip_prefix('"')?;
            let end = closing_quote(quoted)?;
            if key.trim() == name {
                return Some(unescape(&quoted[..end]));
            }
            rest = quoted[end + 1..].trim_start().trim_start_matches(',');
        }
    }
}

fn closing_quote(text: &str) -> Option<usize> {
    let mut escaped = false;
    text.bytes().position(|byte| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    })
}

fn unescape(text: &str) -> Cow<'_, str> {
    if !text.contains('\\') {
        return Cow::Borrowed(text);
    }
    let mut plain = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => match chars.next() {
                Some('n') => plain.push('\n'),
                Some(other) => plain.push(other),
                None => plain.push('\\'),
            },
            c => plain.push(c),
        }
    }
    Cow::Owned(plain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn one(line: &str) -> Sample<'_> {
        sample(line).unwrap_or_else(|| panic!("unread: {line}"))
    }

    #[test]
    fn dialects() {
        assert_eq!(one("up 1").value, 1.0);
        assert_eq!(one("  up\t1.5e3  1700000000 ").value, 1500.0);
        assert_eq!(one("a:b_total{} 8.128902e+06").value, 8_128_902.0);
        assert_eq!(one("x{a=\"b\"}3").value, 3.0);
        assert!(one("x NaN").value.is_nan());
        assert_eq!(one("x{le=\"+Inf\"} +Inf").value, f64::INFINITY);
        assert_eq!(one("x 4 # {trace=\"1\"} 0.5").value, 4.0);
    }

    #[test]
    fn labels_with_escapes_and_braces() {
        let line = r#"m{model="a\"}\\ ,x=\n",engine = "1" , odd="=,"} 2"#;
        let sample = one(line);
        assert_eq!(sample.value, 2.0);
        assert_eq!(sample.label("model").unwrap(), "a\"}\\ ,x=\n");
        assert_eq!(sample.label("engine").unwrap(), "1");
        assert_eq!(sample.label("odd").unwrap(), "=,");
        assert_eq!(sample.label("absent"), None);
    }

    #[test]
    fn what_cannot_be_read_is_passed_over() {
        let page = "# HELP a b\n\nbroken\nx{a=\"b} 1\n{} 1\ny one\nok 7\nz{\"\n";
        let read: Vec<_> = samples(page).map(|s| s.name).collect();
        assert_eq!(read, ["ok"]);
    }

    proptest! {
        #[test]
        fn never_panics(page in ".{0,200}") {
            for sample in samples(&page) {
                let _ = sample.label("engine");
            }
        }

        #[test]
        fn never_panics_on_what_looks_right(page in r#"([a-z:]{1,4}\{?[a-z=",\\}é ]{0,20}\}? ?[0-9.e+-]{0,5}\n){0,8}"#) {
            for sample in samples(&page) {
                let _ = sample.label("a");
            }
        }

        #[test]
        fn reads_back_what_was_written(value in any::<f64>(), label in ".{0,20}") {
            let escaped = label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let line = format!("m{{a=\"x\",l=\"{escaped}\"}} {value:e}");
            // A line break that the format does not escape ends the line, as it would for any reader.
            prop_assume!(!label.contains(['\r', '\u{b}', '\u{c}']));
            let sample = sample(&line).expect("well formed");
            prop_assert!(sample.value == value || value.is_nan());
            prop_assert_eq!(sample.label("l").expect("is there"), label);
        }
    }
}
