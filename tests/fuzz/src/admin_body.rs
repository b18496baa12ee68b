//! Bodies of admin commands and their replies. An accepted body has one form in bytes.

use std::fmt::Debug;

use rblk_protocol::{
    AccessMode, AsyncEvent, BlockCount, BlockSize, DropRequest, Epoch, Generation, HostId,
    InstanceId, Join, LoginReply, LoginRequest, Name, OpenReply, OpenRequest, SessionId,
    VolumeEntry, VolumeFlags, VolumeHandle, VolumeListHeader, WriteVerifier,
};

/// Byte 0 selects the kind of body.
pub fn run(data: &[u8]) -> bool {
    let Some((kind, bytes)) = data.split_first() else { return false };
    match kind % 8 {
        0 => has_one_form(bytes, LoginRequest::from_wire, LoginRequest::to_wire),
        1 => has_one_form(bytes, LoginReply::from_wire, LoginReply::to_wire),
        2 => has_one_form(bytes, OpenRequest::from_wire, OpenRequest::to_wire),
        3 => has_one_form(bytes, OpenReply::from_wire, |reply: &OpenReply| {
            let size = reply.blocks.bytes(reply.block_size);
            assert!(size.is_some_and(|size| size > 0), "a capacity that does not fit");
            reply.to_wire()
        }),
        4 => has_one_form(bytes, VolumeListHeader::from_wire, VolumeListHeader::to_wire),
        5 => has_one_form(bytes, VolumeEntry::from_wire, |entry: &VolumeEntry| {
            let name = entry.name.to_string();
            assert!(!name.is_empty() && !name.contains(char::is_control), "a name for a terminal");
            entry.to_wire()
        }),
        6 => {
            let Some(number) = bytes.first_chunk() else { return false };
            let number = u32::from_le_bytes(*number);
            let event = AsyncEvent::from_wire(number);
            assert!(event.is_none_or(|event| event as u32 == number), "another event");
            event.is_some()
        }
        _ => has_one_form(bytes, DropRequest::from_wire, DropRequest::to_wire),
    }
}

fn has_one_form<T: Debug, const N: usize>(
    bytes: &[u8],
    parse: impl Fn(&[u8]) -> Result<T, &'static str>,
    write: impl Fn(&T) -> [u8; N],
) -> bool {
    let Ok(body) = parse(bytes) else { return false };
    // Any bytes may follow the end of a name, but a write always gives the second form.
    let wire = write(&body);
    let again = parse(&wire).expect("what was written");
    assert_eq!(write(&again), wire, "changed by a write: {body:?}");
    true
}

/// A body of each kind.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let name = Name::new("vol0").expect("a name");
    let (host, host_name) = (HostId([1; 16]), name);
    let login = LoginRequest { host, host_name, keep_alive_ms: 5000, join: None };
    let join = Join { beside: Epoch(2), ends: Some(Epoch(1)) };
    let joining = LoginRequest { join: Some(join), ..login };
    let dropped = DropRequest::new(&[Epoch(1), Epoch(3)]).expect("epochs");
    let login_reply = LoginReply {
        session: SessionId([2; 16]),
        epoch: Epoch(1),
        instance: InstanceId([3; 16]),
        queues_max: 64,
        target_name: name,
    };
    let (mode, take_over) = (AccessMode::Shared, true);
    let open = OpenRequest { name, mode, take_over, generation: Generation(7) };
    let (block_size, blocks) = (BlockSize::new(512).expect("a size"), BlockCount(100));
    let (flags, uuid) = (VolumeFlags::DISCARD, [4; 16]);
    let open_reply = OpenReply {
        handle: VolumeHandle(1),
        flags,
        block_size,
        blocks,
        discard_granularity_bytes: 4096,
        uuid,
        verifier: WriteVerifier([5; 16]),
        generation: Generation(7),
    };
    let entry = VolumeEntry { name, flags, block_size, blocks, uuid };
    vec![
        [&[0], &login.to_wire()[..]].concat(),
        [&[0], &joining.to_wire()[..]].concat(),
        [&[7], &dropped.to_wire()[..]].concat(),
        [&[1], &login_reply.to_wire()[..]].concat(),
        [&[2], &open.to_wire()[..]].concat(),
        [&[3], &open_reply.to_wire()[..]].concat(),
        [&[4], &VolumeListHeader { entries: 1, total: 1 }.to_wire()[..]].concat(),
        [&[5], &entry.to_wire()[..]].concat(),
        [&[6], &(AsyncEvent::Draining as u32).to_le_bytes()[..]].concat(),
    ]
}
