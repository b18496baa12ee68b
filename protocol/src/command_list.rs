//! [`CommandList`]: the commands of one message, one behind the other.
//!
//! The list knows offsets and rules, not memory. The caller copies each capsule out of the receive
//! buffer, so nothing that a peer could still change is read twice. If no lists were agreed, a
//! message holds one capsule. A list is parsed as it is walked: the commands before a broken rule
//! are valid.
//!
//! In-capsule data is behind the capsules. The data of the first command that has any is at the end
//! of the message. The data of each later command is before it:
//!
//! ```text
//! | capsules ->                       | what is left | <- data of the 2nd | data of the 1st |
//! ```
//!
//! With [`Features::DATA_FIRST`] a message is the other way round, and is read from its end:
//!
//! ```text
//! | data of the 1st | data of the 2nd -> | what is left |                       <- capsules |
//! ```
//!
//! The walk takes bytes from both ends, never more than are left, and ends when none are left. So
//! no two capsules or data overlap, all of them are inside the message, and every byte of the
//! message belongs to one of them.

use crate::capsule::{CapsuleError, CommandCapsule};
use crate::features::Features;
use crate::limits::{COMMAND_BYTES, LIST_DATA_MAX, LIST_MAX};
use crate::tag::QueueDepth;
use crate::width::{const_u32, wide};

/// Walks the commands of one message.
#[derive(Clone, Copy, Debug)]
pub struct CommandList {
    // Bytes of the message, of the taken capsules, and of the rest: neither capsules nor data taken
    // so far.
    len: u32,
    capsules: u32,
    rest: u32,
    // Bytes of the most capsules that there may be.
    capsules_max: u32,
    // Commands that had data.
    with_data: u32,
    features: Features,
    depth: QueueDepth,
}

const COMMAND_LEN: u32 = const_u32(COMMAND_BYTES);
const COMMANDS_MAX: u32 = 16;
const DATA_MAX: u32 = 3;
const _: () = assert!(COMMANDS_MAX as usize == LIST_MAX && DATA_MAX as usize == LIST_DATA_MAX);

impl CommandList {
    /// The commands of a message of `message_bytes` bytes. The features that were agreed say
    /// whether it may hold more than one command, more than one command with data, and where data
    /// is.
    #[must_use]
    #[inline]
    pub fn new(message_bytes: u32, features: Features, depth: QueueDepth) -> Self {
        let most = if features.has(Features::CAPSULE_LISTS) { COMMANDS_MAX } else { 1 };
        let capsules_max = most * COMMAND_LEN;
        Self {
            len: message_bytes,
            capsules: 0,
            rest: message_bytes,
            capsules_max,
            with_data: 0,
            features,
            depth,
        }
    }

    /// Whether there is no command behind those that were taken. A message has at least one.
    #[must_use]
    #[inline]
    pub fn is_done(&self) -> bool {
        self.rest == 0
    }

    /// The next command. `None` after the last. `read` copies the bytes at that offset of the
    /// message. After an error there are no more commands.
    #[inline]
    pub fn take(
        &mut self,
        read: impl FnOnce(usize) -> [u8; COMMAND_BYTES],
    ) -> Option<Result<CommandCapsule, CapsuleError>> {
        if self.rest < COMMAND_LEN {
            return self.end().map(Err);
        }
        let at = if self.is_data_first() {
            self.len - self.capsules - COMMAND_LEN
        } else {
            self.capsules
        };
        let bytes = read(wide(at));
        // The command stays where it was parsed to: it is not copied from result to result.
        let command = CommandCapsule::parse(&bytes, self.depth);
        let placed = match &command {
            Ok(command) => self.place(command),
            Err(error) => Err(*error),
        };
        if let Err(error) = placed {
            self.give_up();
            return Some(Err(error));
        }
        Some(command)
    }

    /// No whole capsule is left. Returns the fault, if there is one.
    #[cold]
    fn end(&mut self) -> Option<CapsuleError> {
        // Behind a command that was placed there is nothing, or at least one whole capsule.
        if self.capsules > 0 {
            return None;
        }
        let got = wide(self.len);
        self.give_up();
        Some(CapsuleError::Length { got, expected: COMMAND_BYTES })
    }

