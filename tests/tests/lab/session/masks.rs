//! The differences allowed between a sample and the real output, all in one list. Pure.
//!
//! A table is compared cell by cell, and other text word by word. The width of columns and the
//! places of line breaks do not matter. A number may vary, but not its kind: a time stays a time,
//! and a size a size.

/// Columns with numbers that vary: counts, rates, times, parts, and cached sizes.
const COLUMNS: [&str; 40] = [
    "R/s",
    "W/s",
    "MiB/s",
    "rMiB/s",
    "wMiB/s",
    "p99",
    "p99 R",
    "p99 W",
    "rP50",
    "rP99",
    "wP50",
    "wP99",
    "STORE P99",
    "DEPTH",
    "HIT",
    "HITS",
    "CACHED",
    "DIRTY",
    "READS",
    "WRITES",
    "FLUSHES",
    "READ",
    "WRITTEN",
    "IN FLIGHT",
    "SENT AGAIN",
    "COUNT",
    "MEAN",
    "P50",
    "P99",
    "QUEUE",
    "TARGET",
    "DATA",
    "CACHE",
    "STORE",
    "ANSWER",
    "NUMBER",
    "EPOCH",
    "GROUP",
    "DELAYED",
    "MEAN DELAY",
];
/// Columns with small letters.
const MIXED: [&str; 15] = [
    "R/s", "W/s", "MiB/s", "rMiB/s", "wMiB/s", "p99", "p99 R", "p99 W", "rP50", "rP99", "wP50",
    "wP99", "IN", "R", "BYTES/S",
];
/// Commands with numbers in words that vary, too.
const COUNTED: [&str; 6] = [
    "rblk-target status -v",
    "rblk-target top",
    "rblk-target trace",
    "rblk-initiator top",
    "rblk-initiator status",
    "rblk-initiator metrics",
];
/// The rest of the line after these words varies, in the output of these commands: times,
/// processes, versions, and properties of the machine.
const REST: [(&str, &str); 14] = [
    ("rblk-target check", "running target (process "),
    ("rblk-target status", "serving, up "),
    ("rblk-target drain", "stopped after "),
    ("rblk-target trace", " queue "),
    ("rblk-target doctor", "runs, process "),
    ("rblk-target doctor", "ok kernel "),
    ("rblk-target doctor", "ok clock "),
    ("rblk-initiator doctor", "ok kernel "),
    ("rblk-initiator doctor", "ok clock "),
    ("rblk-initiator doctor", "read in "),
    ("rblk-initiator status", "process "),
    ("rblk-initiator status", "last disconnect "),
    ("dd ", "copied, "),
    ("resize2fs ", "resize2fs 1."),
];

/// The one word after these words varies, in the output of these commands. The rest of the line
/// counts.
const NEXT: [(&str, &str); 2] =
    [("rblk-target upgrade", "process"), ("rblk-target upgrade", "pause")];

/// Operations of a trace vary: a file system also writes on its own.
const OPERATIONS: [&str; 5] = ["read", "write", "flush", "discard", "write-zeroes"];

/// Beginnings of optional lines of these commands: a drain that ends at once prints no such line.
const PASSING: [(&str, &str); 1] = [("rblk-target drain", "draining: ")];

/// The first forbidden difference, in words.
pub(super) fn difference(command: &str, sample: &[String], said: &[String]) -> Option<String> {
    let (ours, real) = (parts(command, sample), parts(command, said));
    for (ours, real) in ours.iter().zip(&real) {
        let fits = match (ours, real) {
            (Part::Header(ours), Part::Header(real)) => ours == real,
            (Part::Row(columns, ours), Part::Row(_, real)) => {
                ours.len() == real.len()
                    && (0..ours.len()).all(|at| {
                        let varies = columns.get(at).is_some_and(|c| COLUMNS.contains(&&**c));
                        ours[at] == real[at] || varies && is_alike(&ours[at], &real[at])
                    })
            }
            (Part::Words(ours), Part::Words(real)) => {
                let varies = COUNTED.iter().any(|counted| command.starts_with(counted));
                let fits = |(ours, real): (&String, &String)| {
                    ours == real || varies && is_alike(ours, real)
                };
                ours.len() == real.len() && ours.iter().zip(real).all(fits)
            }
            _ => false,
        };
        if !fits {
            return Some(format!("sample: {ours:?}\nsaid:   {real:?}"));
        }
    }
    let lengths = (ours.len(), real.len());
    (lengths.0 != lengths.1)
        .then(|| format!("{} parts in the sample, {} said", lengths.0, lengths.1))
}

