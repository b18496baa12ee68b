//! [`Disk`]: the disk of a mount follows its volume: its size, and whether it is read-only.
//!
//! - The size: by a command to the driver, where the kernel has it (6.16). Other kernels keep the
//!   size of a disk to its end, also when another process takes it over: only a new mount has the
//!   new size.
//! - Read-only: by `blockdev`, a process of its own. The close of a disk may write it back, and the
//!   write-back waits for the process that serves the disk.
//!
//! The disk follows only replies of the present session. A failed change is logged once. The mount
//! tries it again when the volume changes again; the next process tries it, too.

use std::io;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rblk_operate::said_once;
use rblk_protocol::{OpenReply, VolumeFlags};

use super::{aside, sectors};
use crate::front::ublk::{Control, Device, UblkError};
use crate::volume::task::{self, Running};

/// Time limit of `blockdev`.
const BLOCKDEV_TIME: Duration = Duration::from_secs(5);
/// How often to check whether `blockdev` has ended.
const STEP: Duration = Duration::from_millis(5);
/// The program `blockdev`: by the search path, else here.
const BLOCKDEV: [&str; 2] = ["blockdev", "/usr/sbin/blockdev"];

/// The properties that follow the volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Shape {
    sectors: u64,
    read_only: bool,
}

impl Shape {
    fn of(volume: &OpenReply) -> Self {
        let read_only = volume.flags.has(VolumeFlags::READ_ONLY);
        Self { sectors: sectors(volume), read_only }
    }
}

/// The next change of the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum DiskChange {
    Resize(u64),
    SetReadOnly(bool),
}

/// The state of a disk that follows its volume.
#[derive(Debug, Default)]
pub(crate) struct Disk {
    // The present shape. `None`: there is no disk yet.
    has: Option<Shape>,
    // The goals of the last tries, also of those that failed.
    tried_sectors: Option<u64>,
    tried_read_only: Option<bool>,
    setting: Running<()>,
}

impl Disk {
    /// The disk was created.
    pub(crate) fn appeared(&mut self, device: &Device) {
        let params = device.params();
        let read_only = params.read_only || is_read_only(&device.disk_path().to_string_lossy());
        self.has = Some(Shape { sectors: params.sectors, read_only });
    }

    /// Bytes of the disk; 0 without a disk.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.has.map_or(0, |has| has.sectors.saturating_mul(512))
    }

    /// The next change, if none is under way. A failed change is not repeated for the same shape of
    /// the volume.
    fn step(&mut self, volume: &OpenReply) -> Option<DiskChange> {
        let (has, wants) = (self.has?, Shape::of(volume));
        if has.sectors == wants.sectors {
            self.tried_sectors = None;
        } else if self.tried_sectors != Some(wants.sectors) {
            self.tried_sectors = Some(wants.sectors);
            return Some(DiskChange::Resize(wants.sectors));
        }
        if self.setting.is_some() {
            return None;
        }
        if has.read_only == wants.read_only {
            self.tried_read_only = None;
        } else if self.tried_read_only != Some(wants.read_only) {
            self.tried_read_only = Some(wants.read_only);
            return Some(DiskChange::SetReadOnly(wants.read_only));
        }
        None
    }

    /// Adapts the disk to the volume. Slow changes go on in the background: see [`Self::attend`].
    pub(crate) fn follow(&mut self, volume: &OpenReply, device: &mut Device) {
        while let Some(step) = self.step(volume) {
            match step {
                DiskChange::Resize(sectors) => self.resize(sectors, device),
                DiskChange::SetReadOnly(yes) => {
                    let disk = device.disk_path().to_string_lossy().into_owned();
                    let set = move || set_read_only(&disk, yes).map_err(anyhow::Error::from);
                    self.setting = Some(tokio::task::spawn_blocking(set));
                }
            }
        }
    }

    fn resize(&mut self, sectors: u64, device: &mut Device) {
        let Some(has) = &mut self.has else { return };
        let disk = device.disk_path().display().to_string();
        let (from, to) = (has.sectors.saturating_mul(512), sectors.saturating_mul(512));
        let id = device.info().id;
        let set = device.params_with(sectors).and_then(|params| {
            aside(move || Control::open()?.update_size(id, sectors)).map(|()| params)
        });
        match set {
            Ok(params) => {
                device.resized(params);
                has.sectors = sectors;
                if to < from {
                    tracing::warn!(
                        disk,
                        from_bytes = from,
                        to_bytes = to,
                        "the volume shrank; the disk follows"
                    );
                } else {
                    tracing::info!(
                        disk,
                        from_bytes = from,
                        to_bytes = to,
                        "the volume grew; the disk follows"
                    );
                }
            }
            Err(error @ UblkError::FeatureMissing { .. }) => tracing::warn!(
                disk,
                disk_bytes = from,
                volume_bytes = to,
                %error,
                "the volume has another size, and this kernel cannot resize a disk in use: unmount, and mount again"
            ),
            Err(error) => tracing::error!(
                disk,
                disk_bytes = from,
                volume_bytes = to,
                %error,
                "the volume has another size, and the disk cannot follow"
            ),
        }
    }

    /// Waits for the change under way; for ever if there is none. Cancel safe.
    pub(crate) async fn attend(&mut self) {
        let result = task::next(&mut self.setting).await;
        let (Some(has), Some(yes)) = (&mut self.has, self.tried_read_only) else { return };
        match result {
            Ok(()) => {
                has.read_only = yes;
                let now = if yes { "read-only" } else { "writable" };
                tracing::info!("the volume became {now}; the disk follows");
            }
            // The target refuses writes in any case.
            Err(error) => {
                let error = said_once(error.as_ref());
                tracing::error!(error, read_only = yes, "the disk cannot follow its volume");
            }
        }
    }
}

