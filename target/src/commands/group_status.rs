//! `rblk-target group status`: who owns the images of a group of targets, and who holds their
//! volumes, as the cluster has it. So any member can tell, also while its target does not run.

use std::panic::resume_unwind;
use std::path::Path;
use std::thread;
use std::time::SystemTime;

use rblk_config::{BackingConfig, Exit, ImageName, TargetConfig};
use rblk_operate::table::{Column, Table};
use rblk_operate::target::refusal::Refusal;
use rblk_operate::target::status::HolderStatus;
use rblk_operate::{Output, said_once};
use rblk_protocol::AccessMode;
use serde::Serialize;

use crate::record::holders::HolderRecord;
use crate::store::StoreError;
use crate::store::rbd::fencing::fenced_client::FencedClient;
use crate::store::rbd::group_look::{GroupLook, GroupLooker};
use crate::store::rbd::{ClusterPlace, ImageError};

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
    /// Why a cluster does not tell them.
    fenced_errors: Vec<String>,
}

impl GroupReport {
    /// Adds what a user of a cluster sees. Users of one cluster see the same clients.
    fn add_fenced(&mut self, listed: Result<Vec<FencedClient>, String>, now: SystemTime) {
        let listed = listed.unwrap_or_else(|error| {
            self.fenced_errors.push(error);
            Vec::new()
        });
        for FencedClient { address, until } in listed.into_iter().filter(|one| one.is_long(now)) {
            let one = FencedReport { address, until };
            if !self.fenced.contains(&one) {
                self.fenced.push(one);
            }
        }
    }
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
#[derive(Serialize, PartialEq, Eq)]
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
    let (looks, lookers) = look_at_all(&volumes);
    let mut failure = None;
    let mut report = GroupReport {
        name: config.name.clone(),
        member: config.member.clone(),
        volumes: Vec::new(),
        fenced: Vec::new(),
        fenced_errors: Vec::new(),
    };
    for ((name, image, _), look) in volumes.into_iter().zip(looks) {
        let shown = image.to_string();
        report.volumes.push(match look {
            Ok(look) => of_look(name, shown, look),
            Err(UnseenImage { text, exit }) => {
                output.aside(format_args!("rblk-target: volume `{name}`: {text}"));
                failure.get_or_insert(exit);
                GroupVolume { name, image: shown, error: Some(text), ..GroupVolume::default() }
            }
        });
    }
    let now = SystemTime::now();
    for (looker, image) in &lookers {
        let listed = looker.fenced(image).map_err(|error| {
            let UnseenImage { text, exit } = error.into();
            failure.get_or_insert(exit);
            text
        });
        report.add_fenced(listed, now);
    }
    output.answer(&report, || shown(&report))?;
    Ok(failure.unwrap_or(Exit::Ok))
}

/// Why a cluster does not tell.
#[derive(Clone)]
struct UnseenImage {
    text: String,
    exit: Exit,
}

impl From<ImageError> for UnseenImage {
    fn from(error: ImageError) -> Self {
        let error = anyhow::Error::from(StoreError::from(error));
        let exit = crate::daemon::targetd_exit::exit_of(&error);
        Self { text: said_once(error.as_ref()), exit }
    }
}

impl UnseenImage {
    /// The same of another image.
    fn of(&self, (known, image): (&ImageName, &ImageName)) -> Self {
        let text = self.text.replacen(&known.to_string(), &image.to_string(), 1);
        Self { text, exit: self.exit }
    }
}

/// A volume on an image.
type GroupImage = (String, ImageName, ClusterPlace);
/// A client of a cluster, with one of its images.
type SeenBy = (GroupLooker, ImageName);
/// What a cluster knows of an image.
type ImageLook = Result<GroupLook, UnseenImage>;

/// What the clusters know of the images, in their order. Each cluster and user has one client, and
/// all are asked side by side: one that does not answer delays no other.
fn look_at_all(volumes: &[GroupImage]) -> (Vec<ImageLook>, Vec<SeenBy>) {
    let mut users: Vec<Vec<(usize, &GroupImage)>> = Vec::new();
    for numbered @ (_, (.., place)) in volumes.iter().enumerate() {
        match users.iter_mut().find(|user| user[0].1.2 == *place) {
            Some(user) => user.push(numbered),
            None => users.push(vec![numbered]),
        }
    }
    let (mut looks, mut lookers) = (Vec::new(), Vec::new());
    thread::scope(|scope| {
        let threads: Vec<_> =
            users.iter().map(|images| scope.spawn(|| look_by_one(images))).collect();
        for thread in threads {
            let (looked, looker) = thread.join().unwrap_or_else(|panic| resume_unwind(panic));
            looks.extend(looked);
            lookers.extend(looker);
        }
    });
    looks.sort_by_key(|(at, _)| *at);
    (looks.into_iter().map(|(_, look)| look).collect(), lookers)
}

