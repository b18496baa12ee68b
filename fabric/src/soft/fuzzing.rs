//! Private parsers, opened to `tests/fuzz`.
//!
//! Each function returns whether the bytes were accepted. It panics when the parser breaks a
//! promise. The type of a stream that is a slice: it has the bytes, and then its end.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use super::wire::frame::{FrameHeader, HEADER};
use super::wire::tcp_handshake::{self, Acceptance, HandshakeReply};

/// The header of a frame. An accepted header has one form in bytes.
#[must_use]
pub fn frame_header(bytes: &[u8]) -> bool {
    let Some(bytes) = bytes.first_chunk::<HEADER>() else { return false };
    let Ok(header) = FrameHeader::decode(bytes) else { return false };
    assert_eq!(&header.encode(), bytes, "a header with two forms");
    true
}

/// The request that a peer sends before the frames.
#[must_use]
pub fn handshake_request(bytes: &[u8]) -> bool {
    let mut rest = bytes;
    let Ok(request) = at_once(tcp_handshake::read_request(&mut rest)) else { return false };
    let taken = &bytes[..bytes.len() - rest.len()];
    let again = tcp_handshake::encode_request(&request);
    assert_eq!(again.as_deref(), Some(taken), "a request with two forms");
    true
}

/// The reply that a peer sends before the frames.
#[must_use]
pub fn handshake_reply(bytes: &[u8]) -> bool {
    let mut rest = bytes;
    let Ok(reply) = at_once(tcp_handshake::read_reply(&mut rest)) else { return false };
    let taken = &bytes[..bytes.len() - rest.len()];
    let HandshakeReply { verdict, reads_in, reads_out, hello } = reply;
    let again = tcp_handshake::encode_reply(verdict, reads_out, reads_in, &hello);
    assert_eq!(again.as_deref(), Some(taken), "a reply with two forms");
    verdict == Acceptance::Accepted
}

/// The result of a future that has nothing to wait for.
fn at_once<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("it waits for more than its stream has"),
    }
}
