//! [`ReadAhead`]: detects sequential readers of a connection and finds the ranges to read ahead.
//! Pure.
//!
//! A stream is the position where the next read is expected. A read that begins there, or a little
//! after it (the requests of one reader may arrive out of order), continues the stream. So does a
//! large read that skips a few reads of its own length: an initiator may distribute its requests
//! over several connections. The third read in a row starts the read-ahead, with a window that
//! doubles up to the volume's limit. The window is filled again when the reader has used half of
//! it, so that reads of the store are large. A read elsewhere replaces the stream that was idle for
//! longest. Bounded: [`STREAMS`] per connection, and one window each.

use rblk_protocol::limits;
use rblk_protocol::width::narrow;

use crate::volume::ids::VolumeIndex;

/// Sequential readers detected per connection.
pub(crate) const STREAMS: usize = 4;
/// Continuations before a stream reads ahead.
const PROOF: u8 = 2;
/// Other connections over which an initiator may distribute large reads of one reader, in turn.
const OTHERS: u64 = limits::LANES_MAX as u64 - 1;
/// Smallest window.
const WINDOW_MIN: u64 = 64 << 10;

#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    volume: VolumeIndex,
    // The position where the next read is expected.
    next: u64,
    // End of the range that was requested so far.
    ahead: u64,
    window: u64,
    steps: u8,
    used: u64,
}

/// The sequential readers of one connection.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReadAhead {
    streams: [Stream; STREAMS],
    reads: u64,
}

impl ReadAhead {
    /// A read of `len` bytes at `offset` came. Returns a range of the volume, first byte and bytes,
    /// that the reader may want soon; at most `max` bytes, and not beyond `size`.
    pub(crate) fn on_read(
        &mut self,
        volume: VolumeIndex,
        offset: u64,
        len: u32,
        max: u32,
        size: u64,
    ) -> Option<(u64, u32)> {
        let max = u64::from(max);
        if max == 0 {
            return None;
        }
        self.reads += 1;
        let (reads, end) = (self.reads, offset + u64::from(len));
        let near = |s: &&mut Stream| {
            // A new stream has no window: only an exact continuation counts, or one that skips
            // reads of the other connections.
            let slack = s.window;
            let left_out = if len < limits::LANE_BYTES { 0 } else { OTHERS * u64::from(len) };
            let goes_on = (s.next..=s.next.saturating_add(left_out)).contains(&offset);
            let is_near = slack > 0
                && offset <= s.next.saturating_add(slack)
                && end > s.next.saturating_sub(slack);
            s.used > 0 && s.volume == volume && (goes_on || is_near)
        };
        let Some(stream) = self.streams.iter_mut().find(near) else {
            let idle = self.streams.iter_mut().min_by_key(|s| s.used)?;
            *idle = Stream { volume, next: end, ahead: end, window: 0, steps: 0, used: reads };
            return None;
        };
        stream.used = reads;
        stream.next = stream.next.max(end);
        stream.steps = stream.steps.saturating_add(1);
        if stream.steps < PROOF {
            return None;
        }
        if stream.window == 0 {
            stream.window = WINDOW_MIN.max(2 * u64::from(len)).min(max);
        }
        stream.ahead = stream.ahead.max(stream.next);
        if stream.ahead - stream.next > stream.window / 2 {
            return None;
        }
        stream.window = (2 * stream.window).min(max);
        let from = stream.ahead;
        let to = (stream.next + stream.window).min(size);
        if to <= from {
            return None;
        }
        stream.ahead = to;
        // At most the window, which is at most `max`.
        Some((from, narrow(to - from)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOLUME: VolumeIndex = VolumeIndex(1);
    const SIZE: u64 = 1 << 30;

    #[test]
    fn read_ahead_stays_in_front_within_its_bound() {
        let mut ahead = ReadAhead::default();
        let (mut offset, mut asked) = (1 << 20, 0);
        let begun = offset;
        for step in 0..1000 {
            if let Some((from, len)) = ahead.on_read(VOLUME, offset, 4096, 512 << 10, SIZE) {
                assert!(from >= offset + 4096 && from >= asked, "nothing twice");
                assert!(u64::from(len) <= 512 << 10);
                asked = from + u64::from(len);
            }
            offset += 4096;
            assert!(asked <= offset + (512 << 10), "bounded");
            assert!(step < 10 || asked > offset, "step {step}: ahead");
        }
        assert!(offset - begun == 1000 * 4096);
    }

    #[test]
    fn a_reader_spread_over_connections_is_detected() {
        let large = u64::from(limits::LANE_BYTES);
        for connections in 2..=u64::from(limits::LANES_MAX) {
            for at in 0..connections {
                let mut ahead = ReadAhead::default();
                let asked: Vec<_> = (0..40)
                    .filter(|step| step % connections == at)
                    .map(|step| {
                        ahead.on_read(VOLUME, step * large, limits::LANE_BYTES, 1 << 20, SIZE)
                    })
                    .collect();
                assert!(asked.iter().flatten().count() > 0, "{at} of {connections}: {asked:?}");
            }
        }
        // Small reads stay on one connection; a gap ends the sequence.
        let mut ahead = ReadAhead::default();
        for step in 0..40 {
            assert_eq!(ahead.on_read(VOLUME, step * 8192, 4096, 1 << 20, SIZE), None);
        }
    }

    #[test]
    fn random_reads_ask_for_nothing() {
        let mut ahead = ReadAhead::default();
        let mut state = 7u64;
        for _ in 0..10_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let offset = (state >> 30) % (SIZE / 4096) * 4096;
            assert_eq!(ahead.on_read(VOLUME, offset, 4096, 512 << 10, SIZE), None);
        }
    }

    #[test]
    fn streams_are_distinguished_and_reordering_is_tolerated() {
        let mut ahead = ReadAhead::default();
        let mut asked = [0u64; 3];
        for step in 0..200u64 {
            for stream in 0..3u16 {
                // Pairs arrive swapped after the stream is detected.
                let step = if step >= 8 { step ^ 1 } else { step };
                let offset = u64::from(stream) * (100 << 20) + step * 8192;
                let volume = VolumeIndex(stream % 2);
                if let Some((from, len)) = ahead.on_read(volume, offset, 8192, 1 << 20, SIZE) {
                    assert!(from / (100 << 20) == u64::from(stream));
                    asked[usize::from(stream)] += u64::from(len);
                }
            }
        }
        for bytes in asked {
            assert!((200 * 8192 - 65536..200 * 8192 + (2 << 20)).contains(&bytes), "{asked:?}");
        }
    }

    #[test]
    fn read_ahead_stops_at_the_end_and_when_it_is_off() {
        let mut ahead = ReadAhead::default();
        for step in 0..100 {
            let offset = SIZE - (100 - step) * 4096;
            if let Some((from, len)) = ahead.on_read(VOLUME, offset, 4096, 4 << 20, SIZE) {
                assert!(from + u64::from(len) <= SIZE);
            }
            assert_eq!(ahead.on_read(VOLUME, offset, 4096, 0, SIZE), None);
        }
    }
}
