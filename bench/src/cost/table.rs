//! A [`Report`] as text.

use std::fmt::Write;

use super::live::LiveEnd;
use super::time::hit_ns;
use super::{
    AgedCost, Case, CrcCost, EndCost, HitRatio, InstructionCost, LiveCost, Report, TimeCost, word,
};

/// The report as tables, one per way of measuring.
pub(crate) fn table(report: &Report) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    if !report.costs.is_empty() {
        let _ = counters(&mut text, report);
    }
    if !report.instructions.is_empty() {
        let _ = instructions(&mut text, &report.instructions);
    }
    if !report.crcs.is_empty() {
        let _ = crcs(&mut text, &report.crcs);
    }
    if !report.times.is_empty() {
        let _ = times(&mut text, &report.times);
    }
    if !report.aged.is_empty() {
        let _ = aged(&mut text, &report.aged);
    }
    if !report.hit_ratios.is_empty() {
        let _ = hit_ratios(&mut text, &report.hit_ratios);
    }
    if !report.live.is_empty() {
        let _ = live(&mut text, &report.live);
    }
    text
}

fn aged(text: &mut String, costs: &[AgedCost]) -> std::fmt::Result {
    writeln!(text, "per request of 128 KiB, in a cache of a sixteenth of the volume")?;
    writeln!(
        text,
        "{:<11}{:>6}  {:<13}{:<10}{:>8}{:>8}{:>10}{:>8}{:>8}",
        "volume", "groups", "after", "request", "READs", "WRITEs", "store ops", "pieces", "moved"
    )?;
    for cost in costs {
        writeln!(
            text,
            "{:<11}{:>6}  {:<13}{:<10}{:>8.2}{:>8.2}{:>10.2}{:>8.2}{:>8.2}",
            word(&cost.volume),
            cost.groups,
            word(&cost.after),
            word(&cost.request),
            cost.reads,
            cost.writes,
            cost.store_ops,
            cost.store_pieces,
            cost.moved
        )?;
    }
    Ok(())
}

fn hit_ratios(text: &mut String, ratios: &[HitRatio]) -> std::fmt::Result {
    writeln!(text, "{:<42}{:<11}{:>8}{:>12}", "pattern", "volume", "cache", "hits")?;
    for ratio in ratios {
        writeln!(
            text,
            "{:<42}{:<11}{:>8}{:>10.2} %",
            ratio.pattern,
            word(&ratio.volume),
            format!("1/{}", ratio.part),
            100.0 * ratio.hits
        )?;
    }
    Ok(())
}

fn case(case: &Case) -> String {
    let Case { op, bytes, depth, volume } = case;
    format!("{:<6}{bytes:>8}{depth:>4}  {:<10}", word(op), word(volume))
}

fn heading(text: &mut String, columns: &[(&str, usize)]) -> std::fmt::Result {
    write!(text, "{:<30}", "")?;
    for (name, width) in columns {
        write!(text, "  {name:>w$}", w = 2 * width + 1)?;
    }
    write!(text, "\n{:<6}{:>8}{:>4}  {:<10}", "op", "bytes", "qd", "volume")?;
    for (_, width) in columns {
        write!(text, "  {:>width$} {:>width$}", "I", "T")?;
    }
    text.push('\n');
    Ok(())
}

fn counters(text: &mut String, report: &Report) -> std::fmt::Result {
    writeln!(
        text,
        "per I/O over {}, {} immediates, {} bytes in capsule, queue depth {} (I: initiator, T: target)",
        report.transport,
        if report.immediates { "with" } else { "without" },
        report.in_capsule_bytes,
        report.queue_depth
    )?;
    let columns = [
        ("messages", 6),
        ("signaled", 6),
        ("completions", 6),
        ("send bells", 6),
        ("recv bells", 6),
        ("copied bytes", 7),
        ("allocations", 6),
    ];
    heading(text, &columns)?;
    for cost in &report.costs {
        text.push_str(&case(&cost.case));
        let mut pair = |of: fn(&EndCost) -> f64, width: usize, digits: usize| {
            let (i, t) = (of(&cost.initiator), of(&cost.target));
            write!(text, "  {i:>width$.digits$} {t:>width$.digits$}")
        };
        pair(|end| end.messages, 6, 3)?;
        pair(|end| end.signaled, 6, 3)?;
        pair(|end| end.completions, 6, 3)?;
        pair(|end| end.send_doorbells, 6, 3)?;
        pair(|end| end.recv_doorbells, 6, 3)?;
        pair(|end| end.copied_bytes, 7, 0)?;
        match (cost.initiator.allocations, cost.target.allocations) {
            (Some(i), Some(t)) => writeln!(text, "  {i:>6.3} {t:>6.3}")?,
            _ => writeln!(text, "  {0:>6} {0:>6}", "-")?,
        }
    }
    Ok(())
}

