//! Pieces of memory for a call into a link: where the bytes of an SGE list are.

use rblk_protocol::width::wide;

use crate::soft::keys::KeyTable;
use crate::work::{MAX_SGE, Sge, SgeList};

/// A piece of no bytes.
pub(in crate::soft) const NO_PIECE: libc::iovec =
    libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

/// Finds the bytes `skip..skip + limit` of an SGE list. Returns how many pieces they are, or `None`
/// when a key, a bound or a right is bad. The pieces are valid while the table is borrowed.
pub(in crate::soft) fn local_pieces(
    keys: &KeyTable,
    sges: &SgeList,
    mut skip: u32,
    mut limit: u32,
    write: bool,
    out: &mut [libc::iovec; MAX_SGE],
) -> Option<usize> {
    let mut count = 0;
    for sge in sges.as_slice() {
        if skip >= sge.len {
            skip -= sge.len;
            continue;
        }
        let len = (sge.len - skip).min(limit);
        if len == 0 {
            break;
        }
        let part = Sge { addr: sge.addr.checked_add(u64::from(skip))?, len, lkey: sge.lkey };
        let at = keys.local(part, write)?;
        out[count] = libc::iovec { iov_base: at.as_ptr().cast(), iov_len: wide(len) };
        count += 1;
        limit -= len;
        skip = 0;
    }
    Some(count)
}
