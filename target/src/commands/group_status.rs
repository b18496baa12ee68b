//! `rblk-target group status`: who owns the images of a group of targets, and who holds their
//! volumes, as the cluster has it. So any member can tell, also while its target does not run.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use rblk_config::{BackingConfig, Exit, ImageName, TargetConfig};
use rblk_operate::table::{Column, Table};
use rblk_operate::target::refusal::Refusal;
use rblk_operate::target::status::HolderStatus;
use rblk_operate::{Output, said_once};
use rblk_protocol::AccessMode;
use serde::Serialize;

use crate::record::holders::HolderRecord;
use crate::store::StoreError;
use crate::store::rbd::group_look::{FencedClient, GroupLook, GroupLooker};
use crate::store::rbd::{ClusterPlace, ImageError};

/// Seconds of a year.
const YEAR: u64 = 31_556_952;

/// The group, in JSON.
#[derive(Serialize)]
struct GroupReport {
    /// The name that all its members have.
    name: Option<String>,
    /// The member whose configuration was read.
    member: Option<String>,
    volumes: Vec<GroupVolume>,
    /// The clients that a group has fenced.
    fenced: Vec<FencedReport>,
}

/// A volume of the group, in JSON.
#[derive(Serialize, Default)]
struct GroupVolume {
    name: String,
    image: String,
    /// The member that owns the image. Null: none does.
    owner: Option<String>,
    /// The addresses of the owner.
    addresses: Vec<String>,
    /// How often the owner has changed. 0: no member has had the image.
    epoch: u64,
    /// The address of the owner's client of the cluster.
    client: Option<String>,
    /// The address of the client that has the lock of the image.
    lock: Option<String>,
    holder: Option<HolderStatus>,
    /// The number of the holder.
    generation: u64,
    /// Why the cluster does not tell.
    error: Option<String>,
}

/// A fenced client, in JSON.
#[derive(Serialize)]
struct FencedReport {
    address: String,
    until: String,
}

/// Shows the group of the target with this configuration.
///
/// # Errors
/// The configuration is unusable or has no image, the clusters do not answer, or the answer cannot
/// be written.
pub fn group_status(path: &Path, output: Output) -> anyhow::Result<Exit> {
    let config = TargetConfig::load(path)?;
    let volumes = config.volumes.iter().filter_map(|volume| match volume.backing() {
        Ok(BackingConfig::Rbd { image, cluster, .. }) if image.snap.is_none() => {
            Some((volume.name.clone(), image, ClusterPlace::from(&cluster)))
        }
        _ => None,
    });
    let volumes: Vec<_> = volumes.collect();
    if volumes.is_empty() {
        let text = format!(
            "{} has no volume on an image of a Ceph cluster, and a group of targets serves nothing else",
            path.display()
        );
        return Err(Refusal::senseless(text).into());
    }
    let (mut loaded, mut failure) = (Vec::new(), None);
    let mut report = GroupReport {
        name: config.name.clone(),
        member: config.member.clone(),
        volumes: Vec::new(),
        fenced: Vec::new(),
    };
    for (name, image, place) in volumes {
        let shown = image.to_string();
        report.volumes.push(match seen(&mut loaded, &place, &image) {
            Ok(look) => of_look(name, shown, look),
            Err(error) => {
                let error = anyhow::Error::from(StoreError::from(error));
                let text = said_once(error.as_ref());
                output.aside(format_args!("rblk-target: volume `{name}`: {text}"));
                failure.get_or_insert(crate::daemon::targetd_exit::exit_of(&error));
                GroupVolume { name, image: shown, error: Some(text), ..GroupVolume::default() }
            }
        });
    }
    let now = SystemTime::now();
    for (_, looker, image) in &loaded {
        let fenced = looker.fenced(image).map_err(StoreError::from)?;
        report.fenced.extend(fenced.into_iter().filter(|one| is_long(&one.until, now)).map(told));
    }
    output.answer(&report, || shown(&report))?;
    Ok(failure.unwrap_or(Exit::Ok))
}

/// What the cluster knows of an image. Each cluster and user has one client.
fn seen(
    lookers: &mut Vec<(ClusterPlace, GroupLooker, ImageName)>,
    place: &ClusterPlace,
    image: &ImageName,
) -> Result<GroupLook, ImageError> {
    if let Some((_, looker, _)) = lookers.iter().find(|(known, ..)| known == place) {
        return looker.look(image);
    }
    let looker = GroupLooker::connect(place, image)?;
    let look = looker.look(image);
    lookers.push((place.clone(), looker, image.clone()));
    look
}

