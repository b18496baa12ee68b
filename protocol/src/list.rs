//! [`CommandList`] and [`ResponseList`]: the capsules of one message, one after the other.
//!
//! They know offsets and rules, not memory: the caller copies each capsule out of where the message landed, so nothing
//! that a peer could still change is looked at twice. Where no lists were agreed a message holds one capsule. A list is
//! parsed as it is walked: what stands before a broken rule was said.

use crate::capsule::{CapsuleError, CommandCapsule, ResponseCapsule};
use crate::limits::{COMMAND_BYTES, LIST_MAX, RESPONSE_BYTES};
use crate::tag::QueueDepth;

/// Walks the commands of one message.
#[derive(Clone, Copy, Debug)]
pub struct CommandList {
    at: usize,
    end: usize,
    // How many may still come; 0 after the last.
    left: usize,
    depth: QueueDepth,
}

impl CommandList {
    /// A message of `message_bytes` bytes. `lists` says whether it may hold more than one command.
    #[must_use]
    pub fn new(message_bytes: usize, lists: bool, depth: QueueDepth) -> Self {
        Self { at: 0, end: message_bytes, left: if lists { LIST_MAX } else { 1 }, depth }
    }

    /// The next command; `None` behind the last. `read` copies the bytes at that offset of the message. Behind an
    /// error there is nothing more.
    #[inline]
    pub fn take(
        &mut self,
        read: impl FnOnce(usize, &mut [u8; COMMAND_BYTES]),
    ) -> Option<Result<CommandCapsule, CapsuleError>> {
        if self.left == 0 {
            return None;
        }
        let rest = self.end - self.at;
        if rest < COMMAND_BYTES {
            self.left = 0;
            return Some(Err(CapsuleError::Length { got: rest, expected: COMMAND_BYTES }));
        }
        let mut bytes = [0; COMMAND_BYTES];
        read(self.at, &mut bytes);
        let command = CommandCapsule::from_list(&bytes, rest, self.left > 1, self.depth);
        self.at += COMMAND_BYTES;
        let is_last = match &command {
            Ok(command) => command.in_capsule_bytes > 0 || self.at == self.end,
            Err(_) => true,
        };
        self.left = if is_last { 0 } else { self.left - 1 };
        Some(command)
    }

    /// Offset in the message behind the command that was taken last: where its data begins, if it has any.
    #[must_use]
    pub fn data_offset(&self) -> usize {
        self.at
    }
}

/// Walks the responses of one message.
#[derive(Clone, Copy, Debug)]
pub struct ResponseList {
    at: usize,
    end: usize,
    depth: QueueDepth,
}

impl ResponseList {
    /// A message of `message_bytes` bytes. `lists` says whether it may hold more than one response.
    ///
    /// # Errors
    /// It is no whole number of responses, or none, or too many.
    pub fn new(message_bytes: usize, lists: bool, depth: QueueDepth) -> Result<Self, CapsuleError> {
        let most = RESPONSE_BYTES * if lists { LIST_MAX } else { 1 };
        let whole = message_bytes.next_multiple_of(RESPONSE_BYTES);
        let expected = whole.clamp(RESPONSE_BYTES, most);
        if message_bytes != expected {
            return Err(CapsuleError::Length { got: message_bytes, expected });
        }
        Ok(Self { at: 0, end: message_bytes, depth })
    }

    /// The next response; `None` behind the last. `read` copies the bytes at that offset of the message. Behind an
    /// error there is nothing more.
    pub fn take(
        &mut self,
        read: impl FnOnce(usize, &mut [u8; RESPONSE_BYTES]),
    ) -> Option<Result<ResponseCapsule, CapsuleError>> {
        if self.at >= self.end {
            return None;
        }
        let mut bytes = [0; RESPONSE_BYTES];
        read(self.at, &mut bytes);
        self.at += RESPONSE_BYTES;
        let response = ResponseCapsule::from_wire(&bytes, RESPONSE_BYTES, self.depth);
        if response.is_err() {
            self.at = self.end;
        }
        Some(response)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        BlockCount, CommandFlags, Epoch, KeyedDescriptor, Lba, Opcode, Sequence, Status, Tag,
        VolumeHandle,
    };
    use proptest::prelude::*;

