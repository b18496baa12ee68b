//! Direct I/O with memory that programs share with the mount: no program on this host copies the
//! data, even after a death of the target or of the mount's process.

use std::fs::File;
use std::path::{Path, PathBuf};

use rblk_tests::lab::{DEADLINE, Fio, KernelFeature, Lab, Mounted, StallMeter, Target, run};

use super::{KIB, MIB, flags, serve_file, sh, wait_for_io};

/// Room for the buffers of one job of fio.
const MEMORY: u64 = 8 * MIB;
const DEPTH: u64 = 16;

/// A tmpfs with one file of memory.
struct Memory {
    directory: PathBuf,
}

impl Memory {
    fn new(lab: &Lab) -> Self {
        let directory = lab.path("memory");
        std::fs::create_dir_all(&directory).expect("a directory");
        sh(&["mount", "-t", "tmpfs", "memory", &directory.display().to_string()]);
        let memory = Self { directory };
        memory.make();
        memory
    }

    fn file(&self) -> PathBuf {
        self.directory.join("fio")
    }

    /// Replaces the file by a new one.
    fn make(&self) {
        let _ = std::fs::remove_file(self.file());
        let made = File::create(self.file()).and_then(|file| file.set_len(MEMORY));
        made.expect("a file of memory");
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        sh(&["umount", "-l", &self.directory.display().to_string()]);
    }
}

/// fio with its buffers in the file.
fn fio(mounted: &Mounted<'_>, memory: &Path) -> Fio {
    Fio::new(mounted.device(), "randwrite")
        .with("bsrange", "4k-128k")
        .with("iodepth", DEPTH)
        .with("iomem", format!("mmapshared:{}", memory.display()))
        .with("verify", "crc32c")
        .with("verify_fatal", 1)
        .with("verify_state_save", 0)
}

/// Bytes that fio moved, and the part of them in shared memory.
fn moved(mounted: &Mounted<'_>, run: impl FnOnce()) -> (u64, u64) {
    let before = mounted.counts();
    run();
    let counts = mounted.counts().since(&before);
    assert_eq!(counts.get("copied_bytes"), 0, "the initiator copied");
    let bytes = counts.get("read_bytes") + counts.get("written_bytes");
    (bytes, counts.get("shared_memory_bytes"))
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn shared_memory_is_not_copied() {
    if KernelFeature::SHARED_MEMORY.is_missing() {
        return;
    }
    run("shared_memory_is_not_copied", |lab| {
        let memory = Memory::new(lab);
        let file = memory.file();
        let served = serve_file(lab, 256 * MIB);
        let mut target = Some(Target::start(lab, &served));
        let flags = flags(lab.rdma()).flag("--shared-memory", &file.display().to_string());
        let mut mounted = Mounted::new(lab, &flags);

        let once = || {
            // fio removes the file at its end, so it gets its own name of it.
            let name = memory.directory.join("name");
            std::fs::hard_link(&file, &name).expect("a name");
            let _ = fio(&mounted, &name).with("size", 32 * MIB).start().finish(DEADLINE).ok();
            let _ = std::fs::remove_file(&name);
        };
        let (bytes, shared) = moved(&mounted, once);
        println!("{}: {shared} of {bytes} bytes in shared memory", lab.test());
        assert!(bytes >= 64 * MIB && shared == bytes, "{shared} of {bytes}");

        // Other memory is copied.
        let (bytes, shared) = moved(&mounted, || {
            let job = Fio::new(mounted.device(), "randread").with("bs", "4k").with("size", MIB);
            let _ = job.start().finish(DEADLINE).ok();
        });
        assert!(bytes >= MIB && shared == 0, "{shared} of {bytes}");

        let name = memory.directory.join("name");
        std::fs::hard_link(&file, &name).expect("a name");
        let meter = StallMeter::start(mounted.device());
        let endless = fio(&mounted, &name).with("size", "100%").with("rate", "2M,2M");
        let endless = endless.with("verify_backlog", 32).start();
        for _ in 0..lab.times(2, 4) {
            wait_for_io(&mounted, &meter);
            target.take().expect("a target").kill();
            target = Some(Target::start(lab, &served));
            wait_for_io(&mounted, &meter);
            mounted.kill_daemon();
            mounted.recover();
            wait_for_io(&mounted, &meter);
            mounted.upgrade(None);
            wait_for_io(&mounted, &meter);
            let counts = mounted.counts();
            let shared = counts.get("shared_memory_bytes");
            assert!(shared >= 4 * KIB, "after a recovery: {shared} bytes in shared memory");
        }
        let _ = endless.stop(DEADLINE).ok();
        drop(meter);

        // The driver does not know a new file under the old name.
        mounted.kill_daemon();
        memory.make();
        mounted.recover();
        mounted.wait_connected();
        assert!(mounted.log().contains("it was cut, or is another file"), "{}", mounted.log());
        let (bytes, shared) = moved(&mounted, || {
            let job = fio(&mounted, &file).with("size", 4 * MIB);
            let _ = job.start().finish(DEADLINE).ok();
        });
        assert!(bytes >= 8 * MIB && shared == 0, "{shared} of {bytes}");
        mounted.umount();
    });
}
