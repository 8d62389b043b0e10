//! Writes Prometheus' text format.

use std::fmt::Write as _;

use crate::metrics::{Histogram, LATENCY_BUCKETS};

/// What kind of number a family holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows; named `…_total`.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Buckets, sum and count.
    Histogram,
}

/// A page that is being written, family by family.
#[derive(Debug, Default)]
pub struct Page {
    text: String,
    name: &'static str,
}

impl Page {
    /// Starts a family; its samples follow.
    pub fn family(&mut self, name: &'static str, kind: Kind, help: &str) -> &mut Self {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        self.name = name;
        self.put(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
        self
    }

    /// A whole number. `labels` are as [`labels`] makes them.
    pub fn count(&mut self, labels: &str, value: u64) -> &mut Self {
        self.line(labels, format_args!("{value}"))
    }

    /// Any number.
    pub fn number(&mut self, labels: &str, value: f64) -> &mut Self {
        if value.is_infinite() {
            let sign = if value > 0.0 { "+Inf" } else { "-Inf" };
            return self.line(labels, format_args!("{sign}"));
        }
        self.line(labels, format_args!("{value}"))
    }

    /// A histogram's samples: cumulative buckets, the sum, the count.
    pub fn histogram(&mut self, labels: &str, histogram: &Histogram) -> &mut Self {
        let name = self.name;
        let comma = if labels.is_empty() { "" } else { "," };
        let (counts, sum) = histogram.read();
        let mut so_far = 0;
        for (i, count) in counts.iter().enumerate() {
            so_far += count;
            match LATENCY_BUCKETS.get(i) {
                Some(bound) => self.put(format_args!(
                    "{name}_bucket{{{labels}{comma}le=\"{bound}\"}} {so_far}\n"
                )),
                None => self.put(format_args!(
                    "{name}_bucket{{{labels}{comma}le=\"+Inf\"}} {so_far}\n"
                )),
            }
        }
        let braces = if labels.is_empty() {
            String::new()
        } else {
            format!("{{{labels}}}")
        };
        self.put(format_args!("{name}_sum{braces} {sum}\n"));
        self.put(format_args!("{name}_count{braces} {so_far}\n"));
        self
    }

    /// The page.
    #[must_use]
    pub fn finish(self) -> String {
        self.text
    }

    fn line(&mut self, labels: &str, value: std::fmt::Arguments<'_>) -> &mut Self {
        let name = self.name;
        if labels.is_empty() {
            self.put(format_args!("{name} {value}\n"));
        } else {
            self.put(format_args!("{name}{{{labels}}} {value}\n"));
        }
        self
    }

    fn put(&mut self, text: std::fmt::Arguments<'_>) {
        // Writing to a String cannot fail.
        let _ = self.text.write_fmt(text);
    }
}

/// `name="value",…` with what must be escaped escaped.
#[must_use]
pub fn labels(pairs: &[(&str, &str)]) -> String {
    let mut text = String::new();
    for (i, (name, value)) in pairs.iter().enumerate() {
        if i > 0 {
            text.push(',');
        }
        text.push_str(name);
        text.push_str("=\"");
        for c in value.chars() {
            match c {
                '\\' => text.push_str("\\\\"),
                '"' => text.push_str("\\\""),
                '\n' => text.push_str("\\n"),
                c => text.push(c),
            }
        }
        text.push('"');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::prom_text::samples;
    use std::time::Duration;

    #[test]
    fn labels_are_read_back_as_they_were() {
        let odd = "a\"b\\c\nd";
        let line = format!("m{{{}}} 1", labels(&[("x", "y"), ("odd", odd)]));
        let sample = samples(&line).next().unwrap();
        assert_eq!(sample.label("odd").unwrap(), odd);
    }

    #[test]
    fn buckets_are_cumulative_and_end_at_the_count() {
        let histogram = Histogram::default();
        for ms in [1, 3, 3, 700_000] {
            histogram.observe(Duration::from_millis(ms));
        }
        let mut page = Page::default();
        page.family("h_seconds", Kind::Histogram, "Help.")
            .histogram("a=\"b\"", &histogram);
        let text = page.finish();
        let buckets: Vec<f64> = samples(&text)
            .filter(|s| s.name == "h_seconds_bucket")
            .map(|s| s.value)
            .collect();
        assert_eq!(buckets.len(), LATENCY_BUCKETS.len() + 1);
        assert!(buckets.windows(2).all(|pair| pair[0] <= pair[1]));
        assert_eq!((buckets[0], *buckets.last().unwrap()), (1.0, 4.0));
        let count = samples(&text)
            .find(|s| s.name == "h_seconds_count")
            .unwrap();
        assert_eq!(count.value, 4.0);
    }
}
