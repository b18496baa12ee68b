//! A client of HTTP/1.1 that asks once. [`exchange`] sends bytes that no client would send.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};

use crate::program::DEADLINE;

/// An answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Answer {
    /// The status.
    pub status: u16,
    /// The lines of the head, in small letters.
    pub head: String,
    /// The body.
    pub body: String,
}

/// Asks a server of this host for a path.
///
/// # Panics
/// The server does not answer.
#[must_use]
pub fn get(port: u16, path: &str) -> Answer {
    request(port, "GET", path, &format!("127.0.0.1:{port}"))
}

/// Asks by another method, or under another name of the host.
///
/// # Panics
/// The server does not answer.
#[must_use]
pub fn request(port: u16, method: &str, path: &str, host: &str) -> Answer {
    let text = format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    let said = exchange(port, text.as_bytes());
    parse(&said).unwrap_or_else(|| panic!("{method} {path}: {said:?}"))
}

/// Sends bytes, and returns all that comes back until the server ends the connection.
///
/// # Panics
/// The server does not take the connection, or does not end it in time.
#[must_use]
pub fn exchange(port: u16, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect("a connection");
    stream.set_read_timeout(Some(3 * DEADLINE)).expect("a deadline");
    // A server that has refused already may reset the connection.
    let _ = stream.write_all(bytes);
    let mut said = Vec::new();
    match stream.read_to_end(&mut said) {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        Err(error) => panic!("the connection does not end: {error}"),
    }
    String::from_utf8_lossy(&said).into_owned()
}

fn parse(said: &str) -> Option<Answer> {
    let (head, body) = said.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(Answer { status, head: head.to_ascii_lowercase(), body: body.to_owned() })
}