/// Whether the kernel has a disk as read-only.
fn is_read_only(disk: &str) -> bool {
    let name = disk.rsplit('/').next().unwrap_or(disk);
    std::fs::read_to_string(format!("/sys/block/{name}/ro")).is_ok_and(|ro| ro.trim() == "1")
}

/// Runs `blockdev` to set a disk read-only, or writable. Blocks.
fn set_read_only(disk: &str, yes: bool) -> io::Result<()> {
    let command = |program: &&str| {
        Command::new(program)
            .args([if yes { "--setro" } else { "--setrw" }, disk])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
    };
    let found = BLOCKDEV
        .iter()
        .map(command)
        .find(|spawned| !matches!(spawned, Err(error) if error.kind() == io::ErrorKind::NotFound));
    let mut child = found.unwrap_or_else(|| Err(io::Error::other("there is no `blockdev`")))?;
    let begun = Instant::now();
    loop {
        match child.try_wait()? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(io::Error::other(format!("blockdev: {status}"))),
            None if begun.elapsed() >= BLOCKDEV_TIME => {
                // The killed process may wait for the target and end later.
                let _ = child.kill();
                return Err(io::Error::other(format!("blockdev takes over {BLOCKDEV_TIME:?}")));
            }
            None => std::thread::sleep(STEP),
        }
    }
}

#[cfg(test)]
mod tests {
    use rblk_protocol::{BlockCount, BlockSize, Generation, VolumeHandle, WriteVerifier};

    use super::*;

    fn volume(blocks: u64, read_only: bool) -> OpenReply {
        OpenReply {
            handle: VolumeHandle(1),
            flags: VolumeFlags::default().with(VolumeFlags::READ_ONLY, read_only),
            block_size: BlockSize::new(4096).unwrap(),
            blocks: BlockCount(blocks),
            discard_granularity_bytes: 0,
            uuid: [1; 16],
            verifier: WriteVerifier([1; 16]),
            generation: Generation(1),
        }
    }

    #[test]
    fn each_difference_is_one_step() {
        let mut disk = Disk::default();
        assert_eq!(disk.step(&volume(10, true)), None, "there is no disk yet");
        disk.has = Some(Shape { sectors: 80, read_only: false });
        assert_eq!(disk.step(&volume(10, false)), None);
        assert_eq!(disk.step(&volume(20, true)), Some(DiskChange::Resize(160)));
        disk.has = Some(Shape { sectors: 160, read_only: false });
        assert_eq!(disk.step(&volume(20, true)), Some(DiskChange::SetReadOnly(true)));
        disk.has = Some(Shape { sectors: 160, read_only: true });
        assert_eq!(disk.step(&volume(20, true)), None);
        assert_eq!(disk.step(&volume(20, false)), Some(DiskChange::SetReadOnly(false)));
        assert_eq!(disk.size_bytes(), 81_920);
    }

    #[test]
    fn a_failed_change_is_repeated_only_after_the_volume_changed() {
        let has = Some(Shape { sectors: 80, read_only: false });
        let mut disk = Disk { has, ..Disk::default() };
        assert_eq!(disk.step(&volume(20, true)), Some(DiskChange::Resize(160)));
        assert_eq!(disk.step(&volume(20, true)), Some(DiskChange::SetReadOnly(true)));
        assert_eq!(disk.step(&volume(20, true)), None);
        assert_eq!(disk.step(&volume(30, true)), Some(DiskChange::Resize(240)));
        // Back to the shape of the disk, and away again.
        assert_eq!(disk.step(&volume(10, false)), None);
        assert_eq!(disk.step(&volume(30, true)), Some(DiskChange::Resize(240)));
        assert_eq!(disk.step(&volume(30, true)), Some(DiskChange::SetReadOnly(true)));
    }

    #[test]
    fn only_a_disk_can_be_set_read_only() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "x").unwrap();
        assert!(set_read_only(file.to_str().unwrap(), true).is_err());
        assert!(!is_read_only("/dev/no-such-disk"));
    }
}