/// The same of the images of one user of a cluster.
fn look_by_one(images: &[(usize, &GroupImage)]) -> (Vec<(usize, ImageLook)>, Option<SeenBy>) {
    let Some((_, (_, first, place))) = images.first() else { return (Vec::new(), None) };
    let looker = match GroupLooker::connect(place, first).map_err(UnseenImage::from) {
        Ok(looker) => looker,
        Err(error) => {
            let of =
                |(at, (_, image, _)): &(usize, &GroupImage)| (*at, Err(error.of((first, image))));
            return (images.iter().map(of).collect(), None);
        }
    };
    let looks = thread::scope(|scope| {
        let begin = |(at, (_, image, _)): &(usize, &'_ GroupImage)| {
            let looker = &looker;
            let image = image.clone();
            (*at, scope.spawn(move || looker.look(&image).map_err(UnseenImage::from)))
        };
        let threads: Vec<_> = images.iter().map(begin).collect();
        let ended = threads
            .into_iter()
            .map(|(at, thread)| (at, thread.join().unwrap_or_else(|panic| resume_unwind(panic))));
        ended.collect()
    });
    (looks, Some((looker, first.clone())))
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
    if !report.fenced.is_empty() || !report.fenced_errors.is_empty() {
        text += "\nclients that a group has fenced:\n";
    }
    for FencedReport { address, until } in &report.fenced {
        text += &format!("{address} until {until}\n");
    }
    for error in &report.fenced_errors {
        text += &format!("{error}\n");
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
    use std::time::UNIX_EPOCH;

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

    fn report() -> GroupReport {
        let (name, member) = (Some("store".to_owned()), Some("a".to_owned()));
        let volumes = vec![GroupVolume {
            name: "vol0".to_owned(),
            owner: Some("b".to_owned()),
            ..GroupVolume::default()
        }];
        GroupReport { name, member, volumes, fenced: Vec::new(), fenced_errors: Vec::new() }
    }

    #[test]
    fn a_cluster_that_cannot_be_reached_is_told_for_each_image() {
        let text = "rbd/v: no monitor answers within 10 s".to_owned();
        let (v, w): (ImageName, ImageName) = ("rbd/v".parse().unwrap(), "rbd/w".parse().unwrap());
        let other = UnseenImage { text, exit: Exit::Failure }.of((&v, &w));
        assert_eq!(other.text, "rbd/w: no monitor answers within 10 s");
    }

    #[test]
    fn the_owners_are_told_also_when_the_fenced_clients_are_not() {
        let mut report = report();
        report.add_fenced(Err("rbd/v: cannot list the fenced clients".to_owned()), UNIX_EPOCH);
        let text = shown(&report);
        let (table, below) = text.split_once("clients that a group has fenced").unwrap();
        assert!(table.contains("vol0") && below.contains("cannot list"), "{text}");
    }

    #[test]
    fn a_fence_that_two_users_of_a_cluster_see_is_told_once() {
        let fenced = |address: &str, until: &str| FencedClient {
            address: address.to_owned(),
            until: until.to_owned(),
        };
        let mut report = report();
        let one = fenced("127.0.0.1:0/1", "2036-11-26T12:00:00.000000+0000");
        let hour = fenced("127.0.0.1:0/2", "1970-01-01T01:00:00.000000+0000");
        // A client of another cluster has the same address.
        let other = fenced("127.0.0.1:0/1", "2035-11-26T12:00:00.000000+0000");
        for listed in [vec![one.clone(), hour], vec![one.clone()], vec![other.clone()]] {
            report.add_fenced(Ok(listed), UNIX_EPOCH);
        }
        let told = report.fenced.iter().map(|FencedReport { address, until }| (address, until));
        let expected = [&one, &other].map(|client| (&client.address, &client.until));
        assert_eq!(told.collect::<Vec<_>>(), expected);
    }
}
