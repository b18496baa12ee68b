//! Both engines against a model: any ops, with any memory.

use std::fs;

use proptest::prelude::*;

use super::*;

pub(super) const BLOCKS: usize = 96;

#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Read,
    Write { fua: bool, seed: u8 },
    Flush,
    Discard,
    WriteZeroes { may_unmap: bool },
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![
        4 => Just(Kind::Read),
        4 => (any::<bool>(), any::<u8>()).prop_map(|(fua, seed)| Kind::Write { fua, seed }),
        1 => Just(Kind::Flush),
        1 => Just(Kind::Discard),
        1 => any::<bool>().prop_map(|may_unmap| Kind::WriteZeroes { may_unmap }),
    ]
}

/// The layout of an op's memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum Layout {
    /// One segment.
    Whole,
    /// Segments one after another, equivalent to one.
    Adjacent,
    /// Pages of 4 KiB all over the region, in any order.
    Pages,
    /// Cut anywhere, all over the region; some segments may be empty.
    Cuts,
}

fn layout() -> impl Strategy<Value = Layout> {
    use Layout::{Adjacent, Cuts, Pages, Whole};
    prop_oneof![Just(Whole), Just(Adjacent), Just(Pages), Just(Cuts)]
}

/// One op: kind, first block, blocks, layout of its memory.
pub(super) type Step = (Kind, usize, usize, Layout);

/// The ops of one round run together. Their ranges are parts of the volume cut at the given places,
/// so none overlaps another.
#[derive(Clone, Debug)]
pub(super) struct Round {
    pub steps: Vec<Step>,
    /// Determines the cuts of the memory and the places of its segments.
    seed: u64,
}

pub(super) fn rounds() -> impl Strategy<Value = Vec<Round>> {
    let kinds = prop::collection::vec((kind(), layout()), 1..12);
    let round = (kinds, prop::collection::btree_set(0..=BLOCKS, 2..24), any::<u64>());
    let round = round.prop_map(|(kinds, cuts, seed)| {
        let cuts: Vec<_> = cuts.into_iter().collect();
        let ranges = cuts.windows(2).map(|cut| (cut[0], cut[1] - cut[0]));
        let steps = ranges
            .zip(kinds)
            .map(|((first, blocks), (kind, layout))| (kind, first, blocks, layout))
            .collect();
        Round { steps, seed }
    });
    prop::collection::vec(round, 1..12)
}

/// A splitmix64 generator.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % bound as u64).unwrap()
    }
}

/// The cuts of a transfer of `len` bytes, including both ends. `unit`: alignment of all cuts.
fn cuts(random: &mut Random, layout: Layout, len: usize, unit: usize) -> Vec<usize> {
    let mut cuts = match layout {
        Layout::Whole => Vec::new(),
        Layout::Pages => (0..len).step_by(4096).skip(1).collect(),
        Layout::Adjacent | Layout::Cuts => {
            (0..random.below(40)).map(|_| random.below(len / unit + 1) * unit).collect()
        }
    };
    cuts.extend([0, len]);
    cuts.sort_unstable();
    cuts
}

/// Assigns memory to every step that moves data: no segment overlaps another, and the segments of
/// all steps are mixed, with some gaps.
fn lay_out(round: &Round, block: usize, unit: usize) -> Vec<Vec<Segment>> {
    let mut random = Random(round.seed);
    let mut memory = vec![Vec::new(); round.steps.len()];
    // Runs to place as a whole: step, its first segment, segments.
    let mut runs = Vec::new();
    for (step, &(kind, _, blocks, layout)) in round.steps.iter().enumerate() {
        if !matches!(kind, Kind::Read | Kind::Write { .. }) {
            continue;
        }
        let cuts = cuts(&mut random, layout, blocks * block, unit);
        let len = |cut: &[usize]| u32::try_from(cut[1] - cut[0]).unwrap();
        memory[step] = cuts.windows(2).map(|cut| segment(0, len(cut))).collect();
        let segments = memory[step].len();
        match layout {
            Layout::Whole | Layout::Adjacent => runs.push((step, 0, segments)),
            Layout::Pages | Layout::Cuts => runs.extend((0..segments).map(|i| (step, i, 1))),
        }
    }
    for last in (1..runs.len()).rev() {
        runs.swap(last, random.below(last + 1));
    }
    let mut at = 0_usize;
    for (step, first, segments) in runs {
        at = at.next_multiple_of(unit) + random.below(2) * unit;
        for segment in &mut memory[step][first..first + segments] {
            segment.offset = at;
            at += segment.len as usize;
        }
    }
    memory
}

