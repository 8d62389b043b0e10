//! What rounds showed, and the tables made of it.
//!
//! A ratio is the median of the ratios within each round, not the ratio of two medians: both sides of it then
//! ran within seconds of each other, on a machine whose speed drifts.

use std::time::Duration;

/// What one round of requests or events showed.
#[derive(Debug, Default)]
pub struct Round {
    /// Requests, or events, that came whole.
    pub count: u64,
    /// Reads that brought them, of streams: fewer than events means that some were joined on the way.
    pub reads: u64,
    /// How long it took.
    pub elapsed: Duration,
    /// Times of single requests or events.
    pub times: Vec<Duration>,
}

impl Round {
    /// The time that this share of requests did not exceed.
    pub fn quantile(&mut self, share: f64) -> Duration {
        self.times.sort();
        let at = (share * self.times.len() as f64) as usize;
        self.times
            .get(at.min(self.times.len().saturating_sub(1)))
            .copied()
            .unwrap_or_default()
    }
}

/// What one contender did in one kind of run, a value a round.
#[derive(Debug, Default)]
pub struct Cell {
    /// Its name.
    pub name: &'static str,
    /// The balancer's CPU a request or event, µs; nothing for none.
    pub cpu_us: Vec<f64>,
    /// Requests or events a second.
    pub rate: Vec<f64>,
    /// Half the requests took no longer. µs.
    pub p50_us: Vec<f64>,
    /// 99 of 100 took no longer. µs.
    pub p99_us: Vec<f64>,
    /// Events a read.
    pub joined: Vec<f64>,
}

impl Cell {
    /// Notes one round; `spent`: the balancer's CPU, ns.
    pub fn note(&mut self, mut round: Round, spent: Option<u64>) {
        let count = round.count.max(1) as f64;
        self.cpu_us
            .extend(spent.map(|spent| spent as f64 / 1e3 / count));
        self.rate.push(count / round.elapsed.as_secs_f64());
        self.p50_us.push(round.quantile(0.5).as_secs_f64() * 1e6);
        self.p99_us.push(round.quantile(0.99).as_secs_f64() * 1e6);
        self.joined.push(count / round.reads.max(1) as f64);
    }
}

/// The middle value, or the mean of the middle two; NaN of none.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let at = |place: usize| values.get(place).copied().unwrap_or(f64::NAN);
    (at(values.len().saturating_sub(1) / 2) + at(values.len() / 2)) / 2.0
}

/// Median of the ratios within each round, with the least and the greatest.
#[must_use]
pub fn ratio(ours: &[f64], theirs: &[f64]) -> [f64; 3] {
    let each: Vec<f64> = ours.iter().zip(theirs).map(|(a, b)| a / b).collect();
    let least = each.iter().copied().fold(f64::NAN, f64::min);
    let greatest = each.iter().copied().fold(f64::NAN, f64::max);
    [median(&each), least, greatest]
}

/// The rows of one run: every contender, and prefixlb against it.
#[must_use]
pub fn rows(unit: &str, cells: &[Cell]) -> String {
    let mut text = format!(
        "| | CPU a {unit}, µs | prefixlb / it | {unit}s/s | of direct | p50, µs | p99, µs |\n| --- | --- | --- | --- | --- | --- | --- |\n"
    );
    let (Some(direct), Some(ours)) = (find(cells, "direct"), find(cells, "prefixlb")) else {
        return text;
    };
    for cell in cells {
        let cpu = match cell.cpu_us.as_slice() {
            [] => "– | –".into(),
            cpu => {
                let [middle, least, greatest] = ratio(&ours.cpu_us, cpu);
                let of_ours = if cell.name == ours.name {
                    "1".into()
                } else {
                    format!("{middle:.2} ({least:.2}–{greatest:.2})")
                };
                format!("{:.2} | {of_ours}", median(cpu))
            }
        };
        text += &format!(
            "| {} | {cpu} | {:.0} | {:.2} | {:.0} | {:.0} |\n",
            cell.name,
            median(&cell.rate),
            ratio(&cell.rate, &direct.rate)[0],
            median(&cell.p50_us),
            median(&cell.p99_us)
        );
    }
    text
}

/// The cell of this name.
#[must_use]
pub fn find<'a>(cells: &'a [Cell], name: &str) -> Option<&'a Cell> {
    cells.iter().find(|cell| cell.name == name)
}

/// One line of the summary: a target, what was measured, and whether it holds.
#[must_use]
pub fn verdict(what: &str, measured: f64, bound: f64, at_most: bool) -> String {
    let holds = if at_most {
        measured <= bound
    } else {
        measured >= bound
    };
    let sign = if at_most { "≤" } else { "≥" };
    let word = if measured.is_nan() {
        "not measured"
    } else if holds {
        "yes"
    } else {
        "**no**"
    };
    format!("| {what} | {sign} {bound} | {measured:.2} | {word} |\n")
}

/// prefixlb's value against the least of HAProxy's and nginx's, of each round. NaN without them.
#[must_use]
pub fn against_better(cells: &[Cell], value: impl Fn(&Cell) -> &[f64]) -> f64 {
    let of = |name| find(cells, name).map(&value);
    let (Some(ours), Some(haproxy), Some(nginx)) = (of("prefixlb"), of("HAProxy"), of("nginx"))
    else {
        return f64::NAN;
    };
    let better: Vec<f64> = haproxy.iter().zip(nginx).map(|(a, b)| a.min(*b)).collect();
    ratio(ours, &better)[0]
}

/// prefixlb's value against one contender's.
#[must_use]
pub fn against(cells: &[Cell], name: &str, value: impl Fn(&Cell) -> &[f64]) -> f64 {
    match (find(cells, "prefixlb"), find(cells, name)) {
        (Some(ours), Some(other)) => ratio(value(ours), value(other))[0],
        _ => f64::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_in_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), 2.5);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn ratios_are_of_rounds_not_of_medians() {
        // The machine was half as fast in the second round; the ratio was the same.
        assert_eq!(ratio(&[1.0, 2.0], &[2.0, 4.0]), [0.5, 0.5, 0.5]);
    }

    #[test]
    fn the_better_one_is_found_round_by_round() {
        let cell = |name, cpu: &[f64]| Cell {
            name,
            cpu_us: cpu.to_vec(),
            ..Cell::default()
        };
        let cells = [
            cell("prefixlb", &[3.0, 3.0, 3.0]),
            cell("HAProxy", &[4.0, 6.0, 4.0]),
            cell("nginx", &[6.0, 4.0, 6.0]),
        ];
        assert_eq!(against_better(&cells, |cell| &cell.cpu_us), 0.75);
        assert!(against(&cells, "Envoy", |cell| &cell.cpu_us).is_nan());
    }

    #[test]
    fn a_verdict_says_no_where_the_target_is_missed() {
        assert!(verdict("x", 0.95, 0.9, true).contains("**no**"));
        assert!(verdict("x", 1.8, 1.7, false).contains("yes"));
        assert!(verdict("x", f64::NAN, 1.7, false).contains("not measured"));
    }
}
