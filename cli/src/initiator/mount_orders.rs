//! `rblk-initiator upgrade` and `reload`: orders to mounts with a live process.

use std::path::{Path, PathBuf};
use std::process::{Command as Process, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use rblk_config::Exit;
use rblk_operate::mount::flags::CHECKED;
use rblk_operate::mount::lock::MountLock;
use rblk_operate::mount::mount_ask::{
    Ask, Response, ServingMount, ask, ask_any_version, socket_path,
};
use rblk_operate::mount::not_there::{NotMounted, NotRoot};
use rblk_operate::mount::run_dir::{must_be_readable, names};
use rblk_operate::{Output, said_once};
use rblk_protocol::auth::PublicKey;
use serde::Serialize;

use super::came::Came;
use super::initiatord::initiatord;
use super::known::{STATUS_TIME, must_be_known};
use super::root_disk;

/// Time for a program to start and report whether it could serve a mount. Nothing has changed then.
const CHECK_TIME: Duration = Duration::from_secs(20);
/// Time for a program to replace another: the driver may need that long to notice it.
const UPGRADE_TIME: Duration = Duration::from_secs(60);

/// Time for the new program to reach the target.
const RECONNECT_TIME: Duration = Duration::from_secs(5);

/// Hands one mount, or all, over to a program.
pub(super) fn upgrade(
    name: Option<&str>,
    program: Option<PathBuf>,
    output: Output,
) -> anyhow::Result<Exit> {
    if let Some(name) = name {
        must_be_known(name)?;
    }
    if !nix::unistd::geteuid().is_root() {
        return Err(NotRoot.into());
    }
    let program = match program {
        Some(program) => std::path::absolute(program)?,
        None => initiatord()?,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let one = |name: &str| runtime.block_on(upgrade_one(name, &program));
    of_living(name, output, one, upgraded)
}

/// The versions of the programs before and after an upgrade.
#[derive(Serialize)]
struct Versions {
    from_version: String,
    to_version: String,
}

/// A mount that no upgrade moves to another program. An upgrade of all mounts warns of it, and has
/// not failed: another try would find the same.
#[derive(Debug, thiserror::Error)]
#[error(
    "{socket} is the disk of a guest, which cannot be handed over: version {version} serves it until the virtual \
     machine and this mount end; the next `rblk-initiator vhost` is the new program"
)]
struct OfGuest {
    socket: String,
    version: String,
}

