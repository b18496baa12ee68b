//! The log of a mount that runs as a service, in records of the systemd journal.
//!
//! [`JournalFormat`](rblk_operate::journal::JournalFormat) makes a record of each line, with the
//! fields that the line has. [`MountJournal`] puts the fields of the mount behind the first line of
//! each record: `MOUNT=` and `VOLUME=` from the beginning, `DEVICE=` and `TARGET=` when there is a
//! disk. A field in the line itself takes precedence. All of this happens on the thread of the log,
//! and that thread waits for no other.

use std::io::{self, Write};
use std::sync::{Arc, OnceLock};

use rblk_operate::journal::{JOURNAL_SOCKET, JournalSocket, stderr_is_journal};

use rblk_operate::mount::mount_status::MountStatus;

/// Longest value of a field, in characters: names and disks are shorter.
const VALUE_CHARS_MAX: usize = 256;

/// The properties of a mount for the records of its log. Each is set once, and stays.
#[derive(Clone, Debug, Default)]
pub struct MountFields(Arc<EntryParts>);

#[derive(Debug, Default)]
struct EntryParts {
    // Whole lines of a record.
    mount: OnceLock<String>,
    volume: OnceLock<String>,
    disk: OnceLock<String>,
}

impl MountFields {
    /// Sets the name of the mount.
    pub fn named(&self, mount: &str) {
        let _ = self.0.mount.set(field("MOUNT", mount));
    }

    /// Sets the volume of the mount.
    pub fn of_volume(&self, volume: &str) {
        let _ = self.0.volume.set(field("VOLUME", volume));
    }

    /// Sets the fields of the mount's disk.
    pub fn ready(&self, status: &MountStatus) {
        self.named(&status.name);
        self.of_volume(&status.volume);
        let disk = field("DEVICE", &status.device) + &field("TARGET", &status.target_name);
        let _ = self.0.disk.set(disk);
    }

    /// Every line that is set.
    fn lines(&self) -> impl Iterator<Item = &str> {
        let EntryParts { mount, volume, disk } = &*self.0;
        let parts = [mount, volume, disk].into_iter().filter_map(OnceLock::get);
        parts.flat_map(|part| part.split_inclusive('\n'))
    }
}

/// A line of a record; empty for an empty value. A peer's name cannot start a line of its own.
fn field(key: &str, value: &str) -> String {
    if value.is_empty() {
        return String::new();
    }
    let value: String =
        value.chars().take(VALUE_CHARS_MAX).map(|c| if c.is_control() { ' ' } else { c }).collect();
    format!("{key}={value}\n")
}

/// Sends the records of a mount to the journal, each write one record.
#[derive(Debug)]
pub struct MountJournal<W = JournalSocket> {
    out: W,
    fields: MountFields,
    record: Vec<u8>,
}

impl MountJournal {
    /// The journal, if it reads the standard error of this process.
    #[must_use]
    pub fn of_stderr(fields: MountFields) -> Option<Self> {
        let socket = || JournalSocket::connect(JOURNAL_SOCKET).ok();
        stderr_is_journal().then(socket).flatten().map(|socket| Self::new(socket, fields))
    }
}

impl<W: Write> MountJournal<W> {
    /// Writes to `out`, which takes each write as one record.
    pub fn new(out: W, fields: MountFields) -> Self {
        Self { out, fields, record: Vec::new() }
    }
}