/// A unit of the comparison.
#[derive(Debug)]
enum Part {
    /// The names of columns.
    Header(Vec<String>),
    /// A row below them.
    Row(Vec<String>, Vec<String>),
    /// Lines up to an empty one, or to a table.
    Words(Vec<String>),
}

fn parts(command: &str, lines: &[String]) -> Vec<Part> {
    let mut parts = Vec::new();
    let mut columns: Option<Vec<String>> = None;
    let mut may_go_on = false;
    let passes = |line: &&String| {
        PASSING.iter().any(|(of, begin)| command.starts_with(of) && line.starts_with(begin))
    };
    for line in lines.iter().filter(|line| !passes(line)) {
        let line = masked(command, line);
        if line.is_empty() {
            (columns, may_go_on) = (None, false);
            continue;
        }
        let cells = cells(&line);
        if is_header(&cells) {
            columns = Some(cells.clone());
            parts.push(Part::Header(cells));
            continue;
        }
        // A line of words below the rows has no columns.
        if let Some(columns) = columns.clone().filter(|_| cells.len() > 2) {
            parts.push(Part::Row(columns, cells));
            continue;
        }
        let words = line.split_whitespace().map(str::to_owned);
        match parts.last_mut() {
            Some(Part::Words(last)) if may_go_on => last.extend(words),
            _ => parts.push(Part::Words(words.collect())),
        }
        (columns, may_go_on) = (None, true);
    }
    parts
}

/// A line without the parts that vary entirely: times of day, ports, the word or the rest after
/// some words.
fn masked(command: &str, line: &str) -> String {
    let mut words: Vec<String> = line.split(' ').map(|word| no_port(no_moment(word))).collect();
    for (_, before) in NEXT.iter().filter(|(of, _)| command.starts_with(of)) {
        if let Some(at) = words.iter().position(|word| word == before)
            && let Some(next) = words.get_mut(at + 1)
        {
            "...".clone_into(next);
        }
    }
    if command.starts_with("rblk-target trace") {
        let operation = words.iter_mut().find(|word| OPERATIONS.contains(&word.as_str()));
        operation.into_iter().for_each(|word| "OPERATION".clone_into(word));
    }
    let line = words.join(" ").trim_end().to_owned();
    let said = line.split_whitespace().collect::<Vec<_>>().join(" ");
    for (of, after) in REST {
        if let Some(at) = said.find(after).filter(|_| command.starts_with(of)) {
            return format!("{}...", &said[..at + after.len()]);
        }
    }
    line
}

/// `2026-01-02T03:04:05Z` is a moment, and so is one with milliseconds.
fn no_moment(word: &str) -> &str {
    let is_one =
        [20, 24].contains(&word.len()) && word.ends_with('Z') && word.as_bytes()[10] == b'T';
    if is_one { "MOMENT" } else { word }
}

/// The port of a connection is the kernel's choice. Ports of the target are not.
fn no_port(word: &str) -> String {
    let Some((address, rest)) = word.split_once(':') else { return word.to_owned() };
    let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let is_address = address.ends_with(super::ADDRESS) && digits > 0;
    if !is_address || ["7720", "7721"].contains(&&rest[..digits]) {
        return word.to_owned();
    }
    format!("{address}:PORT{}", &rest[digits..])
}

/// The cells of a row, separated by two or more spaces.
fn cells(line: &str) -> Vec<String> {
    let cells = line.split("  ").map(str::trim).filter(|cell| !cell.is_empty());
    cells.map(str::to_owned).collect()
}

fn is_header(cells: &[String]) -> bool {
    let is_name = |cell: &String| {
        let is_upper =
            |c: char| c.is_ascii_uppercase() || c == '-' || c == ' ' || c.is_ascii_digit();
        MIXED.contains(&&**cell)
            || cell.chars().all(is_upper) && cell.starts_with(|c: char| c.is_ascii_uppercase())
    };
    cells.len() > 2 && cells.iter().all(is_name)
}

/// Whether two words are numbers of one kind, followed by the same signs.
fn is_alike(ours: &str, real: &str) -> bool {
    let (ours, real) = (kind(ours), kind(real));
    match (&ours, &real) {
        (Some((None, ours)), Some((_, real))) | (Some((_, ours)), Some((None, real))) => {
            ours == real
        }
        (Some(_), _) => ours == real,
        _ => false,
    }
}

