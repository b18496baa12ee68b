//! `rblk-target reload` and `dump`: the configuration of the target that runs.

use std::path::Path;

use rblk_config::Exit;
use rblk_target::args::Output;
use rblk_target::control::socket::{Ask, ReloadReport, Response};

use crate::{asked, host, not_understood};

/// `rblk-target reload`.
pub(crate) fn reload(socket: &Path, dry_run: bool, output: Output) -> anyhow::Result<Exit> {
    match asked(socket, Ask::Reload { dry_run })? {
        Ok(Response::Reload(report)) if output == Output::Json => {
            println!("{}", serde_json::to_string_pretty(&report)?);
            Ok(verdict(&report))
        }
        Ok(Response::Reload(report)) => {
            print!("{}", told(&report));
            Ok(verdict(&report))
        }
        Ok(_) => Err(not_understood()),
        Err(exit) => Ok(exit),
    }
}

/// `rblk-target reload --hosts`.
pub(crate) fn hosts(socket: &Path, output: Output) -> anyhow::Result<Exit> {
    match asked(socket, Ask::ReloadHosts)? {
        Ok(Response::Hosts(report)) if output == Output::Json => {
            println!("{}", serde_json::to_string_pretty(&report)?);
            Ok(Exit::Ok)
        }
        Ok(Response::Hosts(report)) => {
            println!("{}", host::told(&report));
            Ok(Exit::Ok)
        }
        Ok(_) => Err(not_understood()),
        Err(exit) => Ok(exit),
    }
}

fn verdict(report: &ReloadReport) -> Exit {
    if report.refused.is_empty() { Exit::Ok } else { Exit::Failure }
}

fn told(report: &ReloadReport) -> String {
    let (difference, access) = (&report.difference, &report.access);
    let mut lines: Vec<String> = difference.volumes.iter().map(ToString::to_string).collect();
    lines.extend(difference.hosts.iter().map(|host| format!("change host {host}")));
    lines.extend(difference.restart.iter().map(|key| format!("needs a restart: {key}")));
    lines.extend(report.refused.iter().map(|why| format!("REFUSED: {why}")));
    let faults = report.store_faults.iter();
    let faults: Vec<String> =
        faults.map(|(name, fault)| format!("WARN  {name}: {fault}")).collect();
    if lines.is_empty() {
        lines.push("the running target is what its configuration says".to_owned());
    } else if report.dry_run && report.refused.is_empty() {
        lines.push("nothing was changed; `rblk-target reload` does it".to_owned());
    } else if report.dry_run {
        lines.push("nothing was changed, and a reload would change nothing".to_owned());
    } else {
        lines.push("reloaded".to_owned());
    }
    if !report.dry_run {
        lines.push(host::told(access));
    }
    lines.extend(faults);
    lines.join("\n") + "\n"
}

/// `rblk-target dump`.
pub(crate) fn dump(socket: &Path) -> anyhow::Result<Exit> {
    match asked(socket, Ask::Dump)? {
        Ok(Response::Dump(text)) => {
            print!("{text}");
            Ok(Exit::Ok)
        }
        Ok(_) => Err(not_understood()),
        Err(exit) => Ok(exit),
    }
}
