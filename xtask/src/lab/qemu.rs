//! One QEMU process: its command line, its output and its end.
//!
//! The guest's output port is QEMU's stdout and stdin, as pipes: the guest's records come in one
//! way, and the answer to the last one goes the other way, after which the guest powers off. So
//! no output is lost however fast the guest ends. The emulated UART carries the kernel's console
//! alone, to the log file, as do QEMU's own messages.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};

use super::cache::Cache;
use super::engine::Engine;
use super::guest::Task;
use super::host;
use super::initramfs;
use super::kernel::Kernel;
use super::record::{Event, Reader};
use super::scratch::Disk;

/// How long a guest that has reported its status may take to power off.
const POWER_OFF: Duration = Duration::from_secs(10);

/// Of the kernel's command line:
/// - `panic=-1 oops=panic`: a broken guest ends at once;
/// - `mitigations=off nokaslr norandmaps`: they cost an emulated CPU much and protect nothing here.
///   A program at its usual addresses runs code that is translated already;
/// - `rcu_expedited`: every module load and mount waits for RCU;
/// - `audit=0` to `nowatchdog`: hooks, zeroed pages and counts, which cost each system call
///   something and protect nothing here;
/// - `loglevel=7`: the UART is slow.
const CMDLINE: &str = "console=ttyS0 panic=-1 oops=panic mitigations=off nokaslr norandmaps rcupdate.rcu_expedited=1 \
                       audit=0 lsm= init_on_alloc=0 hardened_usercopy=off randomize_kstack_offset=off \
                       kfence.sample_interval=0 cgroup_disable=memory psi=0 nowatchdog \
                       no_timer_check loglevel=7 rdinit=/init";

/// A guest to be run once.
#[derive(Debug)]
pub(crate) struct Machine<'a> {
    /// What to boot.
    pub(crate) kernel: &'a Kernel,
    /// How its CPUs are run.
    pub(crate) engine: Engine,
    /// Bytes of memory.
    pub(crate) mem: u64,
    /// Virtual CPUs.
    pub(crate) cpus: u32,
    /// Whether it gets this machine's files.
    pub(crate) root: bool,
    /// Its disk.
    pub(crate) scratch: Option<&'a Disk>,
    /// Limit on its life.
    pub(crate) timeout: Duration,
}

/// How a guest ended.
#[derive(Debug)]
pub(crate) enum End {
    /// The command ran and ended with this status.
    Exited(i32),
    /// The time limit came first.
    TimedOut,
    /// The guest died before the command started.
    NotBooted,
    /// The guest died, or could not run the command, for this reason.
    Died(String),
}

/// What the thread that reads QEMU's stdout tells.
#[derive(Debug)]
enum Notice {
    Started,
    Exited(i32),
    Failed(String),
    /// QEMU closed its stdout.
    Closed,
    /// The output could not be passed on.
    Output(std::io::Error),
}

impl Machine<'_> {
    /// Runs `task` and copies its output to `output`; the guest is gone when this returns. Gives
    /// the output back, unless the thread that writes it panicked.
    pub(crate) fn run<W: Write + Send + 'static>(
        &self,
        cache: &Cache,
        task: &Task,
        log: &Path,
        output: W,
    ) -> Result<(End, Option<W>)> {
        let work = cache.scratch_dir()?;
        let initrd = work.path().join("initrd");
        initramfs::join(
            &initramfs::base(cache, self.kernel)?,
            &task.archive(self.kernel),
            &initrd,
        )?;
        let stderr = OpenOptions::new()
            .create(true)
            .append(true)
            .open(log)
            .with_context(|| format!("cannot open {}", log.display()))?;
        let mut child = Guest(
            self.command(&initrd, log)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(stderr)
                .spawn()
                .context("cannot start qemu-system-x86_64 through setpriv")?,
        );
        let deadline = Instant::now() + self.timeout;
        let (notify, notices) = mpsc::channel();
        let stdout = child.0.stdout.take().context("QEMU has no stdout")?;
        let reader = Reader::new(&task.nonce);
        let pump = thread::spawn(move || pump(stdout, reader, output, &notify));
        let end = self.follow(&mut child, &notices, deadline);
        // Closes the pipe, which ends the thread.
        drop(child);
        let output = pump.join().ok();
        Ok((end?, output))
    }

    fn follow(
        &self,
        child: &mut Guest,
        notices: &mpsc::Receiver<Notice>,
        deadline: Instant,
    ) -> Result<End> {
        let mut started = false;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            return match notices.recv_timeout(left) {
                Ok(Notice::Started) => {
                    started = true;
                    continue;
                }
                Ok(Notice::Exited(status)) => {
                    child.power_off();
                    Ok(End::Exited(status))
                }
                Ok(Notice::Failed(why)) => {
                    child.power_off();
                    Ok(End::Died(format!("the guest could not run the command: {why}")))
                }
                Ok(Notice::Closed) | Err(RecvTimeoutError::Disconnected) => {
                    let why = "the guest died before the command ended";
                    Ok(if started { End::Died(why.to_owned()) } else { End::NotBooted })
                }
                Ok(Notice::Output(error)) => {
                    Err(anyhow!(error).context("cannot pass on the guest's output"))
                }
                Err(RecvTimeoutError::Timeout) => Ok(End::TimedOut),
            };
        }
    }

    fn command(&self, initrd: &Path, log: &Path) -> Command {
        // QEMU must not outlive this process, even one that is killed.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "qemu-system-x86_64"]);
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        command.args(["-machine", "pc", "-cpu", self.engine.cpu(), "-accel", self.engine.option()]);
        command.args(["-smp", &self.cpus.to_string(), "-m", &format!("{}M", self.mem >> 20)]);
        command.arg("-kernel").arg(self.kernel.image());
        command.arg("-initrd").arg(initrd);
        command.args(["-append", CMDLINE]);
        command.args([
            "-chardev",
            &format!("file,id=log,append=on,path={}", escape(log)),
            "-serial",
            "chardev:log",
        ]);
        command.args(["-chardev", "stdio,id=out,signal=off", "-device", "virtio-serial-pci"]);
        command.args(["-device", "virtserialport,chardev=out,name=rblk.out"]);
        if self.root {
            // Only root can give files to other users, which is what passthrough does.
            let model = if host::is_root() { "passthrough" } else { "none" };
            let share = format!("local,id=root,path=/,security_model={model},multidevs=remap");
            command.args(["-fsdev", &share, "-device", "virtio-9p-pci,fsdev=root,mount_tag=root"]);
        }
        if let Some(disk) = self.scratch {
            let path = escape(&disk.path());
            let drive = format!(
                "if=none,id=scratch,format=raw,cache=unsafe,discard=unmap,file.locking=off,file={path}"
            );
            command.args(["-drive", &drive, "-device", "virtio-blk-pci,drive=scratch"]);
        }
        command
    }
}

