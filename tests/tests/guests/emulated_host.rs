//! [`EmulatedHost`]: a Debian under QEMU, by the lines of its console; and [`make_images`], which
//! makes one.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Time to make images: most of it is the download.
const IMAGES: Duration = Duration::from_secs(1800);
/// Of the command line of the kernel:
///
/// - `panic=-1 oops=panic`: a broken guest ends at once;
/// - `tsc=unstable`: on a busy machine the kernel measures the emulated TSC wrong by any factor, or
///   gives it up after minutes and changes its own code for that, which an emulated CPU may run
///   meanwhile. So it uses another clock at once;
/// - the others: work that costs an emulated CPU much and protects nothing here.
const KERNEL: &str = "console=ttyS0 panic=-1 oops=panic tsc=unstable no_timer_check nokaslr \
                      norandmaps mitigations=off audit=0 psi=0 nowatchdog init_on_alloc=0 \
                      hardened_usercopy=off randomize_kstack_offset=off kfence.sample_interval=0";
/// Time between two lines of an emulated guest.
const SILENCE: Duration = Duration::from_secs(400);

/// A host under QEMU. Drop kills it.
pub(crate) struct EmulatedHost {
    child: Child,
    lines: Receiver<String>,
    said: Vec<String>,
}

impl EmulatedHost {
    /// Boots `vmlinuz` and an initramfs of a directory, with words on the command line of the
    /// kernel, and more arguments of QEMU. The host reaches this machine by 10.0.2.2.
    pub(crate) fn boot(dir: &Path, initrd: &str, words: &str, more: &[&str]) -> Self {
        let log = File::create(dir.join(format!("{initrd}.qemu"))).unwrap();
        let command_line = format!("{KERNEL} rw {words}");
        let mut child = Command::new("nice")
            .args(["-n", "10", "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-smp", "2"])
            .args(["-cpu", "max,la57=off,smap=off,smep=off", "-m", "1536", "-nodefaults"])
            .args(["-display", "none", "-no-reboot", "-serial", "stdio"])
            .args(["-nic", "user,model=virtio-net-pci", "-device", "virtio-rng-pci"])
            .arg("-kernel")
            .arg(dir.join("vmlinuz"))
            .arg("-initrd")
            .arg(dir.join(initrd))
            .args(["-append", &command_line])
            .args(more)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .expect("QEMU");
        let mut console = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            // Bytes, as the console shows progress by control characters.
            let mut line = Vec::new();
            while console.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
                if sender.send(String::from_utf8_lossy(&line).trim_end().to_owned()).is_err() {
                    break;
                }
                line.clear();
            }
        });
        Self { child, lines, said: Vec::new() }
    }

    /// The next line of the console.
    pub(crate) fn next_line(&mut self) -> String {
        let Ok(line) = self.lines.recv_timeout(SILENCE) else {
            panic!("the guest says nothing more:\n{}", self.said.join("\n"));
        };
        self.said.push(line.clone());
        let is_bad = line.contains("guest: failed") || line.contains("Kernel panic");
        assert!(!is_bad, "{}", self.rest());
        line
    }

    /// Waits for a line with these words, and returns the line.
    pub(crate) fn wait_for(&mut self, words: &str) -> String {
        loop {
            let line = self.next_line();
            if line.contains(words) {
                return line;
            }
        }
    }

    /// Everything that the console says, up to the end of a host that has failed.
    fn rest(&mut self) -> String {
        while let Ok(line) = self.lines.recv_timeout(SILENCE) {
            self.said.push(line);
        }
        self.said.join("\n")
    }

    /// The lines so far.
    pub(crate) fn said(&self) -> &[String] {
        &self.said
    }

    /// Waits for the end of QEMU.
    pub(crate) fn must_end(&mut self) {
        assert!(self.child.wait().unwrap().success(), "{}", self.said.join("\n"));
    }
}

impl Drop for EmulatedHost {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Makes kernel, images and root file systems in a directory, by a script beside this file, in a
/// mount namespace of its own. The script gets the checkout and one more argument.
pub(crate) fn make_images(dir: &Path, script: &str, given: &Path) {
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let log = File::create(dir.join("images.log")).unwrap();
    let mut child = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "bash"])
        .arg(checkout.join("tests/tests/guests").join(script))
        .arg(checkout)
        .arg(given)
        .current_dir(dir)
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .expect("unshare");
    let begun = Instant::now();
    let ended = loop {
        if let Some(ended) = child.try_wait().unwrap() {
            break ended.success();
        }
        if begun.elapsed() > IMAGES {
            let _ = child.kill();
            break false;
        }
        std::thread::sleep(Duration::from_millis(500));
    };
    assert!(ended, "{}", std::fs::read_to_string(dir.join("images.log")).unwrap());
}
