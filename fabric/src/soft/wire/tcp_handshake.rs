//! The handshake of a TCP connection, before the frames: one request, one reply.
//!
//! | request | reply | |
//! |---|---|---|
//! | 0..8 | 0..8 | magic |
//! | 8..10 | 8..10 | version |
//! | | 10 | verdict |
//! | 10 | 11 | READs the sender serves |
//! | 11 | 12 | READs the sender wants outstanding |
//! | 12..16 | | detection time in ms |
//! | 16 | 13 | length of the hello, which follows |
//! | 17..20 | 14..16 | reserved, zero |

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use nix::sys::socket::{setsockopt, sockopt};
use rblk_protocol::width::{narrow, wide64};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::connect::ConnectionHello;
use crate::error::{FabricError, Result};

const MAGIC: [u8; 8] = *b"rblkSOFT";
const VERSION: u16 = 1;
const REQUEST: usize = 20;
const REPLY: usize = 16;

/// The acceptor's answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::soft) enum Acceptance {
    Accepted,
    Rejected,
}

/// A parsed request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::soft) struct ConnectRequest {
    pub(in crate::soft) reads_in: u8,
    pub(in crate::soft) reads_out: u8,
    pub(in crate::soft) detect: Duration,
    pub(in crate::soft) hello: ConnectionHello,
}

/// A parsed reply.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::soft) struct HandshakeReply {
    pub(in crate::soft) verdict: Acceptance,
    pub(in crate::soft) reads_in: u8,
    pub(in crate::soft) reads_out: u8,
    pub(in crate::soft) hello: ConnectionHello,
}

/// `None` when the hello is too long.
pub(in crate::soft) fn encode_request(request: &ConnectRequest) -> Option<Vec<u8>> {
    let hello = &request.hello.0;
    let len =
        u8::try_from(hello.len()).ok().filter(|_| hello.len() <= ConnectionHello::REQUEST_MAX)?;
    let detect = u32::try_from(request.detect.as_millis()).unwrap_or(u32::MAX);
    let mut bytes = Vec::with_capacity(REQUEST + hello.len());
    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend([request.reads_in, request.reads_out]);
    bytes.extend(detect.to_le_bytes());
    bytes.extend([len, 0, 0, 0]);
    bytes.extend(hello);
    Some(bytes)
}

/// `None` when the hello is too long.
pub(in crate::soft) fn encode_reply(
    verdict: Acceptance,
    reads_out: u8,
    reads_in: u8,
    hello: &ConnectionHello,
) -> Option<Vec<u8>> {
    let hello = &hello.0;
    let len =
        u8::try_from(hello.len()).ok().filter(|_| hello.len() <= ConnectionHello::REPLY_MAX)?;
    let verdict = match verdict {
        Acceptance::Accepted => 1,
        Acceptance::Rejected => 2,
    };
    let mut bytes = Vec::with_capacity(REPLY + hello.len());
    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend([verdict, reads_in, reads_out, len, 0, 0]);
    bytes.extend(hello);
    Some(bytes)
}

/// Why a handshake failed.
#[derive(Debug)]
pub(in crate::soft) enum HandshakeFailure {
    /// The connection ended before the peer sent a byte.
    Silence(io::Error),
    /// Not our protocol.
    Foreign(String),
}

/// Reads exactly `N` bytes that begin with magic and version, and no more: the bytes behind them
/// belong to the frames. A foreign protocol is detected at its first wrong byte, without waiting
/// for more.
async fn read_fixed<const N: usize>(
    stream: &mut (impl AsyncRead + Unpin),
) -> std::result::Result<[u8; N], HandshakeFailure> {
    let mut bytes = [0; N];
    let mut have = 0;
    while have < N {
        let got = match stream.read(&mut bytes[have..]).await {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            other => other,
        };
        match got {
            Ok(got) => have += got,
            Err(error) if have == 0 => return Err(HandshakeFailure::Silence(error)),
            Err(error) => {
                return Err(HandshakeFailure::Foreign(format!(
                    "it stopped in the middle: {error}"
                )));
            }
        }
        let seen = have.min(MAGIC.len());
        if bytes[..seen] != MAGIC[..seen] {
            let what = String::from_utf8_lossy(&bytes[..have]);
            return Err(HandshakeFailure::Foreign(format!("it said {:?}", what.trim_end())));
        }
    }
    let version = u16::from_le_bytes([bytes[8], bytes[9]]);
    if version != VERSION {
        return Err(HandshakeFailure::Foreign(format!(
            "its framing has version {version}, this build has {VERSION}: install the same release on both hosts"
        )));
    }
    Ok(bytes)
}

