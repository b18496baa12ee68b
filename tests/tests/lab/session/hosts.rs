//! [`Hosts`]: `store1` and `client1`, each with its own name, `/etc`, `/srv`, `/var/lib` and
//! `/run/rblk`. The hosts share the kernel, its network, and mounts below `/mnt`.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use rblk_tests::lab::{DEADLINE, Lab, Running, until};

use super::super::sh;

const NAMES: [&str; 2] = ["store1", "client1"];
/// Time for one command.
const LIMIT: Duration = Duration::from_secs(90);

/// Makes a host, and keeps it. Its `/etc` is a list of links to the machine's files.
const HOST: &str = r#"
set -e
echo "$1" >/proc/sys/kernel/hostname
mount --make-private /
mkdir -p "$2/etc" "$2/real" "$2/srv" "$2/lib" "$2/run" /run/rblk
mount --bind /etc "$2/real"
ln -s "$2"/real/* "$2/etc/"
rm -f "$2/etc/machine-id" "$2/etc/rblk"
printf %s "$1" | md5sum | cut -c1-32 >"$2/etc/machine-id"
mkdir "$2/etc/rblk"
mount --bind "$2/etc" /etc
mount --bind "$2/srv" /srv
mount --bind "$2/lib" /var/lib
mount --bind "$2/run" /run/rblk
touch "$2/ready"
exec sleep infinity"#;

/// Both hosts. Drop ends them.
pub(super) struct Hosts<'l> {
    lab: &'l Lab,
    hosts: [Running; 2],
}

impl<'l> Hosts<'l> {
    pub(super) fn start(lab: &'l Lab) -> Self {
        let mnt = lab.path("mnt").display().to_string();
        std::fs::create_dir_all(&mnt).expect("a directory");
        sh(&["mount", "--bind", &mnt, "/mnt"]);
        sh(&["mount", "--make-shared", "/mnt"]);
        let hosts = NAMES.map(|name| {
            let dir = directory(lab, name);
            std::fs::create_dir_all(&dir).expect("a directory");
            let mut command = Command::new("unshare");
            command.args(["-m", "-u", "--propagation", "unchanged", "sh", "-c", HOST, "sh", name]);
            Running::start({
                command.arg(dir);
                command
            })
        });
        let mut hosts = Self { lab, hosts };
        for (at, name) in NAMES.iter().enumerate() {
            until(name, DEADLINE, || {
                assert!(hosts.hosts[at].is_running(), "{name} cannot be made");
                directory(lab, name).join("ready").exists().then_some(())
            });
        }
        hosts
    }

    /// The output of a command, both streams together. The host must be ready, or the command would
    /// run on the machine itself.
    pub(super) fn run(&self, host: &str, command: &str) -> String {
        let at = NAMES.iter().position(|name| *name == host);
        let pid = at.map(|at| self.hosts[at].pid()).unwrap_or_else(|| panic!("no host {host}"));
        let path = std::env::var("PATH").unwrap_or_default();
        let mut enter = Command::new("nsenter");
        enter.args([
            "-m",
            "-u",
            "-t",
            &pid.to_string(),
            "sh",
            "-c",
            "cd /; exec 2>&1; eval \"$1\"",
        ]);
        enter.args(["sh", command]);
        enter.env("PATH", format!("{}:{path}", self.lab.programs().display())).env("NO_COLOR", "1");
        Running::start(enter).finish(LIMIT).stdout
    }

    /// Writes a file, on the host that the path belongs to.
    pub(super) fn write(&self, path: &str, text: &str) {
        let host = if path.starts_with("/etc/rblk/target") { NAMES[0] } else { NAMES[1] };
        let place = directory(self.lab, host).join(path.trim_start_matches('/'));
        std::fs::write(&place, format!("{text}\n"))
            .unwrap_or_else(|e| panic!("writing {}: {e}", place.display()));
    }
}

impl Drop for Hosts<'_> {
    fn drop(&mut self) {
        // A failed session may leave mounts there.
        let _ = Command::new("umount").args(["-R", "-l", "/mnt"]).status();
    }
}

fn directory(lab: &Lab, name: &str) -> PathBuf {
    lab.path(name)
}
