//! [`WriteLog`]: the log of dm-log-writes, and the contents of the disk after any entry.
//!
//! The kernel's Documentation/admin-guide/device-mapper/log-writes.rst has the idea and
//! drivers/md/dm-log-writes.c the form: a sector with the head of the log, then for each entry a
//! sector and the data. A write enters the log when a flush that came after its end was done, or
//! with its own FUA; so the log up to any entry is a disk that a machine may find after it crashed.
//! A mark is the text of a `mark` sent by [`Mapped::message`](super::Mapped::message).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

const MAGIC: u64 = 0x6a_7366_7773_6872;
const VERSION: u64 = 1;
const DISCARD: u64 = 1 << 2;
const MARK: u64 = 1 << 3;
/// Most bytes copied at once.
const CHUNK: u64 = 1 << 20;

/// One entry.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Logged {
    /// Bytes of the disk were written; `at` is where the log has them.
    Write {
        /// First byte on the disk.
        offset: u64,
        /// How many.
        len: u64,
        /// First byte in the log.
        at: u64,
    },
    /// Bytes of the disk were discarded.
    Discard {
        /// First byte.
        offset: u64,
        /// How many.
        len: u64,
    },
    /// A mark.
    Mark(String),
}

/// The log of a disk.
#[derive(Debug)]
pub struct WriteLog {
    log: File,
    /// All entries, in their order.
    pub entries: Vec<Logged>,
}

impl WriteLog {
    /// Reads a log, from the device or file that has it. The disk must not be in use any more.
    ///
    /// # Errors
    /// The system's, or the log is not one.
    pub fn open(path: &Path) -> io::Result<Self> {
        let log = File::open(path)?;
        let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        let word = |sector: &[u8], at: usize| {
            sector[at..at + 8].iter().rev().fold(0u64, |word, byte| word << 8 | u64::from(*byte))
        };
        let mut sector = [0; 512];
        log.read_exact_at(&mut sector, 0)?;
        let (magic, version, count) = (word(&sector, 0), word(&sector, 8), word(&sector, 16));
        let size = word(&sector, 24) & 0xffff_ffff;
        if magic != MAGIC || version != VERSION || size < 512 {
            return Err(invalid(format!("no log of dm-log-writes: {magic:x} {version} {size}")));
        }
        let mut entries = Vec::new();
        let mut at = size;
        for _ in 0..count {
            log.read_exact_at(&mut sector, at)?;
            let (offset, len) = (word(&sector, 0) * size, word(&sector, 8) * size);
            let (flags, data) = (word(&sector, 16), word(&sector, 24));
            at += size;
            if flags & MARK != 0 {
                let text = usize::try_from(data).ok().and_then(|data| sector.get(32..32 + data));
                let text = text.ok_or_else(|| invalid(format!("a mark of {data} bytes")))?;
                let text = String::from_utf8_lossy(text);
                entries.push(Logged::Mark(text.trim_end_matches(['\0', '\n']).to_owned()));
            } else if flags & DISCARD != 0 {
                entries.push(Logged::Discard { offset, len });
            } else {
                // A flush alone is an empty write.
                entries.push(Logged::Write { offset, len, at });
                at += len;
            }
        }
        Ok(Self { log, entries })
    }

    /// Applies entry `number` to `disk`.
    ///
    /// # Errors
    /// The system's.
    pub fn apply(&self, number: usize, disk: &File) -> io::Result<()> {
        let (offset, len, at) = match self.entries[number] {
            Logged::Write { offset, len, at } => (offset, len, Some(at)),
            Logged::Discard { offset, len } => (offset, len, None),
            Logged::Mark(_) => return Ok(()),
        };
        let mut bytes = vec![0; usize::try_from(len.min(CHUNK)).unwrap_or(0)];
        let mut done = 0;
        while done < len {
            let count = usize::try_from((len - done).min(CHUNK)).unwrap_or(0);
            if let Some(at) = at {
                self.log.read_exact_at(&mut bytes[..count], at + done)?;
            }
            disk.write_all_at(&bytes[..count], offset + done)?;
            done += count as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sector(words: &[u64], rest: &[u8]) -> Vec<u8> {
        let mut sector: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        sector.extend_from_slice(rest);
        sector.resize(512, 0);
        sector
    }

    #[test]
    fn a_log_is_replayed_in_its_order() {
        let dir = tempfile::tempdir().unwrap();
        let (path, disk) = (dir.path().join("log"), dir.path().join("disk"));
        let log = [
            sector(&[MAGIC, VERSION, 5, 512], &[]),
            sector(&[2, 1, 0, 0], &[]),
            vec![7; 512],
            sector(&[0, 0, MARK, 5], b"here\0"),
            sector(&[2, 2, 2, 0], &[]),
            vec![8; 1024],
            sector(&[3, 1, DISCARD, 0], &[]),
            sector(&[0, 0, 1, 0], &[]),
        ];
        std::fs::write(&path, log.concat()).unwrap();
        std::fs::write(&disk, [1; 2048]).unwrap();
        let log = WriteLog::open(&path).unwrap();
        assert_eq!(log.entries.len(), 5);
        assert_eq!(log.entries[1], Logged::Mark("here".to_owned()));
        let file = File::options().write(true).open(&disk).unwrap();
        let state = |upto: std::ops::Range<usize>| {
            upto.for_each(|number| log.apply(number, &file).unwrap());
            let bytes = std::fs::read(&disk).unwrap();
            [bytes[0], bytes[512], bytes[1024], bytes[1536]]
        };
        assert_eq!(state(0..2), [1, 1, 7, 1]);
        assert_eq!(state(2..3), [1, 1, 8, 8]);
        assert_eq!(state(3..5), [1, 1, 8, 0]);
    }

    #[test]
    fn a_file_that_is_no_log_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        std::fs::write(&path, [0; 512]).unwrap();
        assert!(WriteLog::open(&path).is_err());
        std::fs::write(&path, sector(&[MAGIC, VERSION, 1, 512], &[])).unwrap();
        assert!(WriteLog::open(&path).is_err(), "an entry is missing");
    }
}