async fn read_hello(
    stream: &mut (impl AsyncRead + Unpin),
    len: u8,
    most: usize,
) -> std::result::Result<ConnectionHello, HandshakeFailure> {
    let len = usize::from(len);
    if len > most {
        return Err(HandshakeFailure::Foreign(format!(
            "its hello has {len} bytes, the limit is {most}"
        )));
    }
    let mut hello = vec![0; len];
    stream
        .read_exact(&mut hello)
        .await
        .map_err(|e| HandshakeFailure::Foreign(format!("its hello is incomplete: {e}")))?;
    Ok(ConnectionHello(hello))
}

/// Reads a peer's request.
pub(in crate::soft) async fn read_request(
    stream: &mut (impl AsyncRead + Unpin),
) -> std::result::Result<ConnectRequest, HandshakeFailure> {
    let bytes: [u8; REQUEST] = read_fixed(stream).await?;
    if bytes[17..] != [0; 3] {
        return Err(HandshakeFailure::Foreign("reserved bytes are not zero".to_owned()));
    }
    let detect = u32::from_le_bytes([bytes[12], bytes[13], bytes[14], bytes[15]]);
    let hello = read_hello(stream, bytes[16], ConnectionHello::REQUEST_MAX).await?;
    Ok(ConnectRequest {
        reads_in: bytes[10],
        reads_out: bytes[11],
        detect: Duration::from_millis(detect.into()),
        hello,
    })
}

/// Reads the acceptor's reply.
pub(in crate::soft) async fn read_reply(
    stream: &mut (impl AsyncRead + Unpin),
) -> std::result::Result<HandshakeReply, HandshakeFailure> {
    let bytes: [u8; REPLY] = read_fixed(stream).await?;
    let verdict = match bytes[10] {
        1 => Acceptance::Accepted,
        2 => Acceptance::Rejected,
        other => return Err(HandshakeFailure::Foreign(format!("unknown verdict {other}"))),
    };
    if bytes[14..] != [0; 2] {
        return Err(HandshakeFailure::Foreign("reserved bytes are not zero".to_owned()));
    }
    let hello = read_hello(stream, bytes[13], ConnectionHello::REPLY_MAX).await?;
    Ok(HandshakeReply { verdict, reads_in: bytes[11], reads_out: bytes[12], hello })
}

/// Sends a request.
pub(in crate::soft) async fn write_request(
    stream: &mut TcpStream,
    request: &ConnectRequest,
) -> Result<()> {
    let bytes = encode_request(request).ok_or_else(|| hello_too_long(&request.hello))?;
    stream.write_all(&bytes).await.map_err(|source| FabricError::Call { call: "send", source })
}

pub(in crate::soft) fn hello_too_long(hello: &ConnectionHello) -> FabricError {
    FabricError::Limit {
        device: "soft".to_owned(),
        what: "hello bytes",
        limit: wide64(ConnectionHello::REQUEST_MAX),
        asked: wide64(hello.0.len()),
    }
}

/// Sets the options of the socket: no delay, and a dead path is detected within about `detect`,
/// whether bytes are in flight or not.
pub(in crate::soft) fn tune(stream: &TcpStream, detect: Duration) -> io::Result<()> {
    let detect = detect.clamp(Duration::from_secs(1), Duration::from_secs(120));
    // At most 120 s.
    let millis: u32 = narrow(detect.as_millis());
    let interval = narrow::<u32, _>(detect.as_secs() / 3).max(1);
    stream.set_nodelay(true)?;
    let fd = stream.as_fd();
    setsockopt(&fd, sockopt::KeepAlive, &true)?;
    setsockopt(&fd, sockopt::TcpKeepIdle, &interval)?;
    setsockopt(&fd, sockopt::TcpKeepInterval, &interval)?;
    setsockopt(&fd, sockopt::TcpKeepCount, &3)?;
    setsockopt(&fd, sockopt::TcpUserTimeout, &millis)?;
    Ok(())
}

/// Sets the type of service of a socket and of the connections it accepts. A socket of IPv6 may
/// speak to peers of IPv4, and has both.
pub(in crate::soft) fn set_tos(socket: &impl AsFd, tos: Option<u8>) {
    let Some(tos) = tos else { return };
    let v6 = setsockopt(socket, sockopt::Ipv6TClass, &i32::from(tos));
    let v4 = setsockopt(socket, sockopt::Ipv4Tos, &i32::from(tos));
    if let (Err(_), Err(error)) = (v6, v4) {
        tracing::warn!(tos, %error, "the type of service cannot be set");
    }
}
