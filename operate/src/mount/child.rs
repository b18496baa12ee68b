//! Waits, with a deadline, for a child process of this program that may wait for the target.

use std::io::{self, Read};
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

/// How often to check whether the process has ended.
const STEP: Duration = Duration::from_millis(5);
/// Limit of the output in bytes. The output must fit into a pipe.
const PRINTED_MAX: u64 = 4096;

/// Waits for the end of a process, and returns its exit status and output. Returns `None` after
/// `within`, and kills the process. The killed process may wait for the target and end later; a
/// thread reaps it. Blocks.
///
/// # Errors
/// The system's.
pub fn ended(mut process: Child, within: Duration) -> io::Result<Option<(ExitStatus, String)>> {
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = process.try_wait()? {
            break status;
        }
        if begun.elapsed() >= within {
            let _ = process.kill();
            std::thread::Builder::new().name("rblk-reaper".to_owned()).spawn(move || {
                let _ = process.wait();
            })?;
            return Ok(None);
        }
        std::thread::sleep(STEP);
    };
    let mut text = String::new();
    if let Some(out) = process.stdout.take() {
        out.take(PRINTED_MAX).read_to_string(&mut text)?;
    }
    Ok(Some((status, text.trim_end().to_owned())))
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn the_output_is_returned() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo; echo word; exit 7"]).stdout(Stdio::piped());
        let (status, text) =
            ended(command.spawn().unwrap(), Duration::from_secs(60)).unwrap().unwrap();
        assert_eq!((status.code(), text.as_str()), (Some(7), "\nword"));
    }

    #[test]
    fn a_process_that_was_killed_leaves_no_zombie() {
        let process = Command::new("sleep").arg("600").spawn().unwrap();
        let at = Path::new("/proc").join(process.id().to_string());
        assert!(ended(process, Duration::from_millis(20)).unwrap().is_none());
        let begun = Instant::now();
        while at.exists() {
            assert!(begun.elapsed() < Duration::from_secs(60), "it is not waited for");
            std::thread::sleep(STEP);
        }
    }
}