    fn depth() -> QueueDepth {
        QueueDepth::new(128).unwrap()
    }

    type Walked = (Vec<(CommandCapsule, usize)>, Option<CapsuleError>);

    /// The commands of a message with the offsets behind them, and what ended the walk.
    fn commands(message: &[u8], lists: bool) -> Walked {
        let mut list = CommandList::new(message.len(), lists, depth());
        let mut seen = Vec::new();
        while let Some(command) = list.take(|at, bytes| {
            // Panics where the walk leaves the message.
            bytes.copy_from_slice(&message[at..at + COMMAND_BYTES]);
        }) {
            match command {
                Ok(command) => seen.push((command, list.data_offset())),
                Err(error) => {
                    assert!(list.take(|_, _| panic!("behind an error")).is_none());
                    return (seen, Some(error));
                }
            }
        }
        (seen, None)
    }

    fn responses(message: &[u8], lists: bool) -> (Vec<ResponseCapsule>, Option<CapsuleError>) {
        let mut list = match ResponseList::new(message.len(), lists, depth()) {
            Ok(list) => list,
            Err(error) => return (Vec::new(), Some(error)),
        };
        let mut seen = Vec::new();
        while let Some(response) = list.take(|at, bytes| {
            bytes.copy_from_slice(&message[at..at + RESPONSE_BYTES]);
        }) {
            match response {
                Ok(response) => seen.push(response),
                Err(error) => {
                    assert!(list.take(|_, _| panic!("behind an error")).is_none());
                    return (seen, Some(error));
                }
            }
        }
        (seen, None)
    }

    fn read(tag: u16) -> CommandCapsule {
        CommandCapsule {
            volume: VolumeHandle(1),
            lba: Lba(8),
            count: BlockCount(1),
            buffer: Some(KeyedDescriptor { address: 0x1000, length: 512, rkey: 7 }),
            ..CommandCapsule::new(Opcode::Read, Tag(tag), Epoch(3), Sequence(tag.into()))
        }
    }

    fn write(tag: u16, data: &[u8]) -> CommandCapsule {
        CommandCapsule {
            opcode: Opcode::Write,
            flags: CommandFlags { fua: true, ..CommandFlags::default() },
            in_capsule_bytes: u32::try_from(data.len()).unwrap(),
            buffer: None,
            ..read(tag)
        }
    }

    fn message(commands: &[CommandCapsule], data: &[u8]) -> Vec<u8> {
        let mut bytes: Vec<u8> = commands.iter().flat_map(CommandCapsule::to_wire).collect();
        bytes.extend(data);
        bytes
    }

    #[test]
    fn golden_command_list() {
        #[rustfmt::skip]
        let golden = [
            // FLUSH of tag 5
            3, 0, 5, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0x21, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            // READ of tag 6
            1, 0, 6, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0,
            1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0x22, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            0, 0x10, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 7, 0, 0, 0,
            // WRITE of tag 7, with four bytes of data
            2, 1, 7, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0,
            1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0x23, 0, 0, 0,
            0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            b'd', b'a', b't', b'a',
        ];
        let life = |n| (Epoch(9), Sequence(n));
        let mut flush = CommandCapsule::new(Opcode::Flush, Tag(5), Epoch(9), Sequence(0x21));
        flush.volume = VolumeHandle(1);
        let (epoch, sequence) = life(0x22);
        let read = CommandCapsule { epoch, sequence, ..read(6) };
        let (epoch, sequence) = life(0x23);
        let write = CommandCapsule { epoch, sequence, ..write(7, b"data") };
        assert_eq!(message(&[flush, read, write], b"data"), golden);
        let (seen, end) = commands(&golden, true);
        assert_eq!((seen, end), (vec![(flush, 64), (read, 128), (write, 192)], None));
    }

