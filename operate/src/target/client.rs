//! [`ask`]: the client of a target's control socket.

use std::io;
use std::path::Path;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::ask::{Ask, Response};

/// The longest response: the times of many volumes, in every bucket.
const ANSWER_MAX: u64 = 64 << 20;

/// Sends a command to a running target.
///
/// # Errors
/// No target answers there, or not in time.
pub async fn ask(path: &Path, ask: Ask) -> io::Result<Response> {
    let patience = ask.patience();
    let exchange = async {
        let mut stream = UnixStream::connect(path).await?;
        let mut text = serde_json::to_vec(&ask).map_err(io::Error::other)?;
        text.push(b'\n');
        stream.write_all(&text).await?;
        let mut answer = Vec::new();
        stream.take(ANSWER_MAX).read_to_end(&mut answer).await?;
        serde_json::from_slice(&answer).map_err(io::Error::other)
    };
    tokio::time::timeout(patience, exchange)
        .await
        .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "the target does not answer"))?
}
