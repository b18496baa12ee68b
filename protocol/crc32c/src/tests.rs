//! Each kernel by itself, where the CPU has it, against `crc-fast` and against the definition.

use proptest::prelude::*;

use super::*;

type Kernel = (&'static str, fn(u32, &[u8]) -> u32);

/// Every kernel that runs here. A CPU without one is told.
fn kernels() -> Vec<Kernel> {
    let mut kernels: Vec<Kernel> = vec![("the CPU's choice", extended), ("crc-fast", by_crc_fast)];
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        // SAFETY: this kernel is called only where the CPU has its features.
        let instruction: Kernel =
            ("CRC32", |crc, bytes| unsafe { x86::by_instruction(crc, bytes) });
        // SAFETY: so is this one.
        let folding: Kernel = ("folding", |crc, bytes| unsafe { x86::by_folding(crc, bytes) });
        let own = [(instruction, x86::has_crc32()), (folding, x86::has_folding())];
        for (kernel, is_there) in own {
            if is_there {
                kernels.push(kernel);
            } else {
                eprintln!("NOT TESTED: this CPU has no instructions for {}", kernel.0);
            }
        }
    }
    kernels
}

/// Bit by bit, as the polynomial is defined.
fn slow(crc: u32, bytes: &[u8]) -> u32 {
    let crc = bytes.iter().fold(!crc, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 }
        })
    });
    !crc
}

/// Bytes that repeat nowhere, the same in each run.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state.to_le_bytes()[7]
    };
    std::iter::repeat_with(next).take(len).collect()
}

#[test]
fn golden_values_of_rfc_3720() {
    let up: Vec<u8> = (0..32).collect();
    let down: Vec<u8> = (0..32).rev().collect();
    #[rustfmt::skip]
    let read_10 = [
        0x01, 0xc0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        0x14, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0x14, 0, 0, 0, 0x18,
        0x28, 0, 0, 0, 0, 0, 0, 0, 0x02, 0, 0, 0, 0, 0, 0, 0,
    ];
    let golden: [(&[u8], u32); 7] = [
        (&[], 0),
        (&[0; 32], 0x8a91_36aa),
        (&[0xff; 32], 0x62a8_ab43),
        (&up, 0x46dd_794e),
        (&down, 0x113f_db5c),
        (&read_10, 0xd996_3a56),
        (b"123456789", 0xe306_9283),
    ];
    for (name, kernel) in kernels() {
        for (bytes, crc) in golden {
            assert_eq!((kernel(0, bytes), slow(0, bytes)), (crc, crc), "{name}: {bytes:x?}");
        }
    }
}

/// Both sizes of capsules, and a field in either half of a word.
#[test]
fn a_capsule_has_the_crc_of_zeros_in_its_field() {
    fn check<const BYTES: usize, const AT: usize>() {
        let mut bytes = [0; BYTES];
        bytes.copy_from_slice(&noise(BYTES));
        let found = of_capsule::<BYTES, AT>(&bytes);
        bytes[AT..AT + 4].fill(0);
        assert_eq!(found, slow(0, &bytes), "{AT} of {BYTES} bytes");
        assert_eq!(of_capsule::<BYTES, AT>(&bytes), found, "the field counts");
    }
    check::<64, 32>();
    check::<64, 36>();
    check::<16, 4>();
    check::<8, 0>();
}

#[test]
fn two_words_have_the_crc_of_their_bytes() {
    let bytes = noise(16);
    let (words, _) = bytes.as_chunks();
    let words = [u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1])];
    assert_eq!(of_two_words(words), slow(0, &bytes));
}

#[test]
fn every_length_has_the_crc_of_crc_fast() {
    let most = if cfg!(miri) { 70 } else { 8192 };
    let bytes = noise(most + 64);
    for len in 0..=most {
        // Each length at an alignment of its own; the next test has each alignment.
        let bytes = &bytes[len % 64..][..len];
        let expected = by_crc_fast(0, bytes);
        for (name, kernel) in kernels() {
            assert_eq!(kernel(0, bytes), expected, "{name}: {len} bytes");
        }
    }
}

#[test]
fn every_alignment_has_the_crc_of_the_definition() {
    let bytes = noise(4096 + 128);
    for at in 0..if cfg!(miri) { 2 } else { 64 } {
        for len in [1, 15, 16, 64, 511, 512, 513, 1023, 1024, 4096] {
            let bytes = &bytes[at..][..len];
            let expected = slow(0, bytes);
            for (name, kernel) in kernels() {
                assert_eq!(kernel(0, bytes), expected, "{name}: {len} bytes at {at}");
            }
        }
    }
}

/// A fold loses no single bit: each of an input of several rounds changes the CRC.
#[cfg(not(miri))]
#[test]
fn every_bit_counts() {
    let mut bytes = noise(1600);
    for (name, kernel) in kernels() {
        let whole = kernel(0, &bytes);
        for bit in 0..bytes.len() * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(kernel(0, &bytes), whole, "{name}: bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn pieces_have_the_crc_of_the_whole(
        bytes in proptest::collection::vec(any::<u8>(), 0..if cfg!(miri) { 80 } else { 9000 }),
        before: u32,
        cuts: [usize; 2],
    ) {
        let mut cuts = cuts.map(|cut| cut % (bytes.len() + 1));
        cuts.sort_unstable();
        let pieces = [&bytes[..cuts[0]], &bytes[cuts[0]..cuts[1]], &bytes[cuts[1]..]];
        let expected = slow(before, &bytes);
        for (name, kernel) in kernels() {
            prop_assert_eq!(kernel(before, &bytes), expected, "{}", name);
            let of_pieces = pieces.iter().fold(before, |crc, piece| kernel(crc, piece));
            prop_assert_eq!(of_pieces, expected, "{} in pieces", name);
        }
    }
}
