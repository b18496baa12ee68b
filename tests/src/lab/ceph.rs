//! [`CephCluster`]: a Ceph cluster on one host, for one test.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU16, Ordering};

use tempfile::TempDir;

use super::GroupNetwork;

/// What a host lacks that cannot run this.
const NEEDS: &str = "it needs the packages ceph-mon, ceph-osd, ceph-common and librbd1";
/// Ports of a cluster.
const PORTS: u16 = 64;
/// Clusters of one test program.
const CLUSTERS: u16 = 8;

/// A cluster, which stops when this value is dropped. `ceph-cluster.sh` beside this file says how
/// it is made.
#[derive(Debug)]
pub struct CephCluster {
    directory: TempDir,
    port: u16,
    store: &'static str,
    osds: u16,
    place: Place,
}

/// Where a cluster runs.
#[derive(Clone, Debug)]
struct Place {
    // A network namespace; none: that of the test.
    space: Option<&'static str>,
    address: String,
}

impl Place {
    /// A command there.
    fn command(&self, program: &str) -> Command {
        let Some(space) = self.space else { return Command::new(program) };
        let mut command = Command::new("ip");
        command.args(["netns", "exec", space, program]);
        command
    }
}

impl CephCluster {
    /// Starts a cluster with so many OSDs, which keep their data in a `memstore` or a `bluestore`.
    ///
    /// # Panics
    /// The programs of Ceph are missing, or the cluster does not start.
    #[must_use]
    pub fn start(store: &'static str, osds: u16) -> Self {
        let place = Place { space: None, address: "127.0.0.1".to_owned() };
        Self::start_at(place, tempfile::tempdir().expect("a directory"), (store, osds))
    }

    /// Starts a cluster at its place in the network of a group, with so many OSDs, which keep their
    /// data in files of a directory.
    ///
    /// # Panics
    /// As [`start`](Self::start).
    #[must_use]
    pub fn start_in(network: &GroupNetwork, directory: &Path, osds: u16) -> Self {
        let (space, address) = network.cluster();
        let place = Place { space: Some(space), address: address.to_owned() };
        let directory = tempfile::tempdir_in(directory).expect("a directory");
        Self::start_at(place, directory, ("bluestore", osds))
    }

    fn start_at(place: Place, directory: TempDir, (store, osds): (&'static str, u16)) -> Self {
        static NEXT: AtomicU16 = AtomicU16::new(0);
        // Below the ports that the system gives to clients.
        let process = u16::try_from(std::process::id() % 16).expect("a small number");
        let cluster = NEXT.fetch_add(1, Ordering::Relaxed) % CLUSTERS;
        let port = 20_000 + (process * CLUSTERS + cluster) * PORTS;
        let cluster = Self { directory, port, store, osds, place };
        cluster.script("start");
        cluster
    }

    /// Its directory, for other files of the test, too.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Its configuration file.
    #[must_use]
    pub fn conf(&self) -> PathBuf {
        self.directory().join("ceph.conf")
    }

    /// Runs the script with these words.
    ///
    /// # Panics
    /// The script fails.
    pub fn script(&self, words: &str) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lab/ceph-cluster.sh");
        let mut command = self.place.command("timeout");
        command.arg("300").arg(script).arg(self.directory()).args(words.split(' '));
        command.env("PORT", self.port.to_string()).env("STORE", self.store);
        command.env("ADDRESS", &self.place.address);
        run(command.env("OSDS", self.osds.to_string()));
    }

    /// Runs `ceph` or `rbd` with these words, and returns what it prints. In a word, "+" is a
    /// space.
    ///
    /// # Panics
    /// The command fails.
    pub fn run(&self, words: &str) -> String {
        run(&mut self.command(words))
    }

    /// Runs the same for a failed test. Returns all that it prints, with its complaints.
    #[must_use]
    pub fn try_run(&self, words: &str) -> String {
        match self.command(words).output() {
            Ok(said) => {
                [&said.stdout, &said.stderr].map(|text| String::from_utf8_lossy(text)).concat()
            }
            Err(error) => format!("{words}: {error}"),
        }
    }

    fn command(&self, words: &str) -> Command {
        let mut words = words.split(' ').map(|word| word.replace('+', " "));
        let mut command = self.place.command("timeout");
        command.arg("120").args(words.next()).arg("-c").arg(self.conf()).args(words);
        command
    }

    /// The addresses of the clients that are fenced, with the ends of that. A target asks whether
    /// it may fence others by an entry of an address that nobody has (RFC 5737).
    ///
    /// # Panics
    /// The cluster does not answer.
    #[must_use]
    pub fn fenced(&self) -> Vec<String> {
        let listed = self.run("ceph osd blocklist ls");
        let lines = listed.lines().filter(|line| line.contains(':') && !line.contains("192.0.2.1"));
        lines.map(ToOwned::to_owned).collect()
    }

    /// The address of the client that has the lock of an image.
    ///
    /// # Panics
    /// The cluster does not answer.
    #[must_use]
    pub fn lock_owner(&self, image: &str) -> Option<String> {
        let locks = self.run(&format!("rbd lock ls {image}"));
        let owner = locks.lines().find(|line| line.starts_with("client."))?;
        owner.split_whitespace().last().map(ToOwned::to_owned)
    }
}

impl Drop for CephCluster {
    fn drop(&mut self) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lab/ceph-cluster.sh");
        let _ = Command::new(script).arg(self.directory()).arg("stop").status();
    }
}

fn run(command: &mut Command) -> String {
    let output = command.output().expect(NEEDS);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said} ({NEEDS})");
    String::from_utf8_lossy(&output.stdout).into_owned()
}
