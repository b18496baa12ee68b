//! `rblk-target reload` and `dump`: the configuration of the running target.

use std::path::Path;

use rblk_config::Exit;
use rblk_operate::Output;
use rblk_operate::target::ask::{Ask, ReloadReport, Response};

use crate::target::host;
use crate::target::running::{asked, not_understood};

/// `rblk-target reload`.
pub(crate) fn reload(socket: &Path, dry_run: bool, output: Output) -> anyhow::Result<Exit> {
    let Response::Reload(report) = asked(socket, Ask::Reload { dry_run })? else {
        return Err(not_understood());
    };
    output.answer(&report, || told(&report))?;
    Ok(verdict(&report))
}

/// `rblk-target reload --hosts`.
pub(crate) fn hosts(socket: &Path, output: Output) -> anyhow::Result<Exit> {
    let Response::Hosts(report) = asked(socket, Ask::ReloadHosts)? else {
        return Err(not_understood());
    };
    output.answer(&report, || host::told(&report))?;
    Ok(Exit::Ok)
}

fn verdict(report: &ReloadReport) -> Exit {
    match (report.refused.is_empty(), report.difference.restart.is_empty()) {
        (false, _) => Exit::Failure,
        (true, false) => Exit::NeedsRestart,
        (true, true) => Exit::Ok,
    }
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
        lines.push("the running target matches its configuration".to_owned());
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
pub(crate) fn dump(socket: &Path, output: Output) -> anyhow::Result<Exit> {
    let Response::Dump(text) = asked(socket, Ask::Dump)? else {
        return Err(not_understood());
    };
    output.toml(&text)?;
    Ok(Exit::Ok)
}
