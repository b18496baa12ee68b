//! The result of a demo: plain data, the same in JSON output and in the table.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

use super::counters::Cost;

/// What was done, where, and how it ended.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Nothing failed.
    pub(crate) passed: bool,
    /// What failed.
    pub(crate) error: Option<String>,
    /// The kernel.
    pub(crate) kernel: String,
    /// `lab` or `this machine`.
    pub(crate) place: String,
    /// The target's address.
    pub(crate) address: String,
    /// The RDMA device, or `soft`.
    pub(crate) provider: String,
    /// What carries the messages.
    pub(crate) transport: String,
    /// Regular files copied and compared.
    pub(crate) files: u64,
    /// Their bytes.
    pub(crate) file_bytes: u64,
    /// Seconds from start to end.
    pub(crate) seconds: f64,
    /// What was done, in order.
    pub(crate) rows: Vec<Row>,
}

/// One thing that was done.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    /// What.
    pub(crate) what: String,
    /// The block device, where one was used.
    pub(crate) device: Option<String>,
    /// Seconds it took.
    pub(crate) seconds: f64,
    /// Data per second, where data was moved.
    pub(crate) mib_per_s: Option<f64>,
    /// I/Os per second: fio's, else the initiator's commands.
    pub(crate) iops: Option<f64>,
    /// fio's mean latency in microseconds.
    pub(crate) mean_us: Option<f64>,
    /// What it cost, where a volume was mounted.
    pub(crate) cost: Option<Cost>,
    /// Mismatches and errors of any kind.
    pub(crate) errors: u64,
}

const HEAD: [&str; 9] =
    ["WHAT", "DEVICE", "MiB/s", "IOPS", "LAT us", "MSG/IO", "CQE/IO", "ERR", "SEC"];

/// Of the first column: all the others leave it so much of 100.
const WIDEST: usize = 36;

impl Report {
    /// The table for people: at most 100 columns.
    pub(crate) fn table(&self) -> String {
        let cells: Vec<[String; 9]> = std::iter::once(HEAD.map(str::to_owned))
            .chain(self.rows.iter().map(Row::cells))
            .collect();
        let width =
            |column: usize| cells.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: [usize; 9] = std::array::from_fn(width);
        let mut text = format!(
            "rblk demo: {} over {} on {}, Linux {} ({})\n",
            self.address, self.transport, self.provider, self.kernel, self.place
        );
        for row in &cells {
            let mut line = String::new();
            for (column, (cell, width)) in row.iter().zip(widths).enumerate() {
                let gap = if column == 0 { "" } else { "  " };
                // Words to the left, numbers to the right.
                let _ = match column {
                    0 | 1 => write!(line, "{gap}{cell:<width$}"),
                    _ => write!(line, "{gap}{cell:>width$}"),
                };
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text.push_str(
            "MSG: messages of both sides. CQE: completions, initiator+target. IO: one command.\n",
        );
        match &self.error {
            None => {
                let mib = self.file_bytes as f64 / f64::from(1 << 20);
                let _ = writeln!(
                    text,
                    "PASSED in {:.0} s: {} files ({mib:.1} MiB) are the same after a second mount",
                    self.seconds, self.files
                );
            }
            Some(error) => {
                let _ = writeln!(text, "FAILED after {:.0} s: {error}", self.seconds);
            }
        }
        text
    }
}

impl Row {
    fn cells(&self) -> [String; 9] {
        let dash = || "-".to_owned();
        let number = |value: Option<f64>| value.map_or_else(dash, short);
        let (messages, completions) = match &self.cost {
            Some(cost) => (
                cost.per_command(cost.messages).map_or_else(dash, |n| format!("{n:.2}")),
                cost.per_command(cost.initiator_completions)
                    .zip(cost.per_command(cost.target_completions))
                    .map_or_else(dash, |(i, t)| format!("{i:.2}+{t:.2}")),
            ),
            None => (dash(), dash()),
        };
        [
            self.what.chars().take(WIDEST).collect(),
            self.device.as_deref().map_or_else(dash, |d| d.trim_start_matches("/dev/").to_owned()),
            number(self.mib_per_s),
            number(self.iops),
            number(self.mean_us),
            messages,
            completions,
            self.errors.to_string(),
            format!("{:.1}", self.seconds),
        ]
    }
}

/// Three digits or more, however large the number.
fn short(value: f64) -> String {
    match value {
        v if v >= 10_000_000.0 => format!("{:.0}M", v / 1e6),
        v if v >= 100_000.0 => format!("{:.0}k", v / 1e3),
        v if v >= 100.0 => format!("{v:.0}"),
        v => format!("{v:.1}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(error: Option<&str>) -> Report {
        let cost = Cost {
            commands: 100,
            messages: 205,
            initiator_completions: 100,
            target_completions: 110,
            ..Cost::default()
        };
        Report {
            error: error.map(str::to_owned),
            address: "rdma://10.9.0.1:27720".into(),
            provider: "rxe0".into(),
            transport: "RoCE".into(),
            kernel: "7.2.12+deb13-amd64".into(),
            place: "lab".into(),
            files: 1234,
            file_bytes: 110 << 20,
            rows: vec![
                Row { what: "discover".into(), seconds: 0.31, ..Row::default() },
                Row {
                    what: "fio crc32c verify, 4k-1M, QD32, 999 MiB".into(),
                    device: Some("/dev/ublkb0".into()),
                    seconds: 1234.5,
                    mib_per_s: Some(12345.6),
                    iops: Some(1_234_567.0),
                    mean_us: Some(81234.0),
                    cost: Some(cost),
                    errors: 0,
                },
            ],
            ..Report::default()
        }
    }

    #[test]
    fn the_table_fits_100_columns_and_lines_up() {
        let table = report(None).table();
        assert!(table.lines().all(|line| line.chars().count() <= 100), "{table}");
        let end_of = |needle: &str| {
            table.lines().find_map(|line| line.find(needle).map(|at| at + needle.len())).unwrap()
        };
        assert_eq!(end_of("IOPS"), end_of("1235k"));
        assert_eq!(end_of("MSG/IO"), end_of("2.05"));
        assert!(table.contains("1.00+1.10"), "{table}");
        assert!(table.contains("PASSED") && table.contains("110.0 MiB"), "{table}");
    }

    #[test]
    fn a_failure_is_the_last_word() {
        let table = report(Some("fio: verify")).table();
        assert!(table.trim_end().ends_with("FAILED after 0 s: fio: verify"), "{table}");
    }

    #[test]
    fn json_goes_there_and_back() {
        let report = report(Some("x"));
        let text = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report);
    }
}
