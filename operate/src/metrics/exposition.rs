//! [`Exposition`]: metrics in Prometheus' text format, version 0.0.4. Pure.
//!
//! A family is its HELP and TYPE lines and its samples, all together, as the format wants it. Label
//! values are escaped, so that no name breaks out of its place.

use std::fmt::{Display, Write};

use rblk_runtime::{CounterKind, CounterUnit, Described, LatencyCounts};

/// The type of the text, for HTTP.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The highest bound of a histogram of times: 2^24 microseconds are 17 s.
const LATENCY_POWER_MAX: u32 = 24;

/// How far apart the bounds of a histogram of times are. Each bound of each series is a series of
/// its own at Prometheus.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scale {
    /// Each is twice the one before.
    Fine,
    /// Each is 16 times the one before.
    Coarse,
}

impl Scale {
    fn step(self) -> usize {
        match self {
            Self::Fine => 1,
            Self::Coarse => 4,
        }
    }
}

/// Labels of a sample: names and values.
pub type Labels<'a> = &'a [(&'a str, &'a str)];

/// The labels and the counters of a poll group, a volume, a mount and so on.
pub type Labeled<'a, T> = (Vec<(&'a str, String)>, &'a T);

/// The type of a family's samples.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Only rises. The name ends in `_total`.
    Counter,
    /// Rises and falls.
    Gauge,
    /// Counts by upper bound.
    Histogram,
}

