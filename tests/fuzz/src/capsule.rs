//! Commands and responses, alone and in lists. Every byte of an accepted message belongs to one
//! capsule or to the data of one command.

use rblk_protocol::limits::{COMMAND_BYTES, LIST_MAX, RESPONSE_BYTES};
use rblk_protocol::{
    BlockCount, CapsuleError, CommandCapsule, CommandList, Epoch, Features, Immediate,
    KeyedDescriptor, Lba, Opcode, QueueDepth, ResponseCapsule, ResponseList, Sequence, Status, Tag,
    VolumeHandle,
};

use crate::Input;

/// Byte 0: commands or responses, and the features. Bytes 1 and 2: the queue depth. Then the
/// message.
pub fn run(data: &[u8]) -> bool {
    let mut input = Input::new(data);
    let (kind, depth) = (input.u8(), input.u16());
    let Some(depth) = QueueDepth::new(depth) else { return false };
    let message = input.bytes(usize::MAX);
    if kind & 1 == 0 {
        commands(message, Features(u32::from(kind >> 1)), depth)
    } else {
        responses(message, kind & 2 != 0, depth)
    }
}

fn commands(message: &[u8], features: Features, depth: QueueDepth) -> bool {
    let Ok(len) = u32::try_from(message.len()) else { return false };
    let mut list = CommandList::new(len, features, depth);
    let data_first = features.has(Features::DATA_FIRST);
    let (mut taken, mut count) = (0, 0);
    let read = |at| message[at..at + COMMAND_BYTES].try_into().expect("as many");
    while let Some(command) = list.take(read) {
        let Ok(command) = command else {
            assert!(list.take(|_| panic!("read")).is_none(), "a command behind an error");
            return false;
        };
        let (wire, data_bytes) = (command.to_wire(), command.in_capsule_bytes as usize);
        let capsules = (count + 1) * COMMAND_BYTES;
        let at = if data_first { message.len() - capsules } else { capsules - COMMAND_BYTES };
        assert_eq!(wire, message[at..][..COMMAND_BYTES], "two forms");
        if data_bytes > 0 {
            let from = list.data_offset(&command);
            let room = if data_first { 0..at } else { capsules..message.len() };
            assert!(from >= room.start && from + data_bytes <= room.end, "data over a capsule");
        }
        let alone = CommandCapsule::from_wire(&wire, COMMAND_BYTES + data_bytes, depth);
        assert_eq!(alone, Ok(command), "another command when it is alone");
        assert!(command.tag <= depth.connection_tag(), "a tag beyond the depth");
        count += 1;
        taken += COMMAND_BYTES + data_bytes;
    }
    assert_eq!(taken, message.len(), "bytes that belong to no command");
    assert!((1..=LIST_MAX).contains(&count), "{count} commands");
    true
}

fn responses(message: &[u8], lists: bool, depth: QueueDepth) -> bool {
    // The first four bytes as an immediate.
    if let Some(bits) = message.first_chunk().map(|bits| u32::from_le_bytes(*bits)) {
        assert_eq!(Immediate::from_bits(bits).to_bits(), bits, "an immediate with two forms");
    }
    let Ok(mut list) = ResponseList::new(message.len(), lists, depth) else { return false };
    let mut at = 0;
    while let Some(response) = list.take(|from, one| {
        assert_eq!(from, at, "responses are one behind the other");
        one.copy_from_slice(&message[from..from + RESPONSE_BYTES]);
    }) {
        let Ok(response) = response else {
            assert!(list.take(|_, _| ()).is_none(), "a response behind an error");
            return false;
        };
        let again: Result<_, CapsuleError> =
            ResponseCapsule::from_wire(&response.to_wire(), RESPONSE_BYTES, depth);
        assert_eq!(again, Ok(response), "changed by a write");
        assert!(response.tag <= depth.connection_tag(), "a tag beyond the depth");
        at += RESPONSE_BYTES;
    }
    assert_eq!(at, message.len(), "bytes that belong to no response");
    true
}

/// A command of each kind, and lists.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let depth = 16u16.to_le_bytes();
    let command = |opcode, tag| {
        let mut command = CommandCapsule::new(opcode, Tag(tag), Epoch(1), Sequence(tag.into()));
        command.volume = VolumeHandle(1);
        (command.lba, command.count) = (Lba(8), BlockCount(1));
        command
    };
    let mut read = command(Opcode::Read, 1);
    read.buffer = Some(KeyedDescriptor { address: 0x1000, length: 512, rkey: 7 });
    let mut write = command(Opcode::Write, 2);
    write.in_capsule_bytes = 512;
    let responses = [Status::Ok, Status::StoreError]
        .map(|status| ResponseCapsule::new(Tag(1), Sequence(9), status).to_wire());
    let (read, write, data) = (read.to_wire(), write.to_wire(), [0xdd; 512]);
    let with = |kind: u8, parts: &[&[u8]]| [&[kind][..], &depth, &parts.concat()].concat();
    vec![
        with(0, &[&read]),
        with(0, &[&write, &data]),
        with(8, &[&read, &write, &data]),
        with(24, &[&write, &read, &write, &data, &data]),
        with(1, &[&responses[0]]),
        with(3, &[&responses[0], &responses[1]]),
    ]
}