async fn upgrade_one(name: &str, program: &Path) -> anyhow::Result<Versions> {
    let before = match ask_any_version(&socket_path(name), STATUS_TIME).await {
        Ok(Some(before)) => before,
        Ok(None) => anyhow::bail!("the mount answered something else"),
        Err(_) if !MountLock::is_held(name) => {
            return Err(NotMounted { what: name.to_owned() }.into());
        }
        Err(error) => return Err(error).context("asking the mount"),
    };
    if before.is_of_guest() {
        return Err(OfGuest { socket: before.device, version: before.version }.into());
    }
    // Before any change.
    check_program(program, name).await?;
    root_disk::must_have(before.pid, program)?;
    let upgrade = Ask::Upgrade { program: program.to_owned() };
    // The process may be replaced before its answer gets out. The process that serves the mount
    // afterwards decides.
    if let Ok(Response::Error(text) | Response::Busy(text)) =
        ask(&socket_path(name), upgrade, STATUS_TIME).await
    {
        anyhow::bail!(text);
    }
    let begun = Instant::now();
    while begun.elapsed() < UPGRADE_TIME {
        let now = ask_any_version(&socket_path(name), STATUS_TIME).await;
        if let Ok(Some(now)) = now
            && now.recovered > before.recovered
        {
            until_connected(name, &before).await;
            return Ok(Versions { from_version: before.version, to_version: now.version });
        }
        // The lock goes from one program to the next without a gap.
        if !MountLock::is_held(name) {
            anyhow::bail!("the process ended; `rblk-initiator recover {name}` recovers it");
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    anyhow::bail!(
        "no process has served {} for {UPGRADE_TIME:?}; see the log, and `rblk-initiator list`",
        before.device
    )
}

/// Waits until the new program has its target again, if the old one had it: whoever reads `list`
/// next shall not see a pause of the upgrade as an outage. A target that is away by chance does not
/// make the upgrade fail.
async fn until_connected(name: &str, before: &ServingMount) {
    const CONNECTED: &str = "connected";
    let deadline = Instant::now() + RECONNECT_TIME;
    while before.state == CONNECTED && Instant::now() < deadline {
        match ask_any_version(&socket_path(name), STATUS_TIME).await {
            Ok(Some(now)) if now.state != CONNECTED => {}
            _ => return,
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Has one mount, or all, read the keys again.
pub(super) fn reload(
    name: Option<&str>,
    target_keys: &[PublicKey],
    output: Output,
) -> anyhow::Result<Exit> {
    must_be_readable()?;
    if let Some(name) = name {
        must_be_known(name)?;
    }
    let keys: Vec<String> = target_keys.iter().map(ToString::to_string).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let one = |name: &str| runtime.block_on(reload_one(name, &keys));
    of_living(name, output, one, |name, said| format!("{name}: {said}"))
}

/// Runs an action for one mount, or for each mount with a process, and reports the results. With
/// several mounts, each is tried.
fn of_living<T: Serialize>(
    name: Option<&str>,
    output: Output,
    one: impl Fn(&str) -> anyhow::Result<T>,
    words: impl Fn(&str, &T) -> String,
) -> anyhow::Result<Exit> {
    if let Some(name) = name {
        let outcome = one(name)?;
        output.aside(words(name, &outcome));
        let came = Came { name: name.to_owned(), outcome: Some(outcome), error: None };
        output.answer(&came, String::new)?;
        return Ok(Exit::Ok);
    }
    let (mut exit, mut came) = (Exit::Ok, Vec::new());
    for name in names().into_iter().filter(|name| MountLock::is_held(name)) {
        match one(&name) {
            Ok(outcome) => {
                output.aside(words(&name, &outcome));
                came.push(Came { name, outcome: Some(outcome), error: None });
            }
            Err(error) => {
                let text = said_once(error.as_ref());
                if error.is::<OfGuest>() {
                    output.aside(format_args!("rblk-initiator: WARN {name}: {text}"));
                } else {
                    output.aside(format_args!("rblk-initiator: {name}: {text}"));
                    exit = Exit::Failure;
                }
                came.push(Came { name, outcome: None, error: Some(text) });
            }
        }
    }
    output.answer(&came, String::new)?;
    Ok(exit)
}

async fn reload_one(name: &str, target_keys: &[String]) -> anyhow::Result<String> {
    let reload = Ask::Reload { target_keys: target_keys.to_vec() };
    match ask(&socket_path(name), reload, STATUS_TIME).await {
        Ok(Response::Reloaded(text)) => Ok(text),
        // An older program does not know this request.
        Ok(Response::Error(text)) if text.starts_with("not a request") => {
            anyhow::bail!(
                "it runs an older version; `rblk-initiator upgrade {name}` reads the keys, too"
            )
        }
        Ok(Response::Error(text) | Response::Busy(text)) => anyhow::bail!(text),
        Ok(_) => anyhow::bail!("the mount answered something else"),
        Err(_) if !MountLock::is_held(name) => Err(NotMounted { what: name.to_owned() }.into()),
        Err(error) => Err(error).context("asking the mount"),
    }
}

/// The result of an upgrade, in words.
fn upgraded(name: &str, versions: &Versions) -> String {
    let Versions { from_version: before, to_version: now } = versions;
    if before == now {
        return format!("{name}: a new process serves it, of the same version {now}");
    }
    format!("{name}: version {now} instead of {before}")
}

/// Asks a program whether it can recover the mount of a name.
async fn check_program(program: &Path, name: &str) -> anyhow::Result<()> {
    let mut process = Process::new(program);
    process.args(["recover", "--check", name]).stdin(Stdio::null());
    let asked = tokio::task::spawn_blocking(move || process.output());
    let output = tokio::time::timeout(CHECK_TIME, asked)
        .await
        .with_context(|| format!("{} does not end", program.display()))??;
    let output = output.with_context(|| format!("cannot run {}", program.display()))?;
    if !output.status.success() || !output.stdout.starts_with(CHECKED.as_bytes()) {
        anyhow::bail!(
            "{} cannot recover mount `{name}`: {}",
            program.display(),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_upgrade_to_the_same_version_does_not_look_like_a_mistake() {
        let of = |before: &str, now: &str| {
            let versions = Versions { from_version: before.to_owned(), to_version: now.to_owned() };
            upgraded("m", &versions)
        };
        assert_eq!(of("0.1.0", "0.2.0"), "m: version 0.2.0 instead of 0.1.0");
        assert_eq!(of("0.1.0", "0.1.0"), "m: a new process serves it, of the same version 0.1.0");
    }
}