    #[test]
    fn golden_response_list() {
        let golden = [
            [0x7f, 0, 11, 0, 4, 3, 2, 1, 9, 0, 0, 0, 0xef, 0xbe, 0, 0],
            [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x22, 0, 0, 0],
        ];
        let first = ResponseCapsule {
            tag: Tag(0x7f),
            status: Status::NoSpace,
            digest: 0x0102_0304,
            value: 9,
            check: 0xbeef,
        };
        let second = ResponseCapsule::new(Tag(1), Sequence(0x22), Status::Ok);
        assert_eq!([first.to_wire(), second.to_wire()], golden);
        assert_eq!(responses(golden.as_flattened(), true), (vec![first, second], None));
    }

    #[test]
    fn without_the_feature_a_message_is_one_capsule() {
        let two = message(&[read(1), read(2)], b"");
        let error = Some(CapsuleError::Length { got: 128, expected: 64 });
        assert_eq!(commands(&two, false), (vec![], error));
        assert_eq!(commands(&two[..64], false), (vec![(read(1), 64)], None));
        let one = write(3, &[7; 512]);
        assert_eq!(commands(&message(&[one], &[7; 512]), false), (vec![(one, 64)], None));
        let response = ResponseCapsule::new(Tag(1), Sequence(2), Status::Ok);
        let twice = [response.to_wire(), response.to_wire()];
        let error = CapsuleError::Length { got: 32, expected: 16 };
        assert_eq!(responses(twice.as_flattened(), false), (vec![], Some(error)));
        assert_eq!(responses(&response.to_wire(), false), (vec![response], None));
    }

    #[test]
    fn data_is_last_and_whole() {
        let (first, second) = (write(1, &[1; 512]), read(2));
        // In the middle: what follows the data is data too much.
        let mut bytes = message(&[first], &[1; 512]);
        bytes.extend(second.to_wire());
        let error = CapsuleError::Length { got: 64 + 512 + 64, expected: 64 + 512 };
        assert_eq!(commands(&bytes, true), (vec![], Some(error)));
        // Behind both capsules, and it belongs to the first.
        let bytes = message(&[first, second], &[1; 512]);
        assert_eq!(commands(&bytes, true).1, Some(error));
        // Of a command that has none.
        let bytes = message(&[second, second], &[1; 512]);
        assert!(commands(&bytes, true).1.is_some());
        // Too short, too long.
        let good = message(&[second, first], &[1; 512]);
        assert_eq!(commands(&good, true), (vec![(second, 64), (first, 128)], None));
        let error = CapsuleError::Length { got: 64 + 511, expected: 64 + 512 };
        assert_eq!(commands(&good[..good.len() - 1], true), (vec![(second, 64)], Some(error)));
        let long = [good.as_slice(), &[0]].concat();
        assert_eq!(commands(&long, true).0.len(), 1);
        assert!(commands(&long, true).1.is_some());
    }

    #[test]
    fn a_list_has_an_end() {
        let reads: Vec<_> = (0..20).map(read).collect();
        let longest = message(&reads[..LIST_MAX], b"");
        let (seen, end) = commands(&longest, true);
        assert_eq!((seen.len(), end), (LIST_MAX, None));
        let (seen, end) = commands(&message(&reads[..=LIST_MAX], b""), true);
        assert_eq!(seen.len(), LIST_MAX - 1);
        assert_eq!(end, Some(CapsuleError::Length { got: 128, expected: 64 }));
        let response = ResponseCapsule::new(Tag(1), Sequence(2), Status::Ok).to_wire();
        assert_eq!(responses(&response.repeat(LIST_MAX), true).0.len(), LIST_MAX);
        for (bytes, expected) in [(0, 16), (1, 16), (15, 16), (17, 32), (255, 256), (272, 256)] {
            let error = CapsuleError::Length { got: bytes, expected };
            assert_eq!(responses(&vec![0; bytes], true), (vec![], Some(error)));
        }
        assert!(matches!(commands(b"", true).1, Some(CapsuleError::Length { got: 0, .. })));
    }

