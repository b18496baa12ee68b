//! CRC-32C (Castagnoli; RFC 3720, appendix B.4) by the instructions of the CPU.
//!
//! | CPU | input below [`FOLD_MIN_BYTES`] | longer input |
//! |---|---|---|
//! | x86-64 with AVX-512F and VPCLMULQDQ | `CRC32` | folding in registers of 64 bytes |
//! | x86-64 with SSE4.2 | `CRC32` | `crc-fast` |
//! | every other, and Miri | `crc-fast` | `crc-fast` |
//!
//! `crc-fast` alone takes about 55 instructions of each call to choose its way, and most of its
//! calls here are for capsules of 64 and 16 bytes, which have ways of their own ([`of_capsule`],
//! [`of_two_words`]). This crate looks at the CPU once.

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

/// The CRC-32C of a capsule, the four bytes at `AT` taken as zero: they are where it goes.
///
/// ```
/// let capsule = *b"a capsule of 24 bytes...";
/// let mut zeroed = capsule;
/// zeroed[12..16].fill(0);
/// assert_eq!(rblk_crc32c::of_capsule::<24, 12>(&capsule), rblk_crc32c::crc32c(&zeroed));
/// ```
///
/// A capsule is whole words of eight bytes, and `AT` is a multiple of four: else it does not
/// compile.
#[inline(always)]
#[must_use]
pub fn of_capsule<const BYTES: usize, const AT: usize>(bytes: &[u8; BYTES]) -> u32 {
    const { assert!(BYTES.is_multiple_of(8) && AT.is_multiple_of(4) && AT + 4 <= BYTES) }
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if let Some(crc) = x86::of_capsule::<BYTES, AT>(bytes) {
        return crc;
    }
    capsule_otherwise::<BYTES, AT>(bytes)
}

/// The CRC-32C of the 16 bytes of two words, the lowest byte of each first.
///
/// ```
/// let words = [*b"two word", *b"s, in 16"].map(u64::from_le_bytes);
/// assert_eq!(rblk_crc32c::of_two_words(words), rblk_crc32c::crc32c(b"two words, in 16"));
/// ```
#[inline(always)]
#[must_use]
pub fn of_two_words(words: [u64; 2]) -> u32 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if let Some(crc) = x86::of_two_words(words) {
        return crc;
    }
    words_otherwise(words)
}

/// From how many bytes on input is folded.
pub const FOLD_MIN_BYTES: usize = 512;

#[inline(always)]
fn extended(crc: u32, bytes: &[u8]) -> u32 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if let Some(crc) = x86::extend(crc, bytes) {
        return crc;
    }
    otherwise(crc, bytes)
}

// The rest is out of line, and called where a function ends, so that the functions above it keep
// nothing on the stack.

/// For a CPU that was not looked at yet, or has no instructions.
#[cold]
#[inline(never)]
fn otherwise(crc: u32, bytes: &[u8]) -> u32 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if x86::look() {
        return extended(crc, bytes);
    }
    by_crc_fast(crc, bytes)
}

#[cold]
#[inline(never)]
fn capsule_otherwise<const BYTES: usize, const AT: usize>(bytes: &[u8; BYTES]) -> u32 {
    let mut zeroed = *bytes;
    zeroed[AT..AT + 4].fill(0);
    extended(0, &zeroed)
}

#[cold]
#[inline(never)]
fn words_otherwise([first, second]: [u64; 2]) -> u32 {
    extended(0, &(u128::from(first) | u128::from(second) << 64).to_le_bytes())
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
