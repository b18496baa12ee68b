//! `rblk-target check`: a configuration, its stores and this host, without serving.

use std::path::Path;

use crate::commands::review::{FoundVolume, Reviewed, review};
use crate::daemon::targetd_exit::exit_of;
use rblk_config::{Auth, Exit, TargetConfig, ignored_drop_ins};
use rblk_operate::target::defaults::{NO_HOST, NO_VOLUME};
use rblk_operate::{Output, said_once};
use serde::Serialize;

use rblk_operate::target::ask::{Ask, Response};
use rblk_operate::target::client::ask;
use rblk_operate::target::listen::fill_in;
use rblk_operate::target::status::TargetStatus;

use crate::daemon::CAN_RDMA;

/// The findings, in JSON.
#[derive(Serialize)]
struct CheckReport {
    volumes: Vec<VolumeCheck>,
    warnings: Vec<String>,
}

/// A volume, in JSON.
#[derive(Serialize)]
struct VolumeCheck {
    name: String,
    /// The volume as it would be served. Null: it would not be.
    #[serde(flatten)]
    served: Option<Reviewed>,
    /// The member of the group that serves it now: that is no fault.
    elsewhere: Option<String>,
    /// Why it would not be served.
    error: Option<String>,
}

/// Checks a configuration.
///
/// # Errors
/// The configuration is unusable, or the answer cannot be written.
pub fn check(path: &Path, output: Output) -> anyhow::Result<Exit> {
    let mut config = TargetConfig::load(path)?;
    fill_in(&mut config, CAN_RDMA);
    // An error means that no target answers, or that it refuses.
    let running = running(&config.control_socket);
    let found = review(&config, running.as_ref())?;
    let mut warnings: Vec<String> = ignored_drop_ins(path).into_iter().collect();
    warnings.extend(found.warnings);
    let no_host = config.authentication() == Auth::Required && config.hosts.is_empty();
    let gaps = [(no_host, NO_HOST), (config.volumes.is_empty(), NO_VOLUME)];
    for gap in gaps.iter().filter(|(is_one, _)| *is_one).map(|(_, gap)| gap) {
        output.aside(format_args!("rblk-target: {gap}"));
    }
    for warning in &warnings {
        output.aside(format_args!("rblk-target: warning: {warning}"));
    }
    warnings.extend(gaps.iter().filter(|(is_one, _)| *is_one).map(|(_, gap)| (*gap).to_owned()));
    let mut exit = Exit::Ok;
    let mut checked = CheckReport { volumes: Vec::new(), warnings };
    for (name, volume) in found.volumes {
        let (served, elsewhere, error) = match volume {
            Ok(FoundVolume::Here(reviewed)) => {
                output.text(format_args!("{name}: {}", in_words(&reviewed)))?;
                if let Some(found) = reviewed.contradiction {
                    output.aside(format_args!("rblk-target: warning: volume `{name}`: {found}"));
                }
                (Some(reviewed), None, None)
            }
            Ok(FoundVolume::Elsewhere(who)) => {
                output.text(format_args!("{name}: ok, {who}"))?;
                (None, Some(who), None)
            }
            Err(error) => {
                let text = said_once(error.as_ref());
                output.aside(format_args!("rblk-target: {text}"));
                exit = if exit == Exit::Ok { exit_of(&error) } else { exit };
                (None, None, Some(text))
            }
        };
        checked.volumes.push(VolumeCheck { name, served, elsewhere, error });
    }
    output.answer(&checked, String::new)?;
    Ok(exit)
}

/// The status of the target at a socket; `None` without an answer.
fn running(path: &Path) -> Option<TargetStatus> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    match runtime.block_on(ask(path, Ask::Status)) {
        Ok(Response::Status(status)) => Some(*status),
        _ => None,
    }
}

fn in_words(reviewed: &Reviewed) -> String {
    let Reviewed { blocks, block_bytes, served_by, .. } = reviewed;
    let by = served_by.map(|pid| format!("; the running target (process {pid}) serves it"));
    format!("ok, {blocks} blocks of {block_bytes} bytes{}", by.unwrap_or_default())
}
