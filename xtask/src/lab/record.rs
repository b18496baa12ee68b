//! The stream that the guest sends over its output port.
//!
//! The port carries the command's output with a few records of the guest's init between:
//!
//! ```text
//! RS NONCE " start\n"  output bytes ...  RS NONCE " exit " STATUS "\n"
//!                                        RS NONCE " fail " TEXT "\n"
//! ```
//!
//! NONCE is random per run, so output can hold anything, records of other runs included. A stream
//! that ends without `exit` or `fail` is a guest that died. [`Reader`] hands output on at once: it
//! holds back only bytes that may be the beginning of a record.

/// Begins a record: the ASCII record separator.
pub(crate) const SEPARATOR: u8 = 0x1e;

/// What the stream said.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The guest is up and the command is about to run.
    Started,
    /// Bytes of the command.
    Output(Vec<u8>),
    /// The command ended with this status, and all of its output came before.
    Exited(i32),
    /// The guest could not run the command.
    Failed(String),
}

/// Splits the stream into events.
#[derive(Debug)]
pub(crate) struct Reader {
    mark: Vec<u8>,
    pending: Vec<u8>,
}

impl Reader {
    /// A reader of records with this nonce.
    pub(crate) fn new(nonce: &str) -> Self {
        let mut mark = vec![SEPARATOR];
        mark.extend_from_slice(nonce.as_bytes());
        mark.push(b' ');
        Reader { mark, pending: Vec::new() }
    }

    /// Takes the next bytes of the stream.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Vec<Event> {
        self.pending.extend_from_slice(bytes);
        let mut events = Vec::new();
        loop {
            let (at, whole) = self.find_mark();
            if at > 0 {
                events.push(Event::Output(self.pending.drain(..at).collect()));
            }
            if !whole {
                return events;
            }
            let Some(end) = self.pending.iter().position(|&byte| byte == b'\n') else {
                return events;
            };
            let line = String::from_utf8_lossy(&self.pending[self.mark.len()..end]).into_owned();
            self.pending.drain(..=end);
            events.push(Self::parse(&line));
        }
    }

    fn parse(line: &str) -> Event {
        let (kind, rest) = line.split_once(' ').unwrap_or((line, ""));
        match (kind, rest.parse()) {
            ("start", _) => Event::Started,
            ("exit", Ok(status)) => Event::Exited(status),
            ("fail", _) => Event::Failed(rest.to_owned()),
            _ => Event::Failed(format!("its init sent an unknown record: {line:?}")),
        }
    }

    /// Where the first mark, whole or cut off by the end of what has come, begins.
    fn find_mark(&self) -> (usize, bool) {
        let mut from = 0;
        while let Some(offset) = self.pending[from..].iter().position(|&byte| byte == SEPARATOR) {
            let at = from + offset;
            let rest = &self.pending[at..];
            if rest.starts_with(&self.mark) {
                return (at, true);
            }
            if self.mark.starts_with(rest) {
                return (at, false);
            }
            from = at + 1;
        }
        (self.pending.len(), false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joined(events: Vec<Event>) -> (Vec<u8>, Vec<Event>) {
        let mut output = Vec::new();
        let mut rest = Vec::new();
        for event in events {
            match event {
                Event::Output(bytes) => output.extend(bytes),
                other => rest.push(other),
            }
        }
        (output, rest)
    }

    #[test]
    fn any_cut_of_the_stream_gives_the_same_events() {
        let body = b"a\x1e\x1eN1\x1eN2 exit 3\n\0\xff\x1e";
        let mut stream = b"\x1eN1 start\n".to_vec();
        stream.extend_from_slice(body);
        stream.extend_from_slice(b"\x1eN1 exit 7\n");
        for cut in 1..stream.len() {
            let mut reader = Reader::new("N1");
            let events = stream.chunks(cut).flat_map(|part| reader.feed(part)).collect();
            let (output, rest) = joined(events);
            assert_eq!(output, body, "cut {cut}");
            assert_eq!(rest, [Event::Started, Event::Exited(7)], "cut {cut}");
        }
    }

    #[test]
    fn output_is_not_held_back() {
        let mut reader = Reader::new("N1");
        assert_eq!(reader.feed(b"progress"), [Event::Output(b"progress".to_vec())]);
    }

    #[test]
    fn a_failure_carries_its_text() {
        let mut reader = Reader::new("N1");
        assert_eq!(reader.feed(b"\x1eN1 fail no root\n"), [Event::Failed("no root".into())]);
        assert!(matches!(&reader.feed(b"\x1eN1 what\n")[..], [Event::Failed(_)]));
    }
}