/// A QEMU process that is killed and waited for on drop.
#[derive(Debug)]
struct Guest(Child);

impl Guest {
    /// Answers the guest's last record, upon which it powers off, and waits for that.
    fn power_off(&mut self) {
        // The pipe stays open: QEMU would take its end for the port's and drop the answer.
        if let Some(stdin) = &mut self.0.stdin {
            // A guest that is gone already needs no answer.
            let _ = stdin.write_all(b"\n").and_then(|()| stdin.flush());
            let deadline = Instant::now() + POWER_OFF;
            while Instant::now() < deadline && matches!(self.0.try_wait(), Ok(None)) {
                thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Fails only for a process that has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn pump<W: Write>(
    mut stdout: ChildStdout,
    mut reader: Reader,
    mut output: W,
    notify: &mpsc::Sender<Notice>,
) -> W {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let bytes = match stdout.read(&mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(count) => &buffer[..count],
        };
        for event in reader.feed(bytes) {
            let notice = match event {
                Event::Output(bytes) => {
                    match output.write_all(&bytes).and_then(|()| output.flush()) {
                        Ok(()) => continue,
                        Err(error) => Notice::Output(error),
                    }
                }
                Event::Started => Notice::Started,
                Event::Exited(status) => Notice::Exited(status),
                Event::Failed(why) => Notice::Failed(why),
            };
            // The other side stops listening when it has its answer.
            let _ = notify.send(notice);
        }
    }
    let _ = notify.send(Notice::Closed);
    output
}

/// A path as part of a QEMU option, where a comma ends the value unless doubled.
fn escape(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

/// The last `lines` lines of a log.
pub(crate) fn tail(log: &Path, lines: usize) -> String {
    let bytes = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// The first line of a log by which a kernel says that something is broken. The oops of a kernel
/// that was broken before is not the cause.
pub(crate) fn fault(log: &Path) -> Option<String> {
    const WORDS: [&str; 5] =
        ["Oops: ", "general protection fault", "BUG: ", "kernel BUG at", "Kernel panic"];
    let bytes = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let line = text.lines().find(|line| WORDS.iter().any(|word| line.contains(word)));
    line.map(|line| line.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_is_the_end() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, "a\nb\nc\n").unwrap();
        assert_eq!(tail(file.path(), 2), "b\nc");
        assert_eq!(tail(file.path(), 9), "a\nb\nc");
        assert_eq!(tail(Path::new("/nonexistent"), 2), "");
    }

    #[test]
    fn the_fault_is_the_cause_and_not_its_end() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let oops = "[ 9.0] Oops: int3: 0000 [#1] SMP NOPTI";
        let text = format!("[ 8.0] up\n{oops}\n[ 9.1] Kernel panic - not syncing: Fatal\n");
        std::fs::write(&file, text).unwrap();
        assert_eq!(fault(file.path()).as_deref(), Some(oops));
        let bug = "[ 7.0] BUG: Bad page state in process fio";
        std::fs::write(&file, format!("{bug}\n{oops}\n")).unwrap();
        assert_eq!(fault(file.path()).as_deref(), Some(bug));
        std::fs::write(&file, "[ 9.1] Kernel panic - not syncing: x\n").unwrap();
        assert_eq!(fault(file.path()).as_deref(), Some("[ 9.1] Kernel panic - not syncing: x"));
        std::fs::write(&file, "[ 8.0] up\n").unwrap();
        assert_eq!(fault(file.path()), None);
    }

    #[test]
    fn commas_in_paths_are_doubled() {
        assert_eq!(escape(Path::new("/a,b")), "/a,,b");
    }
}
