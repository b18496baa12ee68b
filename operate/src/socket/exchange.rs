//! [`exchange`]: one question and its answer, as JSON, over a control socket.

use std::io;
use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// Asks the program at a socket. Takes an answer of at most `most` bytes.
///
/// # Errors
/// No program answers there, or not within `patience`. [`InvalidData`](io::ErrorKind::InvalidData):
/// an answer that this program cannot understand, as of another version.
pub(crate) async fn exchange<A: DeserializeOwned>(
    path: &Path,
    ask: &impl Serialize,
    most: u64,
    patience: Duration,
) -> io::Result<A> {
    let answer = async {
        let mut stream = UnixStream::connect(path).await?;
        let mut text = serde_json::to_vec(ask).map_err(io::Error::other)?;
        text.push(b'\n');
        stream.write_all(&text).await?;
        let mut answer = Vec::new();
        stream.take(most).read_to_end(&mut answer).await?;
        io::Result::Ok(answer)
    };
    let answer = tokio::time::timeout(patience, answer)
        .await
        .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "it does not answer"))??;
    serde_json::from_slice(&answer).map_err(|error| {
        // A cut answer is of a program that ended meanwhile, and says nothing of its version.
        let kind = match error.is_eof() {
            true => io::ErrorKind::UnexpectedEof,
            false => io::ErrorKind::InvalidData,
        };
        io::Error::new(kind, error)
    })
}
