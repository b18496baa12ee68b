//! [`take`]: the precautions of a process started by hand: it survives memory pressure and keeps
//! its keys secret. For a service of systemd, its unit says so (`OOMScoreAdjust=`, `LimitCORE=`).

use std::fs;
use std::path::Path;

use nix::sys::resource::{Resource, setrlimit};

const SCORE: &str = "/proc/self/oom_score_adj";

/// Makes this process one of the last that the kernel kills when memory is short, and keeps its
/// memory, which has keys and data, out of core files. Best effort: a process without
/// `CAP_SYS_RESOURCE` keeps its score. Call it before that capability is given up.
pub fn take(oom_score: i16) {
    let service = std::env::var("SYSTEMD_EXEC_PID");
    if service.is_ok_and(|pid| pid == std::process::id().to_string()) {
        return;
    }
    lower(Path::new(SCORE), oom_score);
    let _ = setrlimit(Resource::RLIMIT_CORE, 0, 0);
}

/// Sets the score, unless a lower one is set already.
fn lower(file: &Path, score: i16) {
    let now = fs::read_to_string(file).ok().and_then(|text| text.trim().parse().ok());
    if now.is_some_and(|now: i16| now > score) {
        let _ = fs::write(file, score.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lower_score_stays() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("score");
        for (before, after) in [("0\n", "-900"), ("-1000\n", "-1000\n"), ("none", "none")] {
            fs::write(&file, before).unwrap();
            lower(&file, -900);
            assert_eq!(fs::read_to_string(&file).unwrap(), after);
        }
    }
}