    /// A rule was broken: there are no more commands.
    #[cold]
    fn give_up(&mut self) {
        (self.len, self.capsules, self.rest) = (COMMAND_LEN, COMMAND_LEN, 0);
    }

    /// Takes the bytes of a command from those that are left.
    #[inline]
    fn place(&mut self, command: &CommandCapsule) -> Result<(), CapsuleError> {
        let data = command.in_capsule_bytes;
        let Some(rest) = (self.rest - COMMAND_LEN).checked_sub(data) else {
            return Err(self.does_not_fit(command));
        };
        if data > 0 {
            self.with_data += 1;
            if self.with_data > 1 && self.with_data > self.data_max() {
                return Err(CapsuleError::Field("too many commands of a message have data"));
            }
        }
        let capsules = self.capsules + COMMAND_LEN;
        // If bytes are left, at least one more capsule is behind it, and may be.
        if rest > 0
            && (rest < COMMAND_LEN
                || capsules == self.capsules_max
                || data > 0 && self.data_max() == 1)
        {
            return Err(self.does_not_fit(command));
        }
        (self.capsules, self.rest) = (capsules, rest);
        Ok(())
    }

    #[cold]
    fn does_not_fit(&self, command: &CommandCapsule) -> CapsuleError {
        CapsuleError::Length { got: wide(self.rest), expected: command.message_bytes() }
    }

    /// Whether data is in front of the capsules.
    #[inline(always)]
    fn is_data_first(&self) -> bool {
        self.features.has(Features::DATA_FIRST)
    }

    /// How many commands of a message may have data. Where it is one, that is the last.
    #[inline(always)]
    fn data_max(&self) -> u32 {
        let lists = self.features.has(Features::CAPSULE_LISTS);
        if lists && self.features.has(Features::DATA_LISTS) { DATA_MAX } else { 1 }
    }

    /// Offset in the message of the data of this command, which was taken last, if it has data.
    #[must_use]
    #[inline]
    pub fn data_offset(&self, command: &CommandCapsule) -> usize {
        wide(if self.is_data_first() {
            self.len - self.capsules - self.rest - command.in_capsule_bytes
        } else {
            self.capsules + self.rest
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        BlockCount, CommandFlags, Epoch, KeyedDescriptor, Lba, Opcode, Sequence, Tag, VolumeHandle,
    };
    use proptest::prelude::*;

    fn depth() -> QueueDepth {
        QueueDepth::new(128).unwrap()
    }

    const NONE: Features = Features(0);
    const LISTS: Features = Features::CAPSULE_LISTS;
    const DATA: Features = Features(LISTS.0 | Features::DATA_LISTS.0);

    type Walked<'m> = (Vec<(CommandCapsule, &'m [u8])>, Option<CapsuleError>);

