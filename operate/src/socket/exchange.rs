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
    // An empty answer is of a program that ended meanwhile.
    if answer.is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    serde_json::from_slice(&answer)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}
