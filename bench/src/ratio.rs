//! Tables of ratios: what was measured beside what it must reach. Absolute times are shown in passing; on
//! another machine they are others.

use std::time::Duration;

/// A table under construction.
#[derive(Debug)]
pub struct Table {
    title: String,
    rows: Vec<Row>,
}

#[derive(Debug)]
struct Row {
    name: String,
    ours: String,
    theirs: String,
    ratio: f64,
    /// The ratio to reach, and whether more is better.
    target: Option<(f64, bool)>,
}

impl Table {
    /// An empty table.
    #[must_use]
    pub fn new(title: &str) -> Self {
        Self {
            title: title.into(),
            rows: Vec::new(),
        }
    }

    /// Our time against theirs; `target` is the most it may be.
    pub fn row(&mut self, name: &str, ours: Duration, theirs: Duration, target: Option<f64>) {
        self.rows.push(Row {
            name: name.into(),
            ours: format!("{ours:.2?}"),
            theirs: format!("{theirs:.2?}"),
            ratio: ours.as_secs_f64() / theirs.as_secs_f64(),
            target: target.map(|most| (most, false)),
        });
    }

    /// A rate against another; `target` is the least it may be.
    pub fn rate(&mut self, name: &str, ours: f64, theirs: f64, target: f64) {
        self.rows.push(Row {
            name: name.into(),
            ours: format!("{ours:.0}/s"),
            theirs: format!("{theirs:.0}/s"),
            ratio: ours / theirs,
            target: Some((target, true)),
        });
    }

    /// The table in Markdown.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = format!(
            "{}\n\n| ratio | ours | theirs | is | must be | |\n| --- | --- | --- | --- | --- | --- |\n",
            self.title
        );
        for row in &self.rows {
            let (target, verdict) = match row.target {
                None => (String::new(), ""),
                Some((target, more)) => {
                    let sign = if more { "≥" } else { "≤" };
                    let met = (row.ratio >= target) == more || row.ratio == target;
                    (
                        format!("{sign} {target}"),
                        if met { "met" } else { "MISSED" },
                    )
                }
            };
            let Row {
                name,
                ours,
                theirs,
                ratio,
                ..
            } = row;
            text +=
                &format!("| {name} | {ours} | {theirs} | {ratio:.3} | {target} | {verdict} |\n");
        }
        text
    }

    /// Prints it.
    pub fn print(&self) {
        println!("{}", self.text());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missed_target_is_said() {
        let mut table = Table::new("t");
        let ms = Duration::from_millis;
        table.row("fast enough", ms(1), ms(4), Some(0.25));
        table.row("too slow", ms(2), ms(4), Some(0.25));
        table.rate("too few", 1.7, 1.0, 1.8);
        let text = table.text();
        let verdict = |name: &str| {
            let line = text
                .lines()
                .find(|line| line.contains(name))
                .expect("a row");
            line.contains("MISSED")
        };
        assert!(!verdict("fast enough") && verdict("too slow") && verdict("too few"));
    }
}
