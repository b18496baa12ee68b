//! Flushes that fail: the system tells of lost writes once and to one caller, the backing for ever.

use std::fs;

use super::device::LoopDevice;
use super::errors::SmallDisk;
use super::*;

const FUA: OpKind = OpKind::Write { offset: 0, len: 4096, fua: true };
const PLAIN: OpKind = OpKind::Write { offset: 0, len: 4096, fua: false };
const READ: OpKind = OpKind::Read { offset: 0, len: 4096 };
const ZEROES: OpKind = OpKind::WriteZeroes { offset: 0, len: 4096, may_unmap: false };

fn opened(directory: &TempDir, direct: Direct) -> Backing {
    let path = file(directory.path(), "disk", MIB as u64);
    Backing::open(&path, &options(512, direct)).unwrap()
}

#[test]
fn after_a_failed_flush_every_flush_fails() {
    for errno in [Errno::EIO, Errno::ENOSPC, Errno::EDQUOT] {
        for direct in [Direct::Preferred, Direct::Off] {
            let directory = directory();
            let backing = opened(&directory, direct);
            assert_eq!(backing.settle(&OpKind::Flush, Ok(0)), Ok(0));
            assert!(!backing.has_lost_writes());
            assert_eq!(backing.settle(&OpKind::Flush, Err(errno)), Err(errno), "the news itself");
            assert!(backing.has_lost_writes());
            for _ in 0..3 {
                assert_eq!(backing.settle(&OpKind::Flush, Ok(0)), Err(Errno::EIO), "{errno}");
            }
            // What a write or a read is told is its own outcome.
            for kind in [FUA, PLAIN, READ] {
                assert_eq!(backing.settle(&kind, Ok(4096)), Ok(4096), "{kind:?}");
            }
            assert_eq!(backing.settle(&ZEROES, Ok(0)), Ok(0));
            assert!(backing.has_lost_writes());
            // Opened anew, it is another matter: who opens it knows.
            drop(backing);
            assert!(!opened(&directory, direct).has_lost_writes());
        }
    }
}

#[test]
fn failures_that_tell_of_one_op_only_lose_nothing() {
    let directory = directory();
    let cached = opened(&directory, Direct::Off);
    assert!(!cached.direct());
    for kind in [PLAIN, READ, ZEROES, OpKind::Discard { offset: 0, len: 4096 }] {
        for errno in [Errno::EIO, Errno::ENOSPC] {
            assert_eq!(cached.settle(&kind, Err(errno)), Err(errno));
        }
    }
    assert_eq!(cached.settle(&FUA, Err(Errno::ENOSPC)), Err(Errno::ENOSPC));
    assert_eq!(cached.settle(&OpKind::Flush, Ok(0)), Ok(0));
    assert!(!cached.has_lost_writes());
    // Through the page cache, a write that is to be durable may be told of others.
    assert_eq!(cached.settle(&FUA, Err(Errno::EIO)), Err(Errno::EIO));
    assert!(cached.has_lost_writes());
    assert_eq!(cached.settle(&OpKind::Flush, Ok(0)), Err(Errno::EIO));
}

#[test]
fn a_direct_write_speaks_for_itself() {
    let directory = directory();
    let backing = opened(&directory, Direct::Preferred);
    if !backing.direct() {
        eprintln!("skipped: no direct I/O here");
        return;
    }
    assert_eq!(backing.settle(&FUA, Err(Errno::EIO)), Err(Errno::EIO));
    assert_eq!(backing.settle(&OpKind::Flush, Ok(0)), Ok(0));
    assert!(!backing.has_lost_writes());
}

/// A disk that is too small for what its page cache took: a loop device over a file with holes, on a full file
/// system. Its flush fails once and then not any more, as the system has it.
#[test]
fn both_engines_tell_of_lost_writes_for_ever() {
    for engine in ["ring", "calls"] {
        let Some(disk) = SmallDisk::mount() else { return };
        let path = file(disk.0.path(), "disk", 8 * MIB as u64);
        let Some(device) = LoopDevice::attach(&path, "4096") else { return };
        // Where it ends well.
        let filler = disk.0.path().join("filler");
        let backing = Arc::new(Backing::open(&device.0, &options(4096, Direct::Off)).unwrap());
        let region = region(8 * MIB);
        let check = |store: &mut dyn Engine| {
            assert_eq!(store.run_one(write(0, 0, 4096)), Ok(4096));
            assert_eq!(store.run_one(flush()), Ok(0));
            // The rest of the space is another's.
            let _ = fs::write(&filler, vec![1; 2 * MIB]);
            assert_eq!(store.run_one(write(MIB as u64, 0, MIB32)), Ok(MIB32), "in the page cache");
            assert!(!backing.has_lost_writes());
            let failed = store.run_one(flush());
            assert!(failed.is_err(), "{engine}: the disk took it: {failed:?}");
            assert!(backing.has_lost_writes());
            fs::remove_file(&filler).unwrap();
            // The system knows of nothing.
            backing.file().sync_data().unwrap();
            assert_eq!(store.run(&[flush(), flush()]), [Err(Errno::EIO); 2], "{engine}");
            assert_eq!(store.run_one(write_from(0, &[segment(0, 4096)], true)), Ok(4096));
            assert_eq!(store.run_one(flush()), Err(Errno::EIO), "{engine}");
        };
        match engine {
            "ring" => {
                let mut store = uring(&region, 16, &backing);
                check(&mut store);
                // What the thread of a poll group looks at to learn of it.
                assert_eq!(store.counters().errors, 4);
            }
            _ => check(&mut sync(&region, &backing)),
        }
    }
}
