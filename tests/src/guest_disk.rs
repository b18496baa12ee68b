//! [`GuestDisk`]: a target, and the disk of a guest that the real program serves.

use std::fs::File;
use std::path::Path;

use crate::guest::Served;
use crate::program::Target;

/// A target that serves a file, and the disk of a guest.
#[derive(Debug)]
pub struct GuestDisk {
    /// The process that serves the disk.
    pub served: Served,
    /// The target.
    pub target: Target,
    // Dropped last: the logs must outlive the processes.
    dir: tempfile::TempDir,
}

impl GuestDisk {
    /// Bytes of the disk.
    pub const BYTES: u64 = 2 << 20;

    /// A disk with `queues` rings.
    ///
    /// # Panics
    /// The programs do not start.
    #[must_use]
    pub fn new(queues: &str) -> Self {
        Self::with(queues, &[])
    }

    /// A disk with `queues` rings. The program that serves it gets `args` too.
    ///
    /// # Panics
    /// As [`Self::new`].
    #[must_use]
    pub fn with(queues: &str, args: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let file = File::create(dir.path().join("v.img")).expect("a file");
        file.set_len(Self::BYTES).expect("room");
        let target = Target::start(dir.path(), &serve_args(dir.path()).each_ref().map(|a| &**a));
        let args = [&["--queues", queues, "--max-io", "64KiB"], args].concat();
        let served = Served::start(dir.path(), &target.address.to_string(), "v", &args);
        Self { served, target, dir }
    }

    /// The directory of the file, the logs and the socket.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The file of the volume.
    ///
    /// # Panics
    /// It is gone.
    #[must_use]
    pub fn file(&self) -> File {
        let path = self.dir.path().join("v.img");
        File::options().read(true).write(true).open(path).expect("the file")
    }

    /// Starts the target again, at its address.
    ///
    /// # Panics
    /// It does not start.
    pub fn restart_target(&mut self) {
        let dir = self.dir.path();
        self.target.start_again(dir, &serve_args(dir).each_ref().map(|a| &**a));
    }
}

fn serve_args(dir: &Path) -> [String; 4] {
    let volume = format!("v={}", dir.join("v.img").display());
    ["--file".into(), volume, "--block-size".into(), "512".into()]
}