/// The kind of a number, and the signs after it. No kind for `-`, which matches any number.
fn kind(word: &str) -> Option<(Option<&'static str>, &str)> {
    let plain = word.trim_end_matches([',', ':', ';', '.', ')']);
    let signs = &word[plain.len()..];
    let plain = plain.trim_start_matches('(');
    if plain == "-" {
        return Some((None, signs));
    }
    let unit = plain.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
    if unit.len() == plain.len() {
        return None;
    }
    let kind = match unit {
        "" | "k" | "M" => "count",
        "B" | "KiB" | "MiB" | "GiB" => "size",
        "us" | "ms" | "s" | "m" => "time",
        "%" => "part",
        _ => return None,
    };
    Some((Some(kind), signs))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fits(command: &str, sample: &str, said: &str) -> bool {
        let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
        difference(command, &lines(sample), &lines(said)).is_none()
    }

    #[test]
    fn only_varying_parts_may_differ() {
        let table = "VOLUME   SIZE  HITS  p99 R  HELD BY\nvol0    64MiB   14%  3.8ms  client1";
        let status = |said: &str| fits("rblk-target status", table, said);
        assert!(status(&table.replace("14%", "9%").replace("3.8ms", "-")));
        for (from, to) in
            [("64MiB", "32MiB"), ("client1", "-"), ("14%", "14ms"), ("HITS", "HIT"), ("vol0", "v")]
        {
            assert!(!status(&table.replace(from, to)), "{from} for {to}");
        }
        let top = |said: &str| fits("rblk-target top --once", "store1  92 IOPS  3% cached", said);
        assert!(top("store1  7 IOPS  0% cached") && !top("store2  7 IOPS  0% cached"));
        assert!(!fits("rblk-target volume list", "7 volumes", "8 volumes"));
    }

    #[test]
    fn moments_ports_and_the_rest_of_lines_vary() {
        let line = "2026-11-23T06:57:47Z connect client1 192.0.2.1:55028: the host came";
        let other = line.replace("06:57:47", "07:00:00").replace("55028", "1");
        assert!(fits("rblk-target events", line, &other));
        assert!(!fits("rblk-target events", line, &line.replace("connect", "leave")));
        let listening = "listening on rdma://192.0.2.1:7720";
        assert!(!fits("rblk-target status", listening, &listening.replace("7720", "7730")));
        let up = "store1  serving, up 1s, rblk 0.1.0, pid 175";
        assert!(fits("rblk-target status", up, "store1  serving, up 2m 1s, rblk 0.1.0, pid 9"));
        assert!(!fits("rblk-target status", up, "store1  draining, up 1s, rblk 0.1.0, pid 175"));
        assert!(!fits("rblk-target drain", "stopped after 1 s", ""));
    }

    #[test]
    fn an_upgrade_may_pause_and_sends_nothing_again() {
        let sample = "process 7 serves anew, by the same version 0.1.0\n\
                      pause 180 ms, mounts back 1 of 1, requests sent again 0";
        let upgrade = |said: &str| fits("rblk-target upgrade", sample, said);
        assert!(upgrade(&sample.replace("180", "9").replace("process 7", "process 12")));
        for (from, to) in [("again 0", "again 1"), ("1 of 1", "0 of 1"), ("0.1.0", "0.2.0")] {
            assert!(!upgrade(&sample.replace(from, to)), "{from} for {to}");
        }
    }

    #[test]
    fn the_waits_of_a_slow_command_may_vary() {
        let line = "2026-11-23T08:00:00.123Z    15.2ms write lba 2048 4KiB client1 session 3 queue 2: \
                    data 0.2ms, store 15.0ms";
        let other = "2026-11-23T09:01:02.003Z     1.2ms write lba 99 64KiB client1 session 4 queue 0: \
                     store 1.0ms";
        let trace = |said: &str| fits("rblk-target trace vol0", line, said);
        assert!(trace(&other.replace("write", "flush")) && !trace(&other.replace("write", "walk")));
        assert!(!trace(&other.replace("client1", "-")));
    }

    #[test]
    fn lines_of_words_may_break_elsewhere() {
        let (long, short) = ("cache: 8 cached, 9 read ahead", "cache: 12345 cached, 9 read\nahead");
        assert!(fits("rblk-target status -v", long, short));
        assert!(!fits("rblk-target status -v", long, "cache: 8 cached, 9 read"));
    }
}
