//! Kernels for x86-64: the instruction `CRC32` of SSE4.2, and folding by carry-less multiplication
//! in registers of 512 bits.
//!
//! Folding is that of V. Gopal and others, "Fast CRC Computation for Generic Polynomials Using
//! PCLMULQDQ Instruction", Intel, 2009. Bytes are a polynomial over GF(2), the first bit the
//! highest. Its remainder by the polynomial P of the CRC stays the same if a piece of it that is D
//! bits ahead of another is taken away, multiplied by x^D mod P, and added to the other. A piece is
//! 128 bits: two halves of 64, each times a constant of its own.
//!
//! The constants. Bit i of a half is x^(63 - i), bit i of a product is x^(127 - i), and a product
//! of bits i and j is bit i + j. So the instruction yields the product of two halves times x, and a
//! constant is one power less: x^(D - 1) mod P for the second half of a piece, and x^(D + 63) mod P
//! for the first half, which is 64 bits further ahead. [`x_to`] computes them when this is
//! compiled.

use std::arch::is_x86_feature_detected;
use std::arch::x86_64::{
    __m128i, __m512i, _mm_crc32_u8, _mm_crc32_u64, _mm_cvtsi32_si128, _mm_cvtsi128_si64,
    _mm_extract_epi64, _mm_xor_si128, _mm512_castsi512_si128, _mm512_clmulepi64_epi128,
    _mm512_extracti32x4_epi32, _mm512_loadu_si512, _mm512_set_epi64, _mm512_ternarylogic_epi64,
    _mm512_xor_si512, _mm512_zextsi128_si512,
};
use std::sync::atomic::{AtomicU8, Ordering};

use crate::FOLD_MIN_BYTES;

/// The instruction sets of the CPU; each includes those below it.
const UNKNOWN: u8 = 0;
const NEITHER: u8 = 1;
const CRC32: u8 = 2;
const FOLDING: u8 = 3;

static CPU: AtomicU8 = AtomicU8::new(UNKNOWN);

/// The CRC of earlier bytes and of `bytes`, if the CPU is known to have instructions for this
/// length.
#[inline(always)]
pub(super) fn extend(crc: u32, bytes: &[u8]) -> Option<u32> {
    if bytes.len() < FOLD_MIN_BYTES {
        // SAFETY: `look` found SSE4.2.
        (cpu() >= CRC32).then(|| unsafe { by_instruction(crc, bytes) })
    } else {
        // SAFETY: `look` found the features that the function names.
        (cpu() == FOLDING).then(|| unsafe { by_folding(crc, bytes) })
    }
}

/// The CRC of a capsule with zeros at `AT`, if the CPU is known to have `CRC32`.
#[inline(always)]
pub(super) fn of_capsule<const BYTES: usize, const AT: usize>(bytes: &[u8; BYTES]) -> Option<u32> {
    // SAFETY: `look` found SSE4.2.
    (cpu() >= CRC32).then(|| unsafe { capsule_by_instruction::<BYTES, AT>(bytes) })
}

/// The CRC of two words of eight bytes, if the CPU is known to have `CRC32`.
#[inline(always)]
pub(super) fn of_two_words(words: [u64; 2]) -> Option<u32> {
    // SAFETY: `look` found SSE4.2.
    (cpu() >= CRC32).then(|| unsafe { words_by_instruction(words) })
}

/// The instruction set of this CPU.
#[inline(always)]
fn cpu() -> u8 {
    CPU.load(Ordering::Relaxed)
}

/// Detects and stores the instruction set; false if it was known. Concurrent threads store one
/// value.
pub(super) fn look() -> bool {
    if cpu() != UNKNOWN {
        return false;
    }
    let cpu = if has_folding() {
        FOLDING
    } else if has_crc32() {
        CRC32
    } else {
        NEITHER
    };
    CPU.store(cpu, Ordering::Relaxed);
    true
}

pub(super) fn has_crc32() -> bool {
    is_x86_feature_detected!("sse4.2")
}

pub(super) fn has_folding() -> bool {
    has_crc32() && is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("vpclmulqdq")
}

