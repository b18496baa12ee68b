//! CRC-32C (Castagnoli; RFC 3720, appendix B.4) by the instructions of the CPU.
//!
//! | CPU | input below [`FOLD_MIN_BYTES`] | longer input |
//! |---|---|---|
//! | x86-64 with AVX-512F and VPCLMULQDQ | `CRC32` | folding in registers of 64 bytes |
//! | x86-64 with SSE4.2 | `CRC32` | `crc-fast` |
//! | every other, and Miri | `crc-fast` | `crc-fast` |
//!
//! `crc-fast` alone takes about 55 instructions of each call to choose its way, and most of its
//! calls here are for capsules of 16 and 64 bytes. This crate looks at the CPU once.

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86;

/// The CRC-32C of the bytes.
///
/// ```
/// assert_eq!(rblk_crc32c::crc32c(b"123456789"), 0xe306_9283);
/// ```
// Never inlined, so that callers stay small where they compute no CRC.
#[inline(never)]
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    extended(0, bytes)
}

/// The CRC-32C of earlier bytes, which have the CRC `crc`, and of `bytes` behind them. No bytes
/// have the CRC 0.
#[inline(never)]
#[must_use]
pub fn extend(crc: u32, bytes: &[u8]) -> u32 {
    extended(crc, bytes)
}

/// From how many bytes on input is folded.
pub const FOLD_MIN_BYTES: usize = 512;

#[inline(always)]
fn extended(crc: u32, bytes: &[u8]) -> u32 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if let Some(crc) = x86::extend(crc, bytes) {
        return crc;
    }
    by_crc_fast(crc, bytes)
}

#[cold]
#[inline(never)]
fn by_crc_fast(crc: u32, bytes: &[u8]) -> u32 {
    let algorithm = crc_fast::CrcAlgorithm::Crc32Iscsi;
    // The state of `crc-fast` is the CRC before its last inversion.
    let mut digest = crc_fast::Digest::new_with_init_state(algorithm, u64::from(!crc));
    digest.update(bytes);
    #[expect(clippy::cast_possible_truncation, reason = "a CRC of 32 bits")]
    {
        digest.finalize() as u32
    }
}

#[cfg(test)]
mod tests;
