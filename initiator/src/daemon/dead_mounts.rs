//! [`left`] and [`users`]: the answers to commands that ask this program about dead mounts, and
//! about disks.

use rblk_operate::mount::left::{LeftDisk, LeftMount, Leftovers, NotFound, Remains};
use rblk_operate::said_once;

use crate::daemon::initiatord_exit::exit_of;
use crate::front::ublk::{DeviceInfo, disk_path};
use crate::mount::device::holder::Use;
use crate::mount::device::server::ServedBy;
use crate::mount::note::leftovers::{self, Found};

/// The leftovers of mounts without a process, and the disks without a note.
#[must_use]
pub fn left(names: Vec<String>) -> Leftovers {
    let mounts = names.into_iter().map(|name| LeftMount { found: remains(&name), name });
    let mounts = mounts.collect();
    let disks = leftovers::without_note().unwrap_or_default();
    Leftovers { mounts, disks: disks.iter().map(left_disk).collect() }
}

fn remains(name: &str) -> Result<Remains, NotFound> {
    let Found { condition, note, .. } = leftovers::find(name).map_err(|error| {
        let error = anyhow::Error::from(error);
        NotFound { error: said_once(error.as_ref()), exit: exit_of(&error).code() }
    })?;
    let word = condition.word();
    let (note, note_fault) = match note {
        Ok(note) => (note.map(|note| note.status(word.unwrap_or_default())), None),
        Err(error) => (None, Some(error.to_string())),
    };
    Ok(Remains { word: word.map(str::to_owned), note, note_fault })
}

fn left_disk(info: &DeviceInfo) -> LeftDisk {
    LeftDisk { device: disk_path(info.id).display().to_string(), line: line_without_note(info) }
}

/// A line for `list` about a device without a note.
fn line_without_note(info: &DeviceInfo) -> String {
    let device = disk_path(info.id).display().to_string();
    match ServedBy::of(info) {
        ServedBy::Process(pid) => format!(
            "{device}: process {pid} serves it, and its note is gone, so no command can ask it; \
             `rblk-initiator umount {device}` ends it if nothing uses the disk"
        ),
        ServedBy::Elsewhere => format!(
            "{device}: it is served elsewhere (in another PID namespace or container), so no command here can ask \
             it; unmount it there"
        ),
        ServedBy::Nobody => format!(
            "{device}: its process died and its note is gone; `rblk-initiator umount --force {device}` \
             fails the requests that wait for it"
        ),
    }
}

/// The users of disks, for a table: `None` for an unused disk.
#[must_use]
pub fn users(disks: &[String]) -> Vec<Option<String>> {
    disks.iter().map(|disk| Use::find(disk).map(|used| used.to_string())).collect()
}