/// By `CRC32`, eight bytes each. For any length; at its best for short ones, as each instruction
/// waits for the one before.
#[target_feature(enable = "sse4.2")]
pub(super) fn by_instruction(crc: u32, bytes: &[u8]) -> u32 {
    let mut state = !crc;
    let (lines, rest) = bytes.as_chunks();
    for line in lines {
        state = low(exactly::<64>(state, line));
    }
    let (words, rest) = rest.as_chunks();
    for word in words {
        state = low(exactly::<8>(state, word));
    }
    for byte in rest {
        state = _mm_crc32_u8(state, *byte);
    }
    !state
}

/// By `CRC32`.
#[target_feature(enable = "sse4.2")]
fn words_by_instruction([first, second]: [u64; 2]) -> u32 {
    !low(_mm_crc32_u64(_mm_crc32_u64(u64::from(!0_u32), first), second))
}

/// By `CRC32`, without a loop.
#[target_feature(enable = "sse4.2")]
fn capsule_by_instruction<const BYTES: usize, const AT: usize>(bytes: &[u8; BYTES]) -> u32 {
    let mut state = u64::from(!0_u32);
    for (at, word) in bytes.as_chunks().0.iter().enumerate() {
        let word = u64::from_le_bytes(*word);
        let kept = match AT % 8 {
            0 => word >> 32 << 32,
            _ => word & u64::from(u32::MAX),
        };
        state = _mm_crc32_u64(state, if at == AT / 8 { kept } else { word });
    }
    !low(state)
}

/// The state after `bytes`, whole words of eight. The state is the CRC before its last inversion.
#[target_feature(enable = "sse4.2")]
#[inline]
fn exactly<const BYTES: usize>(state: u32, bytes: &[u8; BYTES]) -> u64 {
    let mut state = u64::from(state);
    for word in bytes.as_chunks().0 {
        state = _mm_crc32_u64(state, u64::from_le_bytes(*word));
    }
    state
}

/// `_mm_crc32_u64` leaves the upper half zero.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the upper half is zero")]
fn low(state: u64) -> u32 {
    state as u32
}

/// Bytes of one round: a line for each of the eight accumulators, as many as hide the latency of
/// the multiplication.
const ROUND: usize = 8 * 64;
const LINE_BITS: u64 = 512;
const _: () = assert!(ROUND <= FOLD_MIN_BYTES, "the first round has all its bytes");

/// A block of 4 KiB, which most data is.
const PAGE: usize = 4096;

/// By folding; input of less than a round by `CRC32`.
#[target_feature(enable = "avx512f,vpclmulqdq,sse4.2")]
pub(super) fn by_folding(crc: u32, bytes: &[u8]) -> u32 {
    if let Ok(page) = bytes.try_into() {
        return of_page(crc, page);
    }
    let (rounds, rest) = bytes.as_chunks();
    let Some((first, rounds)) = rounds.split_first() else {
        return by_instruction(crc, bytes);
    };
    let crc = of_rounds(crc, first, rounds);
    if rest.is_empty() { crc } else { by_instruction(crc, rest) }
}

/// The CRC of a page. The compiler knows how many rounds there are, and makes no loop.
#[target_feature(enable = "avx512f,vpclmulqdq,sse4.2")]
#[inline]
fn of_page(crc: u32, page: &[u8; PAGE]) -> u32 {
    let (first, rounds) = const { (ROUND, (PAGE - ROUND) / ROUND) };
    let (first, rest) = page.split_at(first);
    let [(first, _), (rest, _)] = [first.as_chunks::<ROUND>(), rest.as_chunks()];
    of_rounds(crc, &first[0], &rest[..rounds])
}

/// The CRC of whole rounds.
#[target_feature(enable = "avx512f,vpclmulqdq,sse4.2")]
#[inline]
fn of_rounds(crc: u32, first: &[u8; ROUND], rounds: &[[u8; ROUND]]) -> u32 {
    let mut sums = lines(first);
    // The state of earlier bytes is added to the first 32 bits.
    let before = _mm512_zextsi128_si512(_mm_cvtsi32_si128((!crc).cast_signed()));
    sums[0] = _mm512_xor_si512(sums[0], before);
    let ahead = each_piece(const { pair(8 * LINE_BITS) });
    for round in rounds {
        sums = after_round(sums, ahead, round);
    }
    let [a, b, c, d, e, f, g, h] = sums;
    let ahead = each_piece(const { pair(4 * LINE_BITS) });
    let [a, b] = [folded(a, ahead, e), folded(b, ahead, f)];
    let [c, d] = [folded(c, ahead, g), folded(d, ahead, h)];
    let ahead = each_piece(const { pair(2 * LINE_BITS) });
    let [a, b] = [folded(a, ahead, c), folded(b, ahead, d)];
    let last = last_piece(folded(a, each_piece(const { pair(LINE_BITS) }), b));
    // The fold reduces all bytes to 16 bytes with an equal remainder.
    let state = _mm_crc32_u64(0, _mm_cvtsi128_si64(last).cast_unsigned());
    !low(_mm_crc32_u64(state, _mm_extract_epi64::<1>(last).cast_unsigned()))
}