impl Kind {
    fn word(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

impl From<CounterKind> for Kind {
    fn from(kind: CounterKind) -> Self {
        match kind {
            CounterKind::Counter => Self::Counter,
            CounterKind::Gauge => Self::Gauge,
        }
    }
}

/// A text of metrics.
#[derive(Clone, Debug, Default)]
pub struct Exposition {
    text: String,
}

impl Exposition {
    /// Begins a family. Its samples follow.
    pub fn family<'a>(&'a mut self, name: &'a str, kind: Kind, help: &str) -> Family<'a> {
        debug_assert_eq!(kind == Kind::Counter, name.ends_with("_total"), "{name}");
        let text = &mut self.text;
        let help = help.replace('\\', "\\\\").replace('\n', "\\n");
        // Writing to a string does not fail.
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {}", kind.word());
        Family { text, name }
    }

    /// The families of described counters, each with the samples of all that have them. `subject`
    /// is the word in place of `{subject}` in names and helps.
    pub fn counters<T: Described>(&mut self, subject: &str, all: &[Labeled<'_, T>]) {
        let with_metric = T::COUNTERS.iter().filter(|counter| counter.metric.is_some());
        let with_metric: Vec<_> = with_metric.collect();
        for members in with_metric.chunk_by(|one, next| one.metric == next.metric) {
            let [first, ..] = members else { continue };
            let name = first.metric.unwrap_or_default().replace("{subject}", subject);
            let help = first.help().replace("{subject}", subject);
            let mut family = self.family(&name, first.kind.into(), &help);
            for (labels, counts) in all {
                let labels = labels.iter().map(|(name, value)| (*name, value.as_str()));
                for counter in members {
                    let labels: Vec<_> = labels.clone().chain(counter.label).collect();
                    let value = (counter.value)(counts);
                    match counter.unit {
                        CounterUnit::Number | CounterUnit::Bytes => family.sample(&labels, value),
                        CounterUnit::Micros => family.sample(&labels, seconds(value)),
                    };
                }
            }
        }
    }

    /// The text.
    #[must_use]
    pub fn into_text(self) -> String {
        self.text
    }
}

/// A family that takes samples.
#[derive(Debug)]
pub struct Family<'a> {
    text: &'a mut String,
    name: &'a str,
}

impl Family<'_> {
    /// One sample.
    pub fn sample(&mut self, labels: Labels<'_>, value: impl Display) -> &mut Self {
        self.line("", labels, None, value);
        self
    }

    /// One histogram: pairs of an upper bound and the count up to it, both rising; and the sum and
    /// the count of all.
    pub fn histogram(
        &mut self,
        labels: Labels<'_>,
        buckets: impl IntoIterator<Item = (f64, u64)>,
        sum: f64,
        count: u64,
    ) -> &mut Self {
        for (bound, up_to) in buckets {
            self.line("_bucket", labels, Some(&bound.to_string()), up_to);
        }
        self.line("_bucket", labels, Some("+Inf"), count);
        self.line("_sum", labels, None, sum);
        self.line("_count", labels, None, count);
        self
    }

    /// One histogram of times, in seconds.
    pub fn latency(
        &mut self,
        labels: Labels<'_>,
        counts: &LatencyCounts,
        scale: Scale,
    ) -> &mut Self {
        let mut buckets = counts.buckets().peekable();
        let mut up_to = 0;
        let mut bounds = Vec::new();
        for power in (0..=LATENCY_POWER_MAX).step_by(scale.step()) {
            let bound = 1_u64 << power;
            while let Some((_, count)) =
                buckets.next_if(|(upper, _)| upper.is_some_and(|upper| upper <= bound))
            {
                up_to += count;
            }
            bounds.push((seconds(bound), up_to));
        }
        self.histogram(labels, bounds, seconds(counts.sum_us()), counts.count())
    }

    fn line(&mut self, suffix: &str, labels: Labels<'_>, le: Option<&str>, value: impl Display) {
        let Self { text, name } = self;
        text.push_str(name);
        text.push_str(suffix);
        let all = labels.iter().copied().chain(le.map(|bound| ("le", bound)));
        let mut open = '{';
        for (label, value) in all {
            text.push(open);
            open = ',';
            text.push_str(label);
            text.push_str("=\"");
            escape(value, text);
            text.push('"');
        }
        if open == ',' {
            text.push('}');
        }
        // Writing to a string does not fail.
        let _ = writeln!(text, " {value}");
    }
}

#[allow(clippy::cast_precision_loss, reason = "53 bits of microseconds are 285 years")]
fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

fn escape(value: &str, text: &mut String) {
    for c in value.chars() {
        match c {
            '\\' => text.push_str("\\\\"),
            '"' => text.push_str("\\\""),
            '\n' => text.push_str("\\n"),
            c => text.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_and_escapes() {
        let mut all = Exposition::default();
        all.family("x_total", Kind::Counter, "Odd \\ help\nof two lines.")
            .sample(&[("a", "plain"), ("b", "q\" b\\ n\n{}")], 7)
            .sample(&[], 0.5);
        all.family("y", Kind::Gauge, "None.").sample(&[("c", "")], 1u64 << 63);
        let expected = "# HELP x_total Odd \\\\ help\\nof two lines.\n# TYPE x_total counter\n\
            x_total{a=\"plain\",b=\"q\\\" b\\\\ n\\n{}\"} 7\nx_total 0.5\n\
            # HELP y None.\n# TYPE y gauge\ny{c=\"\"} 9223372036854775808\n";
        assert_eq!(all.into_text(), expected);
    }

    #[test]
    fn described_counters_are_families() {
        rblk_runtime::counters! {
            /// Of a test.
            pub struct DiskWaits;
            /// READs.
            reads: Counter Number => "{subject}_ops_total" { op = "r" } "Work of the {subject}.",
            /// WRITEs.
            writes: Counter Number => "{subject}_ops_total" { op = "w" },
            /// Waits now.
            waiting: Gauge Number,
            /// Time
            /// of waits.
            ///
            /// Not in the help.
            waited_us: Counter Micros => "wait_seconds_total",
        }
        let waits = DiskWaits { reads: 1, writes: 2, waiting: 3, waited_us: 2_500_000 };
        let mut all = Exposition::default();
        all.counters("disk", &[(vec![("of", "a".to_owned())], &waits)]);
        let expected = "# HELP disk_ops_total Work of the disk.\n# TYPE disk_ops_total counter\n\
            disk_ops_total{of=\"a\",op=\"r\"} 1\ndisk_ops_total{of=\"a\",op=\"w\"} 2\n\
            # HELP wait_seconds_total Time of waits.\n# TYPE wait_seconds_total counter\n\
            wait_seconds_total{of=\"a\"} 2.5\n";
        assert_eq!(all.into_text(), expected);
    }

    #[test]
    fn times_are_counted_up_to_each_bound() {
        let mut counts = LatencyCounts::default();
        [0, 1, 1, 2, 3, 15, 16, 1 << 23, 1 << 24, 1 << 30].iter().for_each(|us| counts.record(*us));
        let text = |scale| {
            let mut all = Exposition::default();
            all.family("t_seconds", Kind::Histogram, "T.").latency(&[], &counts, scale);
            all.into_text()
        };
        let coarse = text(Scale::Coarse);
        let expected = "t_seconds_bucket{le=\"0.000001\"} 1\nt_seconds_bucket{le=\"0.000016\"} 6\n\
            t_seconds_bucket{le=\"0.000256\"} 7\n";
        assert!(coarse.contains(expected), "{coarse}");
        assert!(
            coarse.contains("{le=\"16.777216\"} 8\nt_seconds_bucket{le=\"+Inf\"} 10\n"),
            "{coarse}"
        );
        assert!(coarse.ends_with("t_seconds_count 10\n"));
        let fine = text(Scale::Fine);
        assert!(
            fine.contains("{le=\"0.000002\"} 3\nt_seconds_bucket{le=\"0.000004\"} 5\n"),
            "{fine}"
        );
        assert_eq!((fine.lines().count(), coarse.lines().count()), (30, 12));
    }

    #[test]
    fn histograms() {
        let mut all = Exposition::default();
        let buckets = [(0.000001, 1), (0.5, 3)];
        all.family("h_seconds", Kind::Histogram, "H.").histogram(&[("op", "r")], buckets, 0.25, 4);
        let expected = "# HELP h_seconds H.\n# TYPE h_seconds histogram\n\
            h_seconds_bucket{op=\"r\",le=\"0.000001\"} 1\nh_seconds_bucket{op=\"r\",le=\"0.5\"} 3\n\
            h_seconds_bucket{op=\"r\",le=\"+Inf\"} 4\nh_seconds_sum{op=\"r\"} 0.25\n\
            h_seconds_count{op=\"r\"} 4\n";
        assert_eq!(all.into_text(), expected);
    }
}