    fn any_command() -> impl Strategy<Value = CommandCapsule> {
        let range = (any::<u64>(), any::<u64>(), any::<u32>(), any::<u32>());
        (0..=128u16, 0..5usize, range, any::<[bool; 2]>(), 1..=u32::MAX).prop_map(
            |(tag, opcode, (lba, count, epoch, sequence), [fua, may_unmap], length)| {
                let opcodes = [
                    Opcode::Read,
                    Opcode::Write,
                    Opcode::Flush,
                    Opcode::Discard,
                    Opcode::WriteZeroes,
                ];
                CommandCapsule {
                    opcode: opcodes[opcode],
                    flags: CommandFlags { fua, may_unmap, digest: false },
                    lba: Lba(lba),
                    count: BlockCount(count),
                    buffer: Some(KeyedDescriptor { address: 0x1000, length, rkey: 7 }),
                    ..CommandCapsule::new(
                        opcodes[opcode],
                        Tag(tag),
                        Epoch(epoch),
                        Sequence(sequence),
                    )
                }
            },
        )
    }

    proptest! {
        #[test]
        fn what_is_packed_is_what_is_read(
            list in prop::collection::vec(any_command(), 1..=LIST_MAX),
            data in prop::collection::vec(any::<u8>(), 0..600),
        ) {
            let mut list = list;
            if !data.is_empty() {
                // The last becomes a write with data. Tags may repeat: that is the target's to judge.
                let last = list.last_mut().unwrap();
                *last = write(last.tag.0, &data);
            }
            let bytes = message(&list, &data);
            let (seen, end) = commands(&bytes, true);
            prop_assert_eq!(end, None);
            prop_assert!(seen.iter().map(|(command, _)| command).eq(&list));
            let data_at = seen.last().unwrap().1;
            prop_assert_eq!(&bytes[data_at..], &data[..]);
        }

        #[test]
        fn a_cut_list_gives_its_beginning(
            list in prop::collection::vec(any_command(), 1..=LIST_MAX),
            data in prop::collection::vec(any::<u8>(), 0..600),
            cut in 0usize..2000,
        ) {
            let mut list = list;
            if !data.is_empty() {
                let last = list.last_mut().unwrap();
                *last = write(last.tag.0, &data);
            }
            let bytes = message(&list, &data);
            let cut = cut % bytes.len();
            let (seen, end) = commands(&bytes[..cut], true);
            prop_assert!(seen.iter().map(|(command, _)| command).eq(&list[..seen.len()]));
            let without_data = list.len() - usize::from(!data.is_empty());
            if cut > 0 && cut.is_multiple_of(COMMAND_BYTES) && cut / COMMAND_BYTES <= without_data {
                prop_assert_eq!((seen.len(), end), (cut / COMMAND_BYTES, None));
            } else {
                prop_assert!(end.is_some(), "cut at {}", cut);
            }
        }

        #[test]
        fn any_bytes_are_survived(bytes: Vec<u8>, len in 0usize..5000, lists: bool, near: bool) {
            let mut message = bytes;
            message.resize(len, 0);
            if near {
                // Mostly near-valid input.
                let tags = 0u16..;
                for (capsule, tag) in message.chunks_exact_mut(COMMAND_BYTES).zip(tags) {
                    let flush = CommandCapsule::new(Opcode::Flush, Tag(tag % 129), Epoch(1), Sequence(1));
                    capsule[..40].copy_from_slice(&flush.to_wire()[..40]);
                }
            }
            let most = if lists { LIST_MAX } else { 1 };
            let (seen, _) = commands(&message, lists);
            prop_assert!(seen.len() <= most);
            let (seen, _) = responses(&message, lists);
            prop_assert!(seen.len() <= most);
        }

        #[test]
        fn any_responses_are_read_as_packed(tags in prop::collection::vec(0u16..=128, 1..=LIST_MAX), check: u16) {
            let list: Vec<_> = tags
                .iter()
                .map(|tag| ResponseCapsule::new(Tag(*tag), Sequence(check.into()), Status::Ok))
                .collect();
            let bytes: Vec<u8> = list.iter().flat_map(ResponseCapsule::to_wire).collect();
            prop_assert_eq!(responses(&bytes, true), (list, None));
        }
    }
}
