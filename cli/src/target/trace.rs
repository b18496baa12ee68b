//! `rblk-target trace`: the slow commands of a volume, as they are answered.

use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use rblk_config::{ByteSize, Exit};
use rblk_operate::Output;
use rblk_operate::target::ask::{Ask, Response};
use rblk_operate::target::trace_line::TraceLine;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

use crate::target::running::{no_answer, not_understood};

/// The target answers a trace at once.
const PATIENCE: Duration = Duration::from_secs(10);

/// Prints slow commands until there were `count`, or the target or this program ends.
pub(crate) fn trace(
    path: &Path,
    volume: &str,
    slower: Duration,
    count: Option<u64>,
    output: Output,
) -> anyhow::Result<Exit> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut stream = match UnixStream::connect(path).await {
            Ok(stream) => stream,
            Err(error) => return Err(no_answer(path, &error).into()),
        };
        let slower_us = u64::try_from(slower.as_micros()).unwrap_or(u64::MAX);
        let ask = Ask::Trace { volume: volume.to_owned(), slower_us };
        let mut text = serde_json::to_vec(&ask)?;
        text.push(b'\n');
        stream.write_all(&text).await?;
        let mut lines = BufReader::new(stream).lines();
        let first = tokio::time::timeout(PATIENCE, lines.next_line()).await??.unwrap_or_default();
        match serde_json::from_str(&first) {
            Ok(Response::Done) => {}
            Ok(Response::Error(refusal)) => return Err(refusal.into()),
            _ => return Err(not_understood()),
        }
        output.aside(format_args!("rblk-target: tracing {volume}; ctrl-C ends it"));
        let mut left = count.unwrap_or(u64::MAX);
        while left > 0 {
            let Some(json) = lines.next_line().await? else {
                anyhow::bail!("the target ended");
            };
            left -= 1;
            let slow: TraceLine = serde_json::from_str(&json)?;
            output.item(&slow, || line(&slow))?;
        }
        Ok(Exit::Ok)
    })
}

/// A command for people.
fn line(io: &TraceLine) -> String {
    let at = UNIX_EPOCH
        + Duration::from_millis(io.unix_ms.min(crate::target::event_lines::YEAR_10000_MS - 1));
    let host = if io.host.is_empty() { "-" } else { &io.host };
    let stages = [
        ("queue", io.queue_us),
        ("data", io.data_us),
        ("cache", io.cache_us),
        ("store", io.store_us),
        ("answer", io.answer_us),
    ];
    let parts: Vec<String> = stages
        .iter()
        .filter(|(_, us)| *us > 0)
        .map(|(name, us)| format!("{name} {}", millis(*us)))
        .collect();
    let mut text = format!(
        "{} {:>9} {:<5} lba {} {} {host} session {} queue {}: {}",
        humantime::format_rfc3339_millis(at),
        millis(io.total_us),
        io.op,
        io.lba,
        ByteSize(io.bytes),
        io.session,
        io.queue,
        parts.join(", ")
    );
    if io.failed {
        text.push_str("; failed");
    }
    if io.left_out > 0 {
        text.push_str(&format!(" ({} more before it were left out)", io.left_out));
    }
    text
}

/// Microseconds as milliseconds.
fn millis(us: u64) -> String {
    format!("{}.{}ms", us / 1000, us % 1000 / 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_the_command_its_host_and_its_times() {
        let io = TraceLine {
            unix_ms: 1_700_000_000_123,
            volume: "vol0".to_owned(),
            host: "db1".to_owned(),
            session: 3,
            queue: 2,
            poll_group: 1,
            op: "write".to_owned(),
            lba: 2048,
            blocks: 16,
            bytes: 65_536,
            failed: false,
            total_us: 15_250,
            queue_us: 50,
            data_us: 200,
            cache_us: 0,
            store_us: 15_000,
            answer_us: 0,
            left_out: 0,
        };
        let expected = "2023-11-14T22:13:20.123Z    15.2ms write lba 2048 64KiB db1 session 3 queue 2: \
                        queue 0.0ms, data 0.2ms, store 15.0ms";
        assert_eq!(line(&io), expected);
        let io = TraceLine { host: String::new(), failed: true, left_out: 7, ..io };
        assert!(line(&io).ends_with("store 15.0ms; failed (7 more before it were left out)"));
        assert!(line(&io).contains(" - session 3"));
    }
}