/// Runs the rounds on an engine and on a `Vec`, and compares the whole region after each round, and
/// the whole volume at the end.
pub(super) fn compare(
    engine: &mut impl Engine,
    region: &Region,
    block: usize,
    unit: usize,
    rounds: &[Round],
) -> Result<(), TestCaseError> {
    let mut model = vec![0; BLOCKS * block];
    for round in rounds {
        let memory = lay_out(round, block, unit);
        // Memory outside of the reads must not change.
        region.write(0, &vec![0xEE; region.len()]);
        let mut all = Vec::new();
        let mut results = Vec::new();
        let mut reads = Vec::new();
        for (&(kind, first, blocks, _), memory) in round.steps.iter().zip(&memory) {
            let (at, len) = (first * block, blocks * block);
            let (offset, bytes) = (at as u64, len as u64);
            let (io, result) = match kind {
                Kind::Read => {
                    reads.push((memory, at..at + len));
                    (read_into(offset, memory), len)
                }
                Kind::Write { fua, seed } => {
                    let data = pattern(seed, at, len);
                    scatter(region, memory, &data);
                    model[at..at + len].copy_from_slice(&data);
                    (write_from(offset, memory, fua), len)
                }
                Kind::Flush => (flush(), 0),
                Kind::Discard => {
                    model[at..at + len].fill(0);
                    (discard(offset, bytes), 0)
                }
                Kind::WriteZeroes { may_unmap } => {
                    model[at..at + len].fill(0);
                    (zeroes(offset, bytes, may_unmap), 0)
                }
            };
            all.push(io);
            results.push(Ok(u32::try_from(result).unwrap()));
        }
        let mut expected = gather(region, &[whole(region)]);
        for (memory, range) in reads {
            let mut rest = &model[range];
            for segment in memory {
                let (part, after) = rest.split_at(segment.len as usize);
                expected[segment.offset..][..part.len()].copy_from_slice(part);
                rest = after;
            }
        }
        prop_assert_eq!(engine.run(&all), results);
        let got = gather(region, &[whole(region)]);
        if got != expected {
            let wrong = got.iter().zip(&expected).position(|(got, expected)| got != expected);
            return Err(TestCaseError::fail(format!("byte {wrong:?} of the region; {memory:?}")));
        }
    }
    let all = segment(0, u32::try_from(model.len()).unwrap());
    prop_assert_eq!(engine.run(&[read_into(0, &[all])]), [Ok(all.len)]);
    prop_assert!(gather(region, &[all]) == model, "the volume at the end");
    Ok(())
}

fn whole(region: &Region) -> Segment {
    segment(0, u32::try_from(region.len()).unwrap())
}

fn both_agree(
    directory: &Path,
    block: usize,
    direct: Direct,
    rounds: &[Round],
) -> Result<(), TestCaseError> {
    let block_size = u32::try_from(block).unwrap();
    let region = region(2 * MIB);
    let open = |name| {
        let path = file(directory, name, (BLOCKS * block) as u64);
        (Arc::new(Backing::open(&path, &options(block_size, direct)).unwrap()), path)
    };
    let (ours, ours_path) = open("uring");
    let (reference, reference_path) = open("sync");
    let unit = ours.alignment().max(ours.memory_alignment()) as usize;
    compare(&mut uring(&region, 4, &ours), &region, block, unit, rounds)?;
    compare(&mut sync(&region, &reference), &region, block, unit, rounds)?;
    // Other processes see these contents, too.
    prop_assert!(fs::read(ours_path).unwrap() == fs::read(reference_path).unwrap());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn engines_agree_in_blocks_of_512(rounds in rounds()) {
        both_agree(directory().path(), 512, Direct::Preferred, &rounds)?;
    }

    #[test]
    fn engines_agree_in_blocks_of_4096(rounds in rounds()) {
        both_agree(directory().path(), 4096, Direct::Preferred, &rounds)?;
    }

    #[test]
    fn engines_agree_through_the_page_cache(rounds in rounds()) {
        both_agree(directory().path(), 512, Direct::Off, &rounds)?;
    }

    // tmpfs has no ZERO_RANGE: here zeroes are written.
    #[test]
    fn engines_agree_on_tmpfs(rounds in rounds()) {
        match tempfile::tempdir_in("/dev/shm") {
            Ok(directory) => both_agree(directory.path(), 512, Direct::Preferred, &rounds)?,
            Err(error) => eprintln!("skipped: no tmpfs to use: {error}"),
        }
    }
}