impl<W: Write> Write for MountJournal<W> {
    fn write(&mut self, record: &[u8]) -> io::Result<usize> {
        let Self { out, fields, record: whole } = self;
        // An invalid record is sent as a plain line, without fields.
        let begin = match record.iter().position(|byte| *byte == b'\n') {
            Some(end) if record.starts_with(b"PRIORITY=") => end + 1,
            _ => 0,
        };
        whole.clear();
        whole.extend(&record[..begin]);
        if begin > 0 {
            for line in fields.lines().filter(|line| !has_field(record, line)) {
                whole.extend(line.as_bytes());
            }
        }
        whole.extend(&record[begin..]);
        out.write_all(whole)?;
        Ok(record.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Whether a record has the field of a line, with any value. The message is one line, too.
fn has_field(record: &[u8], line: &str) -> bool {
    let key = line.split_inclusive('=').next().unwrap_or_default();
    record.split(|byte| *byte == b'\n').any(|has| has.starts_with(key.as_bytes()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;
    use std::time::Duration;

    use rblk_operate::Log;
    use rblk_operate::journal::JournalFormat;

    use super::*;

    fn written(fields: &MountFields, record: &str) -> String {
        let mut journal = MountJournal::new(Vec::new(), fields.clone());
        assert_eq!(journal.write(record.as_bytes()).unwrap(), record.len());
        String::from_utf8(journal.out).unwrap()
    }

    fn status() -> MountStatus {
        MountStatus {
            name: "data".to_owned(),
            volume: "vol0".to_owned(),
            device: "/dev/ublkb3".to_owned(),
            target_name: "store1".to_owned(),
            ..MountStatus::default()
        }
    }

    #[test]
    fn the_fields_of_the_mount_follow_the_first_line() {
        let fields = MountFields::default();
        let record = "PRIORITY=6\nSYSLOG_IDENTIFIER=x\nMESSAGE=VOLUME=no\n";
        assert_eq!(written(&fields, record), record);
        fields.named("data");
        fields.of_volume("vol0");
        let begun = "PRIORITY=6\nMOUNT=data\nVOLUME=vol0\nSYSLOG_IDENTIFIER=x\nMESSAGE=VOLUME=no\n";
        assert_eq!(written(&fields, record), begun);
        fields.ready(&status());
        let ready = "PRIORITY=6\nMOUNT=data\nVOLUME=vol0\nDEVICE=/dev/ublkb3\nTARGET=store1\n\
                     SYSLOG_IDENTIFIER=x\nMESSAGE=VOLUME=no\n";
        assert_eq!(written(&fields, record), ready);
        // The field in the line takes precedence.
        let own = "PRIORITY=6\nVOLUME=other\nDEVICE=7\nMESSAGE=x\n";
        let expected = "PRIORITY=6\nMOUNT=data\nTARGET=store1\nVOLUME=other\nDEVICE=7\nMESSAGE=x\n";
        assert_eq!(written(&fields, own), expected);
        assert_eq!(written(&fields, "no record\n"), "no record\n");
        assert_eq!(written(&fields, "PRIORITY=6"), "PRIORITY=6");
    }

    #[test]
    fn a_name_is_one_line_and_bounded() {
        assert_eq!(field("TARGET", "a\nPRIORITY=0"), "TARGET=a PRIORITY=0\n");
        assert_eq!(field("TARGET", ""), "");
        let long = "\u{e4}".repeat(VALUE_CHARS_MAX + 1);
        assert_eq!(field("T", &long).chars().count(), 2 + VALUE_CHARS_MAX + 1);
    }

    #[test]
    fn the_journal_hears_of_a_mount() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let journal = UnixDatagram::bind(&path).unwrap();
        journal.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let fields = MountFields::default();
        let (mut log, writer) = Log::new();
        let socket = JournalSocket::connect(&path).unwrap();
        log.start(MountJournal::new(socket, fields.clone())).unwrap();
        let subscriber = tracing_subscriber::fmt()
            .event_format(JournalFormat { program: "rblk-initiator" })
            .with_writer(move || writer.clone())
            .finish();
        let mut bytes = [0; 1000];
        let mut next = || {
            let len = journal.recv(&mut bytes).unwrap();
            String::from_utf8_lossy(&bytes[..len]).into_owned()
        };
        tracing::subscriber::with_default(subscriber, || {
            fields.named("data");
            tracing::warn!(round = 1, "waiting");
            assert_eq!(
                next(),
                "PRIORITY=4\nMOUNT=data\nSYSLOG_IDENTIFIER=rblk-initiator\nMESSAGE=waiting round=1\n"
            );
            fields.ready(&status());
            tracing::error!(rblk_event = "fence", by = "db2", "fenced");
            assert_eq!(
                next(),
                "PRIORITY=3\nMOUNT=data\nVOLUME=vol0\nDEVICE=/dev/ublkb3\nTARGET=store1\n\
                 SYSLOG_IDENTIFIER=rblk-initiator\nRBLK_EVENT=fence\n\
                 MESSAGE=fenced rblk_event=fence by=db2\n"
            );
        });
    }
}