/// The lines of 64 bytes of a round.
#[target_feature(enable = "avx512f")]
#[inline]
fn lines(round: &[u8; ROUND]) -> [__m512i; 8] {
    let lines = round.as_chunks::<64>().0;
    [
        line(&lines[0]),
        line(&lines[1]),
        line(&lines[2]),
        line(&lines[3]),
        line(&lines[4]),
        line(&lines[5]),
        line(&lines[6]),
        line(&lines[7]),
    ]
}

/// The lines of a round, after the previous lines are folded onto them.
// The lines are named one by one: the compiler keeps an array with a variable index, or one that
// `from_fn` makes, on the stack.
#[target_feature(enable = "avx512f,vpclmulqdq")]
#[inline]
fn after_round(sums: [__m512i; 8], ahead: __m512i, round: &[u8; ROUND]) -> [__m512i; 8] {
    let [a, b, c, d, e, f, g, h] = sums;
    let to = lines(round);
    [
        folded(a, ahead, to[0]),
        folded(b, ahead, to[1]),
        folded(c, ahead, to[2]),
        folded(d, ahead, to[3]),
        folded(e, ahead, to[4]),
        folded(f, ahead, to[5]),
        folded(g, ahead, to[6]),
        folded(h, ahead, to[7]),
    ]
}

/// Any 64 bytes.
#[target_feature(enable = "avx512f")]
#[inline]
fn line(bytes: &[u8; 64]) -> __m512i {
    // SAFETY: there are the 64 bytes that are read, and they may have any alignment.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

/// `to`, with four pieces of `from` folded onto it.
#[target_feature(enable = "avx512f,vpclmulqdq")]
#[inline]
fn folded(from: __m512i, ahead: __m512i, to: __m512i) -> __m512i {
    let first = _mm512_clmulepi64_epi128::<0x00>(from, ahead);
    let second = _mm512_clmulepi64_epi128::<0x11>(from, ahead);
    // 0x96 is the sum of all three.
    _mm512_ternarylogic_epi64::<0x96>(first, second, to)
}

/// Three of the four pieces folded onto the last.
#[target_feature(enable = "avx512f,vpclmulqdq")]
#[inline]
fn last_piece(line: __m512i) -> __m128i {
    let [[a, b], [c, d], [e, f]] = const { [pair(384), pair(256), pair(128)] };
    let ahead = _mm512_set_epi64(0, 0, f, e, d, c, b, a);
    let last = _mm512_extracti32x4_epi32::<3>(line);
    let sums = folded(line, ahead, _mm512_zextsi128_si512(last));
    let two = _mm_xor_si128(_mm512_castsi512_si128(sums), _mm512_extracti32x4_epi32::<1>(sums));
    _mm_xor_si128(two, _mm512_extracti32x4_epi32::<2>(sums))
}

/// The constants of a distance, for each piece of a line.
#[target_feature(enable = "avx512f")]
#[inline]
fn each_piece([a, b]: [i64; 2]) -> __m512i {
    _mm512_set_epi64(b, a, b, a, b, a, b, a)
}

/// The constants of both halves of a piece that is folded onto another so many bits behind it.
const fn pair(distance: u64) -> [i64; 2] {
    [x_to(distance + 63), x_to(distance - 1)]
}

/// x^n mod P, the highest bit the coefficient of 1, in the upper half of a constant.
const fn x_to(n: u64) -> i64 {
    let (mut power, mut at) = (1_u32 << 31, 0);
    while at < n {
        power = if power & 1 == 1 { power >> 1 ^ 0x82f6_3b78 } else { power >> 1 };
        at += 1;
    }
    ((power as u64) << 32).cast_signed()
}
