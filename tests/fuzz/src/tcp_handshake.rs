//! The handshake of `tcp://`, before the frames.

use rblk_fabric::soft::fuzzing::{handshake_reply, handshake_request};

/// Byte 0: request or reply.
pub fn run(data: &[u8]) -> bool {
    match data.split_first() {
        Some((kind, bytes)) if kind & 1 == 0 => handshake_request(bytes),
        Some((_, bytes)) => handshake_reply(bytes),
        None => false,
    }
}

/// A request and a reply.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let mut request = b"\0rblkSOFT\x01\0".to_vec();
    request.extend([16, 16, 0x88, 0x13, 0, 0, 4, 0, 0, 0]);
    request.extend(b"abcd");
    let mut reply = b"\x01rblkSOFT\x01\0".to_vec();
    reply.extend([1, 16, 16, 4, 0, 0]);
    reply.extend(b"abcd");
    vec![request, reply]
}