fn told(FencedClient { address, until }: FencedClient) -> FencedReport {
    FencedReport { address, until }
}

fn of_look(name: String, image: String, look: GroupLook) -> GroupVolume {
    let GroupLook { owner, lock, holder } = look;
    let is_owned = !owner.client.is_empty();
    GroupVolume {
        name,
        image,
        owner: is_owned.then_some(owner.member),
        addresses: if is_owned { owner.addresses } else { Vec::new() },
        epoch: owner.epoch,
        client: is_owned.then_some(owner.client),
        lock,
        generation: holder.as_ref().map_or(0, |holder| holder.generation.0),
        holder: holder.as_ref().map(status_of),
        error: None,
    }
}

fn status_of(holder: &HolderRecord) -> HolderStatus {
    HolderStatus {
        host: holder.host_name.to_string(),
        shared: holder.mode == AccessMode::Shared,
        present: holder.present,
    }
}

/// Whether a fence that ends then is of a group. Groups fence for ten years, and others for hours.
/// Ceph writes the year first.
fn is_long(until: &str, now: SystemTime) -> bool {
    let now = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let year = until.split('-').next().and_then(|year| year.parse::<u64>().ok());
    year.is_some_and(|year| year > 1970 + now / YEAR + 1)
}

fn shown(report: &GroupReport) -> String {
    let mut table = Table::new([
        Column::name("VOLUME"),
        Column::name("IMAGE"),
        Column::name("OWNER"),
        Column::figure("EPOCH"),
        Column::word("LOCK"),
        Column::name("HELD BY"),
        Column::name("ADDRESSES"),
    ]);
    for volume in report.volumes.iter().filter(|volume| volume.error.is_none()) {
        let none = || "-".to_owned();
        let owner = volume.owner.as_deref().map(|owner| match owner {
            "" => "(no member)".to_owned(),
            owner => owner.to_owned(),
        });
        table.row([
            volume.name.clone(),
            volume.image.clone(),
            owner.unwrap_or_else(none),
            volume.epoch.to_string(),
            lock_word(volume).to_owned(),
            volume.holder.as_ref().map_or_else(none, |holder| match holder.present {
                true => holder.host.clone(),
                false => format!("{} (away)", holder.host),
            }),
            volume.addresses.join(" "),
        ]);
    }
    let member = report.member.as_ref().map(|member| format!(", as member {member} sees it"));
    let name = report.name.as_deref().unwrap_or("a target without a name");
    let mut text = format!("{name}{}\n", member.unwrap_or_default());
    if !table.is_empty() {
        text += &format!("\n{table}");
    }
    if !report.fenced.is_empty() {
        text += "\nclients that a group has fenced:\n";
    }
    for FencedReport { address, until } in &report.fenced {
        text += &format!("{address} until {until}\n");
    }
    text
}

/// Whose the lock of an image is.
fn lock_word(volume: &GroupVolume) -> &'static str {
    match (&volume.lock, &volume.client) {
        (None, _) => "free",
        (Some(lock), Some(client)) if lock == client => "owner",
        (Some(_), _) => "other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_of_the_owner_or_of_another_client() {
        let volume = |lock: Option<&str>, client: Option<&str>| GroupVolume {
            lock: lock.map(str::to_owned),
            client: client.map(str::to_owned),
            ..GroupVolume::default()
        };
        assert_eq!(lock_word(&volume(None, Some("c"))), "free");
        assert_eq!(lock_word(&volume(Some("c"), Some("c"))), "owner");
        assert_eq!(lock_word(&volume(Some("c"), None)), "other");
        assert_eq!(lock_word(&volume(Some("c"), Some("d"))), "other");
    }

    #[test]
    fn a_fence_of_ten_years_is_of_a_group_and_one_of_an_hour_is_not() {
        let now = UNIX_EPOCH + std::time::Duration::from_secs(1_796_000_000);
        assert!(is_long("2036-11-26T12:19:25.132226+0000", now));
        assert!(!is_long("2026-11-29T13:19:25.132226+0000", now));
        assert!(!is_long("2027-01-01T00:00:00.000000+0000", now));
        assert!(!is_long("", now));
    }
}
