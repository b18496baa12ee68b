//! [`DrbdPair`]: two machines with one DRBD resource, which is a file system of the machine that is
//! primary.
//!
//! One kernel runs both: each machine has a disk, a DRBD device and an address of its own. DRBD
//! makes its connections outside of network namespaces, so the addresses are of this host. A
//! machine [loses its power](DrbdPair::lose_power) when its disk and its address stop in one
//! moment: nothing that its kernel still has to write gets anywhere.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::cable::ip;
use super::process::{Finished, start};
use super::wait::{DEADLINE, until};
use super::{FileSystem, Lab, LoopDisk, Mapped};

const NAMES: [&str; 2] = ["a", "b"];
const ADDRESSES: [&str; 2] = ["10.95.0.1", "10.95.0.2"];
/// The files of `drbdmeta`, which are of the host of the lab without this.
const FILES: &str = "/var/lib/drbd";
/// A copy of all that was marked may take long in an emulator.
const PATIENCE: Duration = Duration::from_secs(240);
/// Sectors of a disk that DRBD may use for itself, at the end. Both disks have others there.
const OWN_SECTORS: u64 = 1024;

/// See the module. Drop takes it down.
#[derive(Debug)]
pub struct DrbdPair {
    nodes: [DrbdNode; 2],
}

/// One of the machines. The fields are dropped in this order.
#[derive(Debug)]
struct DrbdNode {
    at: usize,
    config: PathBuf,
    directory: PathBuf,
    system: Option<FileSystem>,
    is_up: bool,
    below: Mapped,
    disk: LoopDisk,
}

impl DrbdPair {
    /// Both machines, connected and secondary. The file system is new.
    ///
    /// # Panics
    /// The kernel has no DRBD, or `drbdadm` fails.
    #[must_use]
    pub fn new(lab: &Lab, bytes: u64) -> Self {
        let _ = start(&["modprobe", "drbd"]).finish(DEADLINE).ok();
        let _ = start(&["mount", "-t", "tmpfs", "drbd", FILES]).finish(DEADLINE).ok();
        let _ = start(&["mkdir", "-p", "/run/lock"]).finish(DEADLINE).ok();
        let mut nodes = [0, 1].map(|at| DrbdNode::new(lab, at, bytes));
        for node in &mut nodes {
            node.plug_in();
            let _ = node.drbdadm(&["create-md", "--force"]).ok();
            node.up();
        }
        let pair = Self { nodes };
        pair.wait_for("Connected", "Inconsistent/Inconsistent");
        // Both disks are zeros: nothing has to be copied.
        let _ = pair.nodes[0].drbdadm(&["new-current-uuid", "--clear-bitmap"]).ok();
        pair.wait_equal();
        let _ = pair.nodes[0].drbdadm(&["primary"]).ok();
        let device = pair.nodes[0].device();
        let _ = start(&["mkfs.ext4", "-q", "-F", &device]).finish(2 * DEADLINE).ok();
        let _ = pair.nodes[0].drbdadm(&["secondary"]).ok();
        pair
    }

    /// Makes a machine primary, once DRBD lets it, and mounts the file system there.
    ///
    /// # Panics
    /// DRBD does not let it.
    pub fn promote(&mut self, at: usize) -> PathBuf {
        let node = &mut self.nodes[at];
        // DRBD refuses as long as it hears the other machine, which is primary.
        until("DRBD to let the machine be primary", PATIENCE, || {
            let tried = node.drbdadm(&["primary"]);
            let done = tried.code() == 0;
            if !done {
                println!("drbdadm primary: {}", tried.stderr.trim());
            }
            done.then_some(())
        });
        node.system = Some(FileSystem::mount("ext4", &node.device(), &node.directory, &[]));
        node.directory.clone()
    }

    /// Makes a machine secondary in good order.
    ///
    /// # Panics
    /// A process still uses the file system.
    pub fn demote(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        node.system.take().expect("a mounted file system").umount_after_process();
        let _ = node.drbdadm(&["secondary"]).ok();
    }

    /// A machine loses its power. Its processes have ended.
    ///
    /// # Panics
    /// Its remains cannot be taken away.
    pub fn lose_power(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        node.below.stage(&format!("0 {} error", node.disk.sectors()));
        node.below.suspend();
        ip(&format!("ip addr del {}/32 dev lo", ADDRESSES[at]));
        // All that waits for the disk fails now.
        node.below.resume();
    }

    /// Takes away the remains of a machine without power. The kernel keeps them, as both machines
    /// are on one.
    ///
    /// # Panics
    /// A process still uses the file system.
    pub fn clear_away(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        let words = ["dstate"];
        until("the machine to be without its disk", PATIENCE, || {
            node.drbdadm(&words).stdout.starts_with("Diskless").then_some(())
        });
        if let Some(system) = node.system.take() {
            system.umount_after_process();
        }
        let _ = node.drbdadm(&["secondary"]).ok();
        node.down();
    }

    /// A machine has power again, and boots.
    ///
    /// # Panics
    /// `drbdadm` fails.
    pub fn power_on(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        node.below.load(&node.table());
        node.plug_in();
        node.up();
    }

