//! The log of a daemon as the journal's own records: with a priority and with fields, so that
//! `journalctl RBLK_EVENT=loss HOST=db1` finds lines.
//!
//! [`JournalFormat`] writes a line as a record of the journal. [`Log`](crate::Log) takes it, and
//! its thread sends it by a [`JournalSocket`]: so no thread that serves I/O waits for the journal.

use std::fmt::{self, Write as _};
use std::io::{self, Write};
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use nix::sys::stat::fstat;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Where the journal takes records.
pub const JOURNAL_SOCKET: &str = "/run/systemd/journal/socket";

/// Fields of lines that become fields of the journal. All fields are in the message, too.
const FIELDS: [&str; 6] = ["rblk_event", "host", "volume", "address", "peer", "device"];

/// Whether the standard error of this process goes to the journal: systemd says which file that is.
#[must_use]
pub fn stderr_is_journal() -> bool {
    let Some(named) = std::env::var_os("JOURNAL_STREAM") else { return false };
    let Ok(file) = fstat(io::stderr()) else { return false };
    named.to_str() == Some(format!("{}:{}", file.st_dev, file.st_ino).as_str())
}

/// Sends records to the journal, each write one record.
#[derive(Debug)]
pub struct JournalSocket(UnixDatagram);

impl JournalSocket {
    /// Connects to the journal.
    ///
    /// # Errors
    /// There is none at that path.
    pub fn connect(path: impl AsRef<Path>) -> io::Result<Self> {
        let socket = UnixDatagram::unbound()?;
        socket.connect(path)?;
        Ok(Self(socket))
    }
}

impl Write for JournalSocket {
    fn write(&mut self, record: &[u8]) -> io::Result<usize> {
        if record.starts_with(b"PRIORITY=") {
            self.0.send(record)?;
        } else {
            let text = one_line(&String::from_utf8_lossy(record));
            self.0.send(format!("PRIORITY=4\nMESSAGE={text}\n").as_bytes())?;
        }
        Ok(record.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes lines as records of the journal, under the name of a program.
#[derive(Clone, Copy, Debug)]
pub struct JournalFormat {
    /// The program.
    pub program: &'static str,
}

impl<S, N> FormatEvent<S, N> for JournalFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut record = Record::default();
        event.record(&mut record);
        let Record { message, fields, rest } = record;
        let priority = priority(*event.metadata().level());
        writeln!(writer, "PRIORITY={priority}\nSYSLOG_IDENTIFIER={}", self.program)?;
        // The message is the last, as the end of a long line is cut off.
        writeln!(writer, "{fields}MESSAGE={message}{rest}")
    }
}

/// The journal's number for a level.
fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

/// The parts of a line.
#[derive(Default)]
struct Record {
    message: String,
    // Whole lines of the record.
    fields: String,
    // All fields for people, each behind a space.
    rest: String,
}

impl Record {
    fn take(&mut self, field: &Field, value: &str) {
        let value = one_line(value);
        if field.name() == "message" {
            self.message = value;
            return;
        }
        // Writing to a string does not fail.
        let _ = write!(self.rest, " {}={value}", field.name());
        if FIELDS.contains(&field.name()) {
            let _ = writeln!(self.fields, "{}={value}", field.name().to_ascii_uppercase());
        }
    }
}

impl Visit for Record {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.take(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.take(field, &format!("{value:?}"));
    }
}

fn one_line(text: &str) -> String {
    text.trim_end().replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// Takes the written lines, as the writer of a log.
    #[derive(Clone, Default)]
    struct LogBuffer(Arc<Mutex<Vec<u8>>>);

    impl Write for LogBuffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(log: impl FnOnce()) -> String {
        let shared = LogBuffer::default();
        let writer = shared.clone();
        let subscriber = tracing_subscriber::fmt()
            .event_format(JournalFormat { program: "rblk-test" })
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, log);
        let bytes = shared.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn a_line_is_a_record_with_fields() {
        let nothing: Option<&str> = None;
        let text = logged(|| {
            tracing::warn!(
                rblk_event = "loss",
                host = "db1",
                volume = nothing,
                left = 3,
                "gone\nPRIORITY=0"
            );
        });
        assert_eq!(
            text,
            "PRIORITY=4\nSYSLOG_IDENTIFIER=rblk-test\nRBLK_EVENT=loss\nHOST=db1\n\
             MESSAGE=gone PRIORITY=0 rblk_event=loss host=db1 left=3\n"
        );
        assert!(logged(|| tracing::error!("x")).starts_with("PRIORITY=3\n"));
    }

    #[test]
    fn records_reach_the_journal_one_by_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        assert!(JournalSocket::connect(&path).is_err(), "there is none yet");
        let journal = UnixDatagram::bind(&path).unwrap();
        let (mut log, mut writer) = crate::Log::new();
        let record = b"PRIORITY=6\nMESSAGE=one\n";
        writer.write_all(record).unwrap();
        writer.write_all(b"two\n").unwrap();
        log.end(std::time::Duration::ZERO, JournalSocket::connect(&path).unwrap());
        let mut bytes = [0; 200];
        let mut next = || {
            let len = journal.recv(&mut bytes).unwrap();
            String::from_utf8_lossy(&bytes[..len]).into_owned()
        };
        assert_eq!(next().as_bytes(), record);
        assert_eq!(next(), "PRIORITY=4\nMESSAGE=two\n");
    }

    #[test]
    fn stderr_of_a_test_is_no_journal() {
        assert!(!stderr_is_journal());
    }
}
