//! The disk of a guest: a front end and a guest driven by hand, the real program, and a target.

#![forbid(unsafe_code)]

use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::Duration;

use rblk_tests::bed::pattern;
use rblk_tests::guest::{Ask, DATA, Descriptor, GUEST, Guest, MEMORY, RING, Served, shareable};
use rblk_tests::guest_disk::GuestDisk;
use rblk_tests::program::{program, run, wait_for};

const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;

/// The guest's address of its data.
fn data(offset: u64) -> u64 {
    GUEST + DATA + offset
}

fn stored(disk: &GuestDisk, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    disk.file().read_exact_at(&mut bytes, offset).unwrap();
    bytes
}

#[test]
fn a_guest_reads_what_it_wrote_and_the_store_has_it() {
    let mut disk = GuestDisk::new("2");
    let mut guest = Guest::connect(&disk.served, 2);
    let bytes = pattern(7, 128 << 10);
    guest.fill(data(0), &bytes);
    assert_eq!(guest.one(0, Ask::Write, 8, &[(data(0), 128 << 10)]), OK);
    assert_eq!(guest.one(1, Ask::Flush, 0, &[]), OK);
    assert!(stored(&disk, 4096, bytes.len()) == bytes);
    // By the other ring, to another place, in pieces smaller than blocks.
    let pieces = [(data(0x10_0000), 100), (data(0x10_1000), 412), (data(0x10_2000), 65024)];
    assert_eq!(guest.one(1, Ask::Read, 8, &pieces), OK);
    let mut read = guest.bytes(pieces[0].0, 100);
    read.extend(guest.bytes(pieces[1].0, 412));
    read.extend(guest.bytes(pieces[2].0, 65024));
    assert!(read == bytes[..65536]);
    assert_eq!(guest.one(0, Ask::Id, 0, &[(data(0), 20)]), OK);
    assert_eq!(guest.bytes(data(0), 20), b"v\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
    drop(guest);
    assert_eq!(disk.served.terminate(), Some(0), "{}", disk.served.log());
    assert!(!disk.served.socket.exists());
}

#[test]
fn a_wrong_request_is_answered_and_the_ring_goes_on() {
    let disk = GuestDisk::new("1");
    let mut guest = Guest::connect(&disk.served, 1);
    let read =
        |guest: &mut Guest, sector, data: &[(u64, u32)]| guest.one(0, Ask::Read, sector, data);
    let end = GuestDisk::BYTES / 512;
    for (sector, data) in [
        (end, &[(data(0), 512)][..]),
        (end - 1, &[(data(0), 1024)]),
        (u64::MAX, &[(data(0), 512)]),
        (u64::MAX / 512, &[(data(0), 512)]),
        // Partial blocks, no data, no memory, too much memory.
        (0, &[(data(0), 511)]),
        (0, &[]),
        (0, &[(GUEST - 512, 512)]),
        (0, &[(GUEST + MEMORY - 256, 512)]),
        (0, &[(u64::MAX - 255, 512)]),
        (0, &[(data(0), u32::MAX - 8191)]),
        (0, &[(data(0), 512), (0, 512)]),
    ] {
        assert_eq!(read(&mut guest, sector, data), IO_ERROR, "{sector} {data:?}");
    }
    // A range of a DISCARD: sector, sectors, flags.
    let range = |guest: &mut Guest, ask, sector: u64, sectors: u32, flags: u32| {
        let bytes = [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()];
        guest.fill(data(0), &bytes.concat());
        guest.one(0, ask, 0, &[(data(0), 16)])
    };
    assert_eq!(range(&mut guest, Ask::Discard, 0, 8, 1), UNSUPPORTED);
    assert_eq!(range(&mut guest, Ask::WriteZeroes, 0, 8, 2), UNSUPPORTED);
    assert_eq!(range(&mut guest, Ask::WriteZeroes, end, 8, 0), IO_ERROR);
    assert_eq!(range(&mut guest, Ask::WriteZeroes, u64::MAX, 8, 0), IO_ERROR);
    assert_eq!(range(&mut guest, Ask::Discard, 0, u32::MAX, 0), IO_ERROR);
    assert_eq!(guest.one(0, Ask::Discard, 0, &[(data(0), 15)]), IO_ERROR);
    assert_eq!(guest.one(0, Ask::Id, 0, &[(data(0), 19)]), IO_ERROR);
    guest.fill(data(0), &[9; 4096]);
    assert_eq!(guest.one(0, Ask::Write, 0, &[(data(0), 4096)]), OK);
    assert_eq!(range(&mut guest, Ask::WriteZeroes, 1, 2, 1), OK);
    assert_eq!(read(&mut guest, 0, &[(data(0), 4096)]), OK);
    assert!(guest.bytes(data(0), 4096) == [&[9; 512][..], &[0; 1024], &[9; 2560]].concat());
}

/// A guest that breaks its ring loses it, until it resets the disk. The other ring goes on.
#[test]
fn a_broken_ring_is_left_alone() {
    let mut disk = GuestDisk::new("2");
    let mut guest = Guest::connect(&disk.served, 2);
    let (next, write, table) = (1, 2, 4);
    let one = |at, len, flags, next| Descriptor { at, len, flags, next };
    let rounds: [&[Descriptor]; 8] = [
        // A loop; a missing next descriptor; no place for a status.
        &[one(data(0), 16, next, 1), one(data(64), 1, next, 0)],
        &[one(data(0), 16, next, RING)],
        &[one(data(0), 16, 0, 0)],
        // The status outside memory, or before data for the device; a table of tables, or one
        // outside memory.
        &[one(data(0), 16, next, 1), one(GUEST + MEMORY, 1, write, 0)],
        &[one(data(0), 1, write | next, 1), one(data(0), 16, 0, 0)],
        &[one(data(0), 32, table, 0)],
        &[one(u64::MAX - 15, 16, table, 0)],
        &[one(data(0), 17, table, 0)],
    ];
    guest.fill(data(0), &[0xff; 64]);
    for (round, chain) in rounds.iter().enumerate() {
        for (index, descriptor) in (0u16..).zip(*chain) {
            guest.describe(0, index, *descriptor);
        }
        guest.offer(0, 0);
        wait_until_broken(&disk, round + 1);
        // The other ring works; nothing is taken from the first one.
        assert_eq!(guest.one(1, Ask::Read, 0, &[(data(4096), 512)]), OK, "round {round}");
        guest.request(0, 3, Ask::Read, 0, &[(data(4096), 512)]);
        assert_eq!(guest.one(1, Ask::Read, 0, &[(data(4096), 512)]), OK, "round {round}");
        assert_eq!(guest.done(0), None, "round {round}");
        assert_eq!(guest.stop(0), 1);
        guest.start(0, 1);
        let done = guest.wait(0);
        assert_eq!(done, (3, OK), "round {round}");
        // The counts of completed and of taken requests differ now.
        guest.stop(0);
        guest.reset(0);
        guest.start(0, 0);
    }
    // More requests than the ring has places, and an invalid head.
    guest.claim_to_offer(0, RING + 1);
    wait_until_broken(&disk, 9);
    assert_eq!(guest.one(1, Ask::Read, 0, &[(data(4096), 512)]), OK);
    assert_eq!(guest.done(0), None);
    guest.stop(0);
    guest.reset(0);
    guest.start(0, 0);
    guest.offer(0, u16::MAX);
    wait_until_broken(&disk, 10);
    assert_eq!(guest.one(1, Ask::Read, 0, &[(data(4096), 512)]), OK);
    assert_eq!(guest.done(0), None);
    assert!(disk.served.runs());
}

/// Waits until rings have broken `times` times.
fn wait_until_broken(disk: &GuestDisk, times: usize) {
    let broke = || disk.served.log().matches("a ring of the guest is broken").count();
    wait_for("a broken ring", || (broke() == times).then_some(()));
}

#[test]
fn a_front_end_that_talks_nonsense_is_hung_up_on_and_the_next_one_is_served() {
    let mut disk = GuestDisk::new("1");
    let zeros = [0u8; 12];
    let own = Guest::own_part();
    let nonsense: [&dyn Fn(&mut Guest); 12] = [
        &|guest| drop(guest.send_raw(&zeros)),
        &|guest| drop(guest.send_raw(&[1, 0, 0, 0, 1, 0, 0, 0, 255, 255, 255, 255])),
        // An unknown request, and a truncated one.
        &|guest| guest.tell(77, &[], &[]),
        &|guest| guest.tell(2, &[0; 7], &[]),
        // An unknown ring, memory without a descriptor, features that were not offered.
        &|guest| guest.tell(8, &[9, 0, 0, 0, 16, 0, 0, 0], &[]),
        &|guest| {
            guest.tell(
                5,
                &[[1u64, 0, 4096].map(u64::to_le_bytes).concat(), vec![0; 16]].concat(),
                &[],
            )
        },
        &|guest| guest.tell(2, &u64::MAX.to_le_bytes(), &[]),
        // A ring without places, without memory, and one with a size that is no power of two.
        &|guest| guest.tell(12, &0x100u64.to_le_bytes(), &[]),
        &|guest| guest.tell(12, &0u64.to_le_bytes(), &[]),
        &|guest| guest.tell(10, &[0, 0, 0, 0, 255, 255, 255, 255], &[]),
        &|guest| guest.tell(18, &[200, 0, 0, 0, 1, 0, 0, 0], &[]),
        &|guest| guest.tell(24, &[0; 8], &[]),
    ];
    for (round, say) in nonsense.iter().enumerate() {
        let mut guest = Guest::greet(&disk.served, 0);
        say(&mut guest);
        if round != 4 && round != 10 {
            assert!(guest.is_hung_up(), "round {round}");
        }
        drop(guest);
        let mut guest = Guest::connect(&disk.served, 1);
        assert_eq!(guest.one(0, Ask::Read, 0, &[(data(0), 512)]), OK, "round {round}");
    }
    // Memory that is missing, overlaps, or wraps is refused, and the front end may try again.
    let mut guest = Guest::greet(&disk.served, 0);
    let file = shareable(MEMORY);
    for parts in [
        &[(GUEST, MEMORY + 4096, own.2, 0)][..],
        &[(GUEST, MEMORY, own.2, 4096)],
        &[(GUEST, 0, own.2, 0)],
        &[(u64::MAX - 4095, 8192, own.2, 0)],
        &[(GUEST, 8192, own.2, 0), (GUEST + 4096, 8192, own.2 + 8192, 8192)],
        &[(GUEST, 4096, own.2, u64::MAX - 4095)],
        &[(GUEST, 4096, own.2, 100)],
    ] {
        let files = vec![&file; parts.len()];
        assert!(!guest.try_share(parts, &files).unwrap(), "{parts:?}");
    }
    let odd = shareable(4097);
    assert!(!guest.try_share(&[(GUEST, 4096, own.2, 0)], &[&odd]).unwrap());
    assert!(guest.try_share(&[own], &[&file]).unwrap());
    assert!(disk.served.runs());
}

/// A small generator of pseudorandom numbers, the same for the same seed.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// Requests of random kinds, places and pieces, several at once, against a model, while the target
/// is killed and started again.
#[test]
fn random_requests_do_what_a_disk_does() {
    let mut disk = GuestDisk::new("2");
    let mut guest = Guest::connect(&disk.served, 2);
    let mut model = vec![0u8; usize::try_from(GuestDisk::BYTES).unwrap()];
    let mut numbers = Numbers(20_261_124);
    for round in 0..120u64 {
        if round % 40 == 20 {
            disk.target.kill();
        }
        // Each request of a round has its own stripe of the disk and of the memory.
        let mut asked = Vec::new();
        for number in 0..8u16 {
            let ring = number % 2;
            let sectors = 1 + numbers.below(160);
            let sector = u64::from(number) * 512 + numbers.below(512 - sectors);
            let memory = data(u64::from(number) * (256 << 10));
            let len = u32::try_from(sectors * 512).unwrap();
            let range = usize::try_from(sector * 512).unwrap()
                ..usize::try_from((sector + sectors) * 512).unwrap();
            let pieces = pieces(&mut numbers, memory, len);
            match numbers.below(8) {
                0..3 => {
                    let bytes = pattern(round << 8 | u64::from(number), range.len());
                    scatter(&guest, &pieces, &bytes);
                    guest.request(ring, number, Ask::Write, sector, &pieces);
                    model[range].copy_from_slice(&bytes);
                    asked.push(None);
                }
                3..7 => {
                    guest.request(ring, number, Ask::Read, sector, &pieces);
                    asked.push(Some((pieces, range)));
                }
                _ => {
                    let bytes = [
                        &sector.to_le_bytes()[..],
                        &u32::try_from(sectors).unwrap().to_le_bytes(),
                        &[0; 4],
                    ];
                    guest.fill(memory, &bytes.concat());
                    guest.request(ring, number, Ask::WriteZeroes, 0, &[(memory, 16)]);
                    model[range].fill(0);
                    asked.push(None);
                }
            }
        }
        if round % 40 == 20 {
            disk.restart_target();
        }
        for number in 0..8u16 {
            let (done, status) = guest.wait(number % 2);
            assert_eq!(status, OK, "round {round}, request {done}");
            if let Some((pieces, range)) = asked[usize::from(done)].take() {
                assert!(gather(&guest, &pieces) == model[range], "round {round}, request {done}");
            }
        }
    }
    assert_eq!(guest.one(0, Ask::Flush, 0, &[]), OK);
    assert!(stored(&disk, 0, model.len()) == model);
}

/// Pieces of memory with `len` bytes together, and gaps between them: whole blocks or not.
fn pieces(numbers: &mut Numbers, memory: u64, len: u32) -> Vec<(u64, u32)> {
    let (unit, most) = if numbers.below(3) == 0 { (4, 9) } else { (512, 5) };
    let (mut pieces, mut at, mut left) = (Vec::new(), memory, len);
    for _ in 0..numbers.below(most) {
        let part = u32::try_from(numbers.below(u64::from(left / unit))).unwrap() * unit;
        if part > 0 && part < left {
            pieces.push((at, part));
            (at, left) = (at + u64::from(part) + 1024 * numbers.below(3), left - part);
        }
    }
    pieces.push((at, left));
    pieces
}

fn scatter(guest: &Guest, pieces: &[(u64, u32)], bytes: &[u8]) {
    let mut rest = bytes;
    for (at, len) in pieces {
        let (now, later) = rest.split_at(*len as usize);
        guest.fill(*at, now);
        rest = later;
    }
}

fn gather(guest: &Guest, pieces: &[(u64, u32)]) -> Vec<u8> {
    pieces.iter().flat_map(|(at, len)| guest.bytes(*at, *len as usize)).collect()
}

#[test]
fn requests_wait_for_a_target_that_is_lost() {
    let mut disk = GuestDisk::new("1");
    let mut guest = Guest::connect(&disk.served, 1);
    guest.fill(data(0), &[5; 32768]);
    disk.target.kill();
    guest.request(0, 1, Ask::Write, 0, &[(data(0), 32768)]);
    guest.request(0, 2, Ask::Write, 64, &[(data(0), 100), (data(8192), 412)]);
    assert!(!guest.called(0, Duration::from_millis(300)), "nothing is done");
    disk.restart_target();
    let mut done = [guest.wait(0), guest.wait(0)];
    done.sort_unstable();
    assert_eq!(done, [(1, OK), (2, OK)]);
    assert!(stored(&disk, 0, 32768) == [5; 32768]);
}

/// A guest leaves with requests under way: none of them overwrites data of the next guest.
#[test]
fn requests_of_a_guest_that_left_are_not_written_later() {
    let mut disk = GuestDisk::new("1");
    let mut guest = Guest::connect(&disk.served, 1);
    disk.target.kill();
    guest.fill(data(0), &[5; 8192]);
    guest.request(0, 1, Ask::Write, 0, &[(data(0), 8192)]);
    guest.request(0, 2, Ask::Write, 16, &[(data(0), 100), (data(512), 412)]);
    drop(guest);
    let mut next = Guest::connect(&disk.served, 1);
    next.fill(data(0), &[6; 8192]);
    next.request(0, 1, Ask::Write, 8, &[(data(0), 8192)]);
    disk.restart_target();
    assert_eq!(next.wait(0), (1, OK));
    assert!(stored(&disk, 0, 4096) == [0; 4096], "of the guest that is gone");
    assert!(stored(&disk, 4096, 8192) == [6; 8192]);
}

/// A front end can stop a ring although its target is lost.
#[test]
fn a_ring_is_stopped_without_its_target() {
    let mut disk = GuestDisk::new("1");
    let mut guest = Guest::connect(&disk.served, 1);
    disk.target.kill();
    guest.fill(data(0), &[5; 8192]);
    guest.request(0, 1, Ask::Write, 0, &[(data(0), 8192)]);
    // A ring that is stopped before its thread took the request starts again at the same request.
    wait_for("the thread of the ring takes the request", || {
        let next = guest.stop(0);
        if next == 0 {
            guest.start(0, 0);
        }
        (next == 1).then_some(())
    });
    assert_eq!(guest.done(0), Some((1, IO_ERROR)));
    guest.start(0, 1);
    disk.restart_target();
    assert_eq!(guest.one(0, Ask::Read, 0, &[(data(0), 512)]), OK);
    assert_eq!(guest.bytes(data(0), 512), [0; 512], "what failed was not done later");
}

/// Memory is replaced while requests are under way: they continue in the new memory, and the old
/// one is not touched.
#[test]
fn requests_follow_the_memory_of_their_guest() {
    let mut disk = GuestDisk::new("1");
    disk.file().write_all_at(&[7; 65536], 0).unwrap();
    let mut guest = Guest::connect(&disk.served, 1);
    assert_eq!(guest.one(0, Ask::Read, 0, &[(data(0), 512)]), OK);
    disk.target.kill();
    guest.request(0, 1, Ask::Read, 0, &[(data(0), 65536)]);
    guest.request(0, 2, Ask::Read, 0, &[(data(65536), 100), (data(131_072), 412)]);
    // The test does not wait until they were taken: the memory may be replaced at any time.
    let old = guest.bytes(GUEST, usize::try_from(MEMORY).unwrap());
    let file = shareable(MEMORY);
    file.write_all_at(&old, 0).unwrap();
    guest.share(&[Guest::own_part()], &[&file]);
    let memory = guest.replace_memory(&file);
    disk.restart_target();
    let mut done = [guest.wait(0), guest.wait(0)];
    done.sort_unstable();
    assert_eq!(done, [(1, OK), (2, OK)]);
    assert!(guest.bytes(data(0), 65536) == [7; 65536]);
    assert_eq!(guest.bytes(data(65536), 100), [7; 100]);
    let mut late = vec![0; 65536];
    memory.read(usize::try_from(DATA).unwrap() + 512, &mut late[512..]);
    assert!(late[512..].iter().all(|byte| *byte == 0), "the old memory");
    // This memory again, in other parts: no new connection is made.
    let connections = || disk.served.log().matches("connected again").count();
    // An answer comes before the line in the log. Two lines are due: one for the first memory of
    // the guest, one for the restart of the target.
    wait_for("the log tells of the connection", || (connections() >= 2).then_some(()));
    let before = connections();
    let (at, len, user, _) = Guest::own_part();
    let half = len / 2;
    let parts = [(at, half, user, 0), (at + half, half, user + half, half)];
    guest.share(&parts, &[&file, &file]);
    let across = data(half - DATA - 4096);
    assert_eq!(guest.one(0, Ask::Read, 0, &[(across, 8192)]), OK);
    assert!(guest.bytes(across, 8192) == [7; 8192]);
    assert_eq!(connections(), before);
}

/// A volume grows: the front end hears of it, and the guest sees the new size.
#[test]
fn a_guest_hears_of_the_new_size_of_its_disk() {
    let disk = GuestDisk::new("1");
    let mut guest = Guest::connect(&disk.served, 1);
    let sectors =
        |guest: &mut Guest| u64::from_le_bytes(guest.config()[..8].try_into().expect("8 bytes"));
    assert_eq!(sectors(&mut guest), GuestDisk::BYTES / 512);
    let end = GuestDisk::BYTES / 512;
    assert_eq!(guest.one(0, Ask::Read, end, &[(data(0), 512)]), IO_ERROR);
    let resized = run(Command::new(program("rblk-target"))
        .args(["volume", "resize", "v", "4MiB", "--control-socket"])
        .arg(&disk.target.socket));
    assert_eq!(resized.code, Some(0), "{resized:?}");
    guest.wait_for_change();
    assert_eq!(sectors(&mut guest), 2 * GuestDisk::BYTES / 512);
    assert_eq!(guest.one(0, Ask::Read, end, &[(data(0), 512)]), OK);
}

#[test]
fn a_disk_that_is_read_only_says_so() {
    let disk = GuestDisk::with("1", &["--ro"]);
    let mut guest = Guest::connect(&disk.served, 1);
    let offered = u64::from_le_bytes(guest.question(1, &[]).try_into().unwrap());
    assert_ne!(offered & 1 << 5, 0, "VIRTIO_BLK_F_RO");
    assert_eq!(guest.one(0, Ask::Write, 0, &[(data(0), 512)]), IO_ERROR);
    assert_eq!(guest.one(0, Ask::Read, 0, &[(data(0), 512)]), OK);
}

/// A program that ends leaves nothing. Started again, it serves the disk to the same guest.
#[test]
fn the_program_ends_in_good_order_with_a_guest() {
    let mut disk = GuestDisk::new("1");
    let mut guest = Guest::connect(&disk.served, 1);
    for number in 0..8 {
        guest.request(0, number, Ask::Write, u64::from(number) * 8, &[(data(0), 4096)]);
    }
    assert_eq!(disk.served.terminate(), Some(0), "{}", disk.served.log());
    for _ in 0..guest.taken(0) {
        assert_eq!(guest.wait(0).1, OK, "what was taken was answered first");
    }
    assert!(guest.is_hung_up());
    let address = disk.target.address.to_string();
    disk.served = Served::start(disk.dir(), &address, "v", &[]);
    let mut guest = Guest::connect(&disk.served, 1);
    assert_eq!(guest.one(0, Ask::Read, 0, &[(data(0), 512)]), OK);
    // A killed program leaves its socket, and the next process takes it over at once.
    disk.served.kill();
    assert!(disk.served.socket.exists());
    disk.served = Served::start(disk.dir(), &address, "v", &[]);
    let mut guest = Guest::connect(&disk.served, 1);
    assert_eq!(guest.one(0, Ask::Read, 0, &[(data(0), 512)]), OK);
    wait_for("the session of the process that was killed to be over", || {
        (disk.target.status().sessions.len() == 1).then_some(())
    });
}
