//! The first bytes of a store, checked for a contradiction to the block size of its volume.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use rblk_config::image::{Contradiction, HEAD_BYTES, contradiction};
use rblk_protocol::width::wide64;

/// The contradiction of the image at a path, if it can be read. The path is a regular file or a
/// block device.
pub(crate) fn look(path: &Path, size_bytes: u64, block_size: u32) -> Option<Contradiction> {
    contradiction(&head(path).ok()?, size_bytes, block_size)
}

fn head(path: &Path) -> io::Result<Vec<u8>> {
    let mut head = Vec::with_capacity(HEAD_BYTES);
    File::open(path)?.take(wide64(HEAD_BYTES)).read_to_end(&mut head)?;
    Ok(head)
}
