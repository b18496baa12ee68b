//! [`Log`]: the lines of a daemon's log, on their way to stderr.
//!
//! The reader of stderr may be slow or stuck: a journal on a full disk, a pipe that is not read. No
//! thread that serves I/O may wait for it. So a line is put in a bounded queue, and a thread of its
//! own writes the lines. A line that does not fit in the queue is dropped and counted, and the log
//! says how many lines are missing when its reader reads again.

pub mod journal;

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

/// Lines that wait to be written, at most.
const LINES_MAX: usize = 1024;
/// Longest line. The rest of a longer one is cut off.
const LINE_BYTES_MAX: usize = 4096;
/// How often [`Log::end`] looks whether the lines are written.
const LOOK_INTERVAL: Duration = Duration::from_millis(2);

/// Lines that were taken and are not written yet, and lines that were not taken.
#[derive(Debug, Default)]
struct LogCounts {
    waiting: AtomicU64,
    dropped: AtomicU64,
}

/// Takes lines, and never waits.
#[derive(Clone, Debug)]
pub struct LogWriter {
    lines: SyncSender<Vec<u8>>,
    counts: Arc<LogCounts>,
}

impl Write for LogWriter {
    /// Takes a line, or as many lines as these bytes have. Never fails.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut line = bytes[..bytes.len().min(LINE_BYTES_MAX)].to_vec();
        if line.len() < bytes.len() {
            line.extend(b"...\n");
        }
        self.counts.waiting.fetch_add(1, Ordering::Relaxed);
        match self.lines.try_send(line) {
            Ok(()) => {}
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                self.counts.waiting.fetch_sub(1, Ordering::Relaxed);
                self.counts.dropped.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The lines that were taken. See the module.
#[derive(Debug)]
pub struct Log {
    // Until the thread has it.
    lines: Option<Receiver<Vec<u8>>>,
    counts: Arc<LogCounts>,
}

impl Log {
    /// A log, and where its lines are put. Nothing is written before [`Self::start`] or
    /// [`Self::end`].
    #[must_use]
    pub fn new() -> (Self, LogWriter) {
        let (sender, receiver) = sync_channel(LINES_MAX);
        let counts = Arc::new(LogCounts::default());
        let writer = LogWriter { lines: sender, counts: Arc::clone(&counts) };
        (Self { lines: Some(receiver), counts }, writer)
    }

    /// Starts the thread that writes the lines to `out`, with the namespaces of the caller.
    ///
    /// # Errors
    /// There is no thread to be had: [`Self::end`] writes the lines.
    pub fn start(&mut self, out: impl Write + Send + 'static) -> io::Result<()> {
        let Some(lines) = self.lines.take() else { return Ok(()) };
        let counts = Arc::clone(&self.counts);
        let write = move || write_all(lines.iter(), &counts, out);
        thread::Builder::new().name("log".to_owned()).spawn(write)?;
        Ok(())
    }

    /// Waits until every line taken so far is written, at most for `patience`.
    pub fn end(&mut self, patience: Duration, out: impl Write) {
        if let Some(lines) = &self.lines {
            return write_all(lines.try_iter(), &self.counts, out);
        }
        let begun = Instant::now();
        while self.counts.waiting.load(Ordering::Relaxed) > 0 && begun.elapsed() < patience {
            thread::sleep(LOOK_INTERVAL);
        }
    }
}

// A failed write of the log must not stop the daemon.
fn write_all(lines: impl Iterator<Item = Vec<u8>>, counts: &LogCounts, mut out: impl Write) {
    for line in lines {
        let _ = out.write_all(&line);
        let dropped = counts.dropped.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            let text = format!("{dropped} lines of the log were not written: its reader is slow\n");
            // In one piece: it may be a record of the journal.
            let _ = out.write_all(text.as_bytes());
        }
        counts.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, pipe};

    use super::*;

    #[test]
    fn a_reader_that_reads_nothing_delays_nobody_and_hears_what_is_missing() {
        let (reader, pipe) = pipe().unwrap();
        let (mut log, mut writer) = Log::new();
        log.start(pipe).unwrap();
        // More than the queue and a pipe hold: this would wait for ever.
        let text = "x".repeat(1000);
        for at in 0..4000 {
            writer.write_all(format!("{at} {text}\n").as_bytes()).unwrap();
        }
        log.end(Duration::from_millis(10), io::sink());
        let mut lines = BufReader::new(reader).lines().map(Result::unwrap);
        let (mut told, mut read) = (0, 0);
        while told + read < 4000 {
            let line = lines.next().unwrap();
            match line.split_once(" lines of the log were not written") {
                Some((count, _)) => told += count.parse::<u64>().unwrap(),
                None => {
                    assert!(line.ends_with(&text), "{line}");
                    read += 1;
                }
            }
        }
        assert!(told > 1000 && read >= 1024, "{read} lines, {told} are missing");
        // And it goes on.
        writer.write_all(b"once more\n").unwrap();
        assert_eq!(lines.next().unwrap(), "once more");
        log.end(Duration::from_secs(60), io::sink());
        assert_eq!(log.counts.waiting.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_log_that_was_not_started_is_written_at_its_end() {
        let (mut log, mut writer) = Log::new();
        writer.write_all(b"one\n").unwrap();
        writer.write_all(&[b'y'; LINE_BYTES_MAX + 1]).unwrap();
        let mut out = Vec::new();
        log.end(Duration::ZERO, &mut out);
        assert_eq!(out.len(), 4 + LINE_BYTES_MAX + 4);
        assert!(out.starts_with(b"one\ny") && out.ends_with(b"y...\n"));
    }
}