    /// The commands of a message with their data, and the fault that ended the walk.
    fn commands(message: &[u8], features: Features) -> Walked<'_> {
        let mut list = CommandList::new(u32::try_from(message.len()).unwrap(), features, depth());
        let mut seen = Vec::new();
        // Panics where the walk leaves the message.
        let read = |at| message[at..at + COMMAND_BYTES].try_into().unwrap();
        while let Some(command) = list.take(read) {
            match command {
                Ok(command) => {
                    // And where data does.
                    let data = &message[list.data_offset(&command)..];
                    let data = &data[..command.in_capsule_bytes as usize];
                    seen.push((command, data));
                }
                Err(error) => {
                    assert!(list.take(|_| panic!("behind an error")).is_none());
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

    /// As an initiator packs them: each with its data, if it has any.
    fn packed(commands: &[(CommandCapsule, Vec<u8>)]) -> Vec<u8> {
        let capsules: Vec<_> = commands.iter().map(|(command, _)| *command).collect();
        let data: Vec<u8> = commands.iter().rev().flat_map(|(_, data)| data.clone()).collect();
        message(&capsules, &data)
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
        let all: Vec<(_, &[u8])> = vec![(flush, b""), (read, b""), (write, b"data")];
        assert_eq!(commands(&golden, LISTS), (all.clone(), None));
        assert_eq!(commands(&golden, DATA), (all, None), "the same where more was agreed");
    }

    #[test]
    fn golden_data_list() {
        #[rustfmt::skip]
        let golden = [
            // WRITE of tag 7, with three bytes of data
            2, 1, 7, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0,
            1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 7, 0, 0, 0,
            0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            // READ of tag 6
            1, 0, 6, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0,
            1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 6, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            0, 0x10, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 7, 0, 0, 0,
            // WRITE of tag 9, with one
            2, 1, 9, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0,
            1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 9, 0, 0, 0,
            0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            // WRITE of tag 8, with two
            2, 1, 8, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0,
            1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 8, 0, 0, 0,
            0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            // READ of tag 5
            1, 0, 5, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0,
            1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 5, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            0, 0x10, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 7, 0, 0, 0,
            // of tag 8, of tag 9, of tag 7
            b'h', b'i', b'!', b'a', b'b', b'c',
        ];
        let all: [(_, &[u8]); 5] = [
            (write(7, b"abc"), b"abc"),
            (read(6), b""),
            (write(9, b"!"), b"!"),
            (write(8, b"hi"), b"hi"),
            (read(5), b""),
        ];
        assert_eq!(packed(&all.map(|(command, data)| (command, data.to_vec()))), golden);
        assert_eq!(commands(&golden, DATA), (all.to_vec(), None));
        // Where only lists were agreed the first is the last.
        let error = CapsuleError::Length { got: golden.len(), expected: 64 + 3 };
        assert_eq!(commands(&golden, LISTS), (vec![], Some(error)));
        let error = CapsuleError::Length { got: golden.len(), expected: 64 + 3 };
        assert_eq!(commands(&golden, Features::DATA_LISTS), (vec![], Some(error)), "not alone");
    }

    const FIRST: Features = Features(DATA.0 | Features::DATA_FIRST.0);

    /// As an initiator packs them where data comes first.
    fn packed_first(commands: &[(CommandCapsule, Vec<u8>)]) -> Vec<u8> {
        let data = commands.iter().flat_map(|(_, data)| data.clone());
        data.chain(commands.iter().rev().flat_map(|(command, _)| command.to_wire())).collect()
    }

    #[test]
    fn golden_data_first() {
        #[rustfmt::skip]
        let golden = [
            // of tag 7, of tag 8
            b'a', b'b', b'c', b'h', b'i',
            // WRITE of tag 8, with two bytes of data
            2, 1, 8, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0,
            1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 8, 0, 0, 0,
            0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            // READ of tag 6
            1, 0, 6, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0,
            1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 6, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            0, 0x10, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 7, 0, 0, 0,
            // WRITE of tag 7, with three
            2, 1, 7, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0,
            1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 7, 0, 0, 0,
            0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        ];
        let all: [(_, &[u8]); 3] =
            [(write(7, b"abc"), b"abc"), (read(6), b""), (write(8, b"hi"), b"hi")];
        assert_eq!(packed_first(&all.map(|(command, data)| (command, data.to_vec()))), golden);
        assert_eq!(commands(&golden, FIRST), (all.to_vec(), None));
        // Neither message parses as the other kind.
        assert!(commands(&golden, DATA).1.is_some());
        assert!(commands(&packed(&all.map(|(c, data)| (c, data.to_vec()))), FIRST).1.is_some());
        // Where no list was agreed, as for one command.
        let one = Features::DATA_FIRST;
        let alone = packed_first(&[(all[0].0, b"abc".to_vec())]);
        assert_eq!(commands(&alone, one), (vec![all[0]], None));
        assert!(commands(&alone[1..], one).1.is_some());
        assert!(commands(b"", one).1.is_some() && commands(&[0; 63], one).1.is_some());
    }

    #[test]
    fn without_the_feature_a_message_is_one_capsule() {
        let two = message(&[read(1), read(2)], b"");
        let error = Some(CapsuleError::Length { got: 128, expected: 64 });
        assert_eq!(commands(&two, NONE), (vec![], error));
        assert_eq!(commands(&two[..64], NONE), (vec![(read(1), &[][..])], None));
        let (one, data) = (write(3, &[7; 512]), &[7; 512][..]);
        assert_eq!(commands(&message(&[one], data), NONE), (vec![(one, data)], None));
    }

    #[test]
    fn data_is_last_and_whole() {
        let (first, second) = (write(1, &[1; 512]), read(2));
        for (features, one_may_follow) in [(LISTS, false), (DATA, true)] {
            // In the middle: the bytes behind the data are too much data, or no command.
            let mut bytes = message(&[first], &[0xff; 512]);
            bytes.extend(second.to_wire());
            let (seen, end) = commands(&bytes, features);
            assert_eq!(seen.len(), usize::from(one_may_follow));
            let error = CapsuleError::Length { got: 64 + 512 + 64, expected: 64 + 512 };
            assert_eq!(end, Some(if one_may_follow { CapsuleError::Opcode(0xff) } else { error }));
            // Behind both capsules, and it belongs to the first.
            let bytes = message(&[first, second], &[1; 512]);
            let data = &[1; 512][..];
            let both = (vec![(first, data), (second, &[][..])], None);
            let none = (vec![], Some(error));
            assert_eq!(commands(&bytes, features), if one_may_follow { both } else { none });
            // Of a command that has none.
            let bytes = message(&[second, second], &[1; 512]);
            assert!(commands(&bytes, features).1.is_some());
            // Too short, too long.
            let good = message(&[second, first], &[1; 512]);
            let fine = vec![(second, &[][..]), (first, data)];
            assert_eq!(commands(&good, features), (fine, None));
            let error = CapsuleError::Length { got: 64 + 511, expected: 64 + 512 };
            let seen = vec![(second, &[][..])];
            assert_eq!(commands(&good[..good.len() - 1], features), (seen, Some(error)));
            let long = [good.as_slice(), &[0]].concat();
            assert_eq!(commands(&long, features).0.len(), 1);
            assert!(commands(&long, features).1.is_some());
        }
    }

    #[test]
    fn few_commands_of_a_message_have_data() {
        let writes: Vec<_> = (0..4).map(|tag| (write(tag, &[1; 64]), vec![1; 64])).collect();
        assert_eq!(commands(&packed(&writes[..LIST_DATA_MAX]), DATA).1, None);
        let bytes = packed(&writes);
        let (seen, end) = commands(&bytes, DATA);
        assert_eq!(seen.len(), LIST_DATA_MAX);
        assert!(matches!(end, Some(CapsuleError::Field(_))), "{end:?}");
        // The limit of commands is the same as without data.
        let mut long: Vec<_> = (0..16).map(|tag| (read(tag), Vec::new())).collect();
        assert_eq!(long.len(), LIST_MAX);
        long[1..4].clone_from_slice(&writes[..3]);
        assert_eq!(commands(&packed(&long), DATA).0.len(), LIST_MAX);
        long.push((read(77), Vec::new()));
        assert_eq!(commands(&packed(&long), DATA).0.len(), LIST_MAX - 1);
    }

    #[test]
    fn capsules_and_data_that_would_meet_are_refused() {
        // The data of the first would begin in the second, or before the message.
        for longer in [1, 63, 64, 65, 127, 128, 129, 1000, 16 << 10, u32::MAX - 64, u32::MAX] {
            let good = (write(1, &[1; 64]), vec![1; 64]);
            let mut greedy = good.clone();
            greedy.0.in_capsule_bytes = longer;
            for list in [[greedy.clone(), good.clone()], [good.clone(), greedy]] {
                let bytes = packed(&list);
                let (seen, end) = commands(&bytes, DATA);
                let said: u32 = list
                    .iter()
                    .map(|(command, _)| command.in_capsule_bytes)
                    .fold(0, u32::saturating_add);
                assert_eq!(end.is_none(), said == 128, "{longer}: {end:?}");
                assert_eq!(seen.len() == 2, said == 128, "{longer}");
            }
        }
    }

    #[test]
    fn a_list_has_an_end() {
        let reads: Vec<_> = (0..20).map(read).collect();
        let longest = message(&reads[..LIST_MAX], b"");
        let (seen, end) = commands(&longest, LISTS);
        assert_eq!((seen.len(), end), (LIST_MAX, None));
        let longer = message(&reads[..=LIST_MAX], b"");
        let (seen, end) = commands(&longer, LISTS);
        assert_eq!(seen.len(), LIST_MAX - 1);
        assert_eq!(end, Some(CapsuleError::Length { got: 128, expected: 64 }));
        assert!(matches!(commands(b"", LISTS).1, Some(CapsuleError::Length { got: 0, .. })));
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

    /// Commands, and the lengths of the data of those that have any.
    fn any_list(data_max: usize) -> impl Strategy<Value = Vec<(CommandCapsule, Vec<u8>)>> {
        let data = prop::collection::vec(any::<u8>(), 1..600);
        let data = prop::option::weighted(0.2, data);
        prop::collection::vec((any_command(), data), 1..=LIST_MAX).prop_map(move |list| {
            let mut left = data_max;
            let with_data = |(command, data): (CommandCapsule, Option<Vec<u8>>)| match data {
                // Tags may repeat: that is the target's to judge.
                Some(data) if left > 0 => {
                    left -= 1;
                    (write(command.tag.0, &data), data)
                }
                _ => (command, Vec::new()),
            };
            list.into_iter().map(with_data).collect()
        })
    }

    fn as_seen(list: &[(CommandCapsule, Vec<u8>)]) -> Vec<(CommandCapsule, &[u8])> {
        list.iter().map(|(command, data)| (*command, &data[..])).collect()
    }

    /// The lengths decide the meaning of a byte: the data of the first two takes the place of two
    /// capsules.
    #[test]
    fn data_may_lie_where_capsules_could() {
        let list = [write(1, &[0; 76]), write(2, &[0; 52]), read(3), read(4)];
        let bytes = message(&list, b"");
        let (seen, end) = commands(&bytes, DATA);
        assert_eq!((seen.len(), end), (2, None));
        assert_eq!(seen[0].1.len() + seen[1].1.len(), 2 * COMMAND_BYTES);
    }

    proptest! {
        #[test]
        fn what_is_packed_is_what_is_read(mut list in any_list(LIST_DATA_MAX)) {
            let bytes = packed(&list);
            prop_assert_eq!(commands(&bytes, DATA), (as_seen(&list), None));
            let first = packed_first(&list);
            prop_assert_eq!(commands(&first, FIRST), (as_seen(&list), None));
            // Up to the first with data it is one that needs no more than lists.
            let first = list.iter().position(|(_, data)| !data.is_empty());
            list.truncate(first.map_or(LIST_MAX, |at| at + 1));
            let bytes = packed(&list);
            prop_assert_eq!(commands(&bytes, LISTS), (as_seen(&list), None));
            prop_assert_eq!(commands(&bytes, DATA), (as_seen(&list), None));
        }

        #[test]
        fn lengths_that_do_not_add_up_are_refused(
            list in prop::collection::vec((any_command(), 0u32..300), 1..=LIST_MAX + 1),
            bytes in 0..LIST_MAX * COMMAND_BYTES + 1200,
            exact: bool,
            lists: bool,
        ) {
            let few = |length: u32| if length < 220 { 0 } else { length - 219 };
            let list: Vec<_> = list
                .into_iter()
                .map(|(command, length)| match few(length) {
                    0 => command,
                    length => write(command.tag.0, &vec![0; length as usize]),
                })
                .collect();
            let all: usize = list.iter().map(|c| c.in_capsule_bytes as usize).sum();
            let capsules = list.len() * COMMAND_BYTES;
            let mut message = message(&list, b"");
            message.resize(if exact { capsules + all } else { bytes.max(capsules) }, 0);
            let features = if lists { LISTS } else { DATA };
            // The data of some may take the place of all later capsules: then the message is one of
            // fewer commands.
            let is_whole = |first: &[CommandCapsule]| {
                let all: usize = first.iter().map(CommandCapsule::message_bytes).sum();
                let with_data = first.iter().filter(|c| c.in_capsule_bytes > 0).count();
                let ends_with_data = first.iter().rev().skip(1).all(|c| c.in_capsule_bytes == 0);
                let allowed = if lists { ends_with_data } else { with_data <= LIST_DATA_MAX };
                allowed && message.len() == all
            };
            let most = list.len().min(LIST_MAX);
            let right = (1..=most).any(|count| is_whole(&list[..count]));
            let (seen, end) = commands(&message, features);
            prop_assert_eq!(end.is_none(), right, "{:?}", end);
            // The reverse order: all bytes that are no capsule are in front.
            let mut first = vec![0; message.len() - capsules];
            first.extend(list.iter().rev().flat_map(CommandCapsule::to_wire));
            let (seen_first, end_first) = commands(&first, features.or(Features::DATA_FIRST));
            prop_assert_eq!(end_first, end);
            prop_assert!(seen_first.iter().map(|(c, _)| c).eq(seen.iter().map(|(c, _)| c)));
            let mut behind = 0;
            for (_, data) in seen_first.iter().filter(|(_, data)| !data.is_empty()) {
                let at = data.as_ptr() as usize - first.as_ptr() as usize;
                prop_assert_eq!(at, behind);
                behind += data.len();
            }
            prop_assert!(behind + seen_first.len() * COMMAND_BYTES <= first.len());
            // At every point of the walk, the data of a command lies before the data of the earlier
            // commands, behind the capsules.
            let mut last = message.len();
            for (_, data) in seen.iter().filter(|(_, data)| !data.is_empty()) {
                let at = data.as_ptr() as usize - message.as_ptr() as usize;
                prop_assert_eq!(at + data.len(), last);
                last = at;
            }
            prop_assert!(last >= seen.len() * COMMAND_BYTES);
        }

        #[test]
        fn a_cut_list_gives_its_beginning(list in any_list(1), cut in 0usize..2000) {
            // Cut behind its first data, which is the end of a message where only lists were
            // agreed.
            let mut list = list;
            let first = list.iter().position(|(_, data)| !data.is_empty());
            list.truncate(first.map_or(LIST_MAX, |at| at + 1));
            let bytes = packed(&list);
            let cut = cut % bytes.len();
            for features in [LISTS, DATA] {
                let (seen, end) = commands(&bytes[..cut], features);
                prop_assert!(seen.iter().map(|(c, _)| c).eq(list[..seen.len()].iter().map(|(c, _)| c)));
                let without_data = list.len() - usize::from(first.is_some());
                if cut > 0 && cut.is_multiple_of(COMMAND_BYTES) && cut / COMMAND_BYTES <= without_data {
                    prop_assert_eq!((seen.len(), end), (cut / COMMAND_BYTES, None));
                } else {
                    prop_assert!(end.is_some(), "cut at {}", cut);
                }
            }
        }

        #[test]
        fn any_bytes_are_survived(
            bytes: Vec<u8>,
            len in 0usize..5000,
            lists in 0..3usize,
            lengths: [u8; LIST_MAX],
            near: bool,
        ) {
            let mut message = bytes;
            message.resize(len, 0);
            if near {
                // Mostly near-valid input.
                for ((capsule, tag), length) in message.chunks_exact_mut(COMMAND_BYTES).zip(0u16..).zip(lengths) {
                    let mut flush =
                        CommandCapsule::new(Opcode::Flush, Tag(tag % 129), Epoch(1), Sequence(1));
                    flush.in_capsule_bytes = u32::from(length.saturating_sub(200)) * 20;
                    capsule[..40].copy_from_slice(&flush.to_wire()[..40]);
                }
            }
            let most = if lists > 0 { LIST_MAX } else { 1 };
            let (seen, _) = commands(&message, [NONE, LISTS, DATA][lists]);
            prop_assert!(seen.len() <= most);
        }
    }
}