    /// Waits until both machines have everything.
    ///
    /// # Panics
    /// That takes too long.
    pub fn wait_equal(&self) {
        self.wait_for("Connected", "UpToDate/UpToDate");
    }

    fn wait_for(&self, connection: &str, disks: &str) {
        until(&format!("DRBD to be {connection} and {disks}"), PATIENCE, || {
            let is = |node: &DrbdNode| {
                node.drbdadm(&["cstate"]).stdout.trim() == connection
                    && node.drbdadm(&["dstate"]).stdout.trim() == disks
            };
            self.nodes.iter().all(is).then_some(())
        });
    }

    /// The states of both machines, as DRBD tells them.
    ///
    /// # Panics
    /// DRBD does not tell.
    #[must_use]
    pub fn states(&self) -> String {
        let of = |node: &DrbdNode, word| node.drbdadm(&[word]).stdout.trim().to_owned();
        let texts = self.nodes.iter().map(|node| {
            let [connection, role, disks] = ["cstate", "role", "dstate"].map(|word| of(node, word));
            format!("{}: {connection} {role} {disks}", NAMES[node.at])
        });
        texts.collect::<Vec<_>>().join(", ")
    }

    /// Ends both, and returns the bytes of their disks.
    ///
    /// # Panics
    /// A machine is primary.
    #[must_use]
    pub fn disks(mut self) -> [Vec<u8>; 2] {
        self.nodes.iter_mut().for_each(DrbdNode::down);
        [0, 1].map(|at| {
            let node = &self.nodes[at];
            let mut bytes = std::fs::read(node.disk.device()).expect("the bytes of a disk");
            let len = 512 * (node.disk.sectors() - OWN_SECTORS);
            bytes.truncate(usize::try_from(len).expect("it fits in memory"));
            bytes
        })
    }
}

impl DrbdNode {
    fn new(lab: &Lab, at: usize, bytes: u64) -> Self {
        let disk = LoopDisk::new(lab, &format!("drbd-{}", NAMES[at]), bytes);
        let table = table(&disk);
        let below = Mapped::new(lab, &format!("drbd-{}", NAMES[at]), &table);
        let config = lab.path(&format!("drbd-{}.conf", NAMES[at]));
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").expect("a name");
        // As in docs/availability.md, but for short times, and for the two names of one resource
        // and of its device. A machine reads of itself what stands at its name.
        let text = format!(
            "global {{ usage-count no; }}
common {{ net {{ protocol C; timeout 20; ping-int 2; connect-int 2; }}
    disk {{ c-plan-ahead 0; resync-rate 40M; }} }}
resource {} {{
    device {} minor {at};
    disk {};
    meta-disk internal;
    on {} {{ address {}:7789; }}
    on other {{ address {}:7789; }}
}}
",
            resource(at),
            device(at),
            below.device().display(),
            host.trim(),
            ADDRESSES[at],
            ADDRESSES[1 - at],
        );
        std::fs::write(&config, text).expect("a configuration");
        let directory = lab.path(&format!("machine-{}", NAMES[at]));
        Self { at, config, directory, system: None, is_up: false, below, disk }
    }

    fn device(&self) -> String {
        device(self.at)
    }

    fn table(&self) -> String {
        table(&self.disk)
    }

    fn plug_in(&self) {
        ip(&format!("ip addr add {}/32 dev lo", ADDRESSES[self.at]));
    }

    fn up(&mut self) {
        let _ = self.drbdadm(&["up"]).ok();
        self.is_up = true;
    }

    fn down(&mut self) {
        if std::mem::take(&mut self.is_up) {
            let _ = self.drbdadm(&["down"]).ok();
        }
    }

    /// Runs `drbdadm` with these words, the resource last.
    fn drbdadm(&self, words: &[&str]) -> Finished {
        let (config, resource) = (self.config.display().to_string(), resource(self.at));
        start(&[&["drbdadm", "-c", &config], words, &[&resource]].concat()).finish(2 * DEADLINE)
    }
}

fn resource(at: usize) -> String {
    format!("rblk-{}", NAMES[at])
}

fn device(at: usize) -> String {
    format!("/dev/drbd{at}")
}

fn table(disk: &LoopDisk) -> String {
    format!("0 {} linear {} 0", disk.sectors(), disk.device().display())
}

impl Drop for DrbdNode {
    fn drop(&mut self) {
        drop(self.system.take());
        if self.is_up {
            let ended = self.drbdadm(&["down"]);
            if ended.code() != 0 {
                println!("{} stays: {ended}", resource(self.at));
            }
        }
    }
}

impl Drop for DrbdPair {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("--- DRBD");
            println!("{}", std::fs::read_to_string("/proc/drbd").unwrap_or_default());
        }
        for address in ADDRESSES {
            let _ = start(&["ip", "addr", "del", &format!("{address}/32"), "dev", "lo"])
                .finish(DEADLINE);
        }
        if Path::new(FILES).exists() {
            let _ = start(&["umount", FILES]).finish(DEADLINE);
        }
    }
}