fn instructions(text: &mut String, rows: &[InstructionCost]) -> std::fmt::Result {
    writeln!(
        text,
        "instructions per I/O by callgrind: the engines, then with the in-memory fabric (I: initiator, T: target)"
    )?;
    let mut columns = vec![("engine", 7), ("with fabric", 7), ("turns", 6)];
    if rows.iter().any(|row| row.digests.is_some()) {
        columns.push(("digests add", 7));
    }
    heading(text, &columns)?;
    for row in rows {
        let (i, t) = (&row.initiator, &row.target);
        write!(text, "{}  {:>7.0} {:>7.0}", case(&row.case), i.engine, t.engine)?;
        write!(text, "  {:>7.0} {:>7.0}", i.engine + i.fabric, t.engine + t.fabric)?;
        write!(text, "  {:>6.2} {:>6.2}", i.turns, t.turns)?;
        if let Some(digests) = row.digests {
            write!(text, "  {:>7.0} {:>7.0}", digests.initiator, digests.target)?;
        }
        text.push('\n');
    }
    Ok(())
}

fn crcs(text: &mut String, rows: &[CrcCost]) -> std::fmt::Result {
    writeln!(
        text,
        "one CRC-32C: instructions by single steps; the best time, the data in the CPU's cache"
    )?;
    writeln!(
        text,
        "{:>8} {:>13} {:>10} {:>9} {:>13} {:>9}",
        "bytes", "instructions", "ns", "bytes/ns", "memcpy: ns", "bytes/ns"
    )?;
    for row in rows {
        let CrcCost { bytes, instructions, nanoseconds, memcpy_nanoseconds } = *row;
        let rate = |time: f64| f64::from(bytes) / time;
        write!(text, "{bytes:>8} {instructions:>13}")?;
        write!(text, " {nanoseconds:>10.1} {:>9.1}", rate(nanoseconds))?;
        writeln!(text, " {memcpy_nanoseconds:>13.1} {:>9.1}", rate(memcpy_nanoseconds))?;
    }
    Ok(())
}

fn times(text: &mut String, rows: &[TimeCost]) -> std::fmt::Result {
    writeln!(
        text,
        "nanoseconds per I/O, best of several rounds: the engines, the same with the in-memory fabric, and what a core \
         does with it (I: initiator, T: target)"
    )?;
    heading(text, &[("engine", 7), ("with fabric", 7), ("million/s", 7)])?;
    for row in rows {
        let (i, t) = (row.initiator, row.target);
        write!(text, "{}  {:>7.0} {:>7.0}", case(&row.case), i.engine_ns, t.engine_ns)?;
        write!(text, "  {:>7.0} {:>7.0}", i.with_fabric_ns, t.with_fabric_ns)?;
        write!(text, "  {:>7.2} {:>7.2}", 1e3 / i.with_fabric_ns, 1e3 / t.with_fabric_ns)?;
        match hit_ns(rows, row) {
            Some(hit) => writeln!(text, "  a hit: {hit:.0} ns")?,
            None => writeln!(text)?,
        }
    }
    Ok(())
}

/// A heading, and the value below it.
type Column = (&'static str, fn(&LiveEnd) -> Option<f64>);

fn live(text: &mut String, rows: &[LiveCost]) -> std::fmt::Result {
    writeln!(text, "per I/O of running daemons (I: initiator, T: target)")?;
    let columns: [Column; 9] = [
        ("messages", |end| Some(end.messages)),
        ("completions", |end| Some(end.completions)),
        ("send bells", |end| Some(end.send_doorbells)),
        ("ring enters", |end| Some(end.ring_enters)),
        ("yields", |end| Some(end.yields)),
        ("arms", |end| Some(end.arms)),
        ("sleeps", |end| Some(end.sleeps)),
        ("switches", |end| end.switches),
        ("syscalls", |end| end.syscalls),
    ];
    write!(text, "{:<34}", "")?;
    for (name, _) in columns {
        write!(text, "  {name:>13}")?;
    }
    write!(text, "\n{:<16}{:<6}{:>8}{:>4}", "device", "op", "bytes", "qd")?;
    for _ in columns {
        write!(text, "  {:>6} {:>6}", "I", "T")?;
    }
    text.push('\n');
    for row in rows {
        let device = row.device.display().to_string();
        write!(text, "{device:<16}{:<6}{:>8}{:>4}", word(&row.op), row.bytes, row.depth)?;
        for (_, of) in columns {
            for value in [of(&row.initiator), row.target.as_ref().and_then(of)] {
                match value {
                    Some(value) => write!(text, " {value:>6.3}")?,
                    None => write!(text, " {:>6}", "-")?,
                }
            }
            text.push(' ');
        }
        text.push('\n');
    }
    Ok(())
}
