//! `rblk-target events`: recent events, and new ones with --follow.

use std::io;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use rblk_config::Exit;
use rblk_operate::Output;
use rblk_operate::target::ask::{Ask, Response};
use rblk_operate::target::client::ask;
use rblk_operate::target::events::{Event, EventsReport};

use crate::target::running::{no_answer, not_understood};

/// Years of five digits cannot be written.
pub(crate) const YEAR_10000_MS: u64 = 253_402_300_800_000;
/// How often to look for news.
const STEP: Duration = Duration::from_millis(300);

/// Prints the events, and goes on with new ones if `follow`.
pub(crate) fn events(path: &Path, follow: bool, output: Output) -> anyhow::Result<Exit> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(run(path, follow, output))
}

async fn run(path: &Path, follow: bool, output: Output) -> anyhow::Result<Exit> {
    let mut seen = match report(path, 0).await {
        Ok(report) => report?,
        Err(error) => return Err(no_answer(path, &error).into()),
    };
    print_all(&seen.events, output)?;
    if !follow {
        return Ok(Exit::Ok);
    }
    let mut is_away = false;
    loop {
        tokio::time::sleep(STEP).await;
        match report(path, seen.last).await {
            Ok(Ok(next)) => {
                is_away = false;
                if next.instance != seen.instance {
                    // Another run of the target counts from 1 again.
                    seen = EventsReport { instance: next.instance, ..EventsReport::default() };
                    continue;
                }
                seen = next;
                print_all(&seen.events, output)?;
            }
            // The target stops, or is away. It may come back.
            Ok(Err(_)) | Err(_) if is_away => {}
            Ok(Err(_)) | Err(_) => {
                is_away = true;
                output.aside("rblk-target: the target is gone; waiting for it");
            }
        }
    }
}

/// The inner error is the target's own refusal.
async fn report(path: &Path, after: u64) -> io::Result<anyhow::Result<EventsReport>> {
    Ok(match ask(path, Ask::Events { after }).await? {
        Response::Events(report) => Ok(report),
        Response::Error(refusal) => Err(refusal.into()),
        _ => Err(not_understood()),
    })
}

fn print_all(events: &[Event], output: Output) -> anyhow::Result<()> {
    for event in events {
        output.item(event, || line(event))?;
    }
    Ok(())
}

/// An event for people.
fn line(event: &Event) -> String {
    let at = UNIX_EPOCH + Duration::from_millis(event.unix_ms.min(YEAR_10000_MS - 1));
    let mut line = format!("{} {:<11}", humantime::format_rfc3339_seconds(at), event.kind);
    let who = [&event.host, &event.volume, &event.address];
    for word in who.into_iter().flatten() {
        line.push(' ');
        line.push_str(word);
    }
    line.push_str(": ");
    line.push_str(&event.text);
    if event.left_out > 0 {
        line.push_str(&format!(" ({} more before it)", event.left_out));
    }
    line
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use rblk_operate::target::events::{EventKind, Events, Occurrence};

    use super::*;

    #[test]
    fn a_line_has_time_kind_and_subject() {
        let mut events = Events::default();
        let what =
            Occurrence::new(EventKind::StoreError, "the store fails: ENOSPC").of_volume("logs");
        let event = events.note(what, Instant::now(), 1_700_000_000_000).unwrap().clone();
        assert_eq!(line(&event), "2023-11-14T22:13:20Z store-error logs: the store fails: ENOSPC");
        let host = Occurrence::new(EventKind::Loss, "gone").of_host("db1", "tcp://192.0.2.2:5");
        let event = events.note(host, Instant::now(), 0).unwrap().clone();
        let event = Event { left_out: 3, ..event };
        let expected =
            "1970-01-01T00:00:00Z loss        db1 tcp://192.0.2.2:5: gone (3 more before it)";
        assert_eq!(line(&event), expected);
        assert!(line(&Event { unix_ms: u64::MAX, ..event }).contains("loss"), "no panic");
    }
}
