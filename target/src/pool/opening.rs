//! [`open_volumes`]: opens the volumes of a configuration: files are locked, memory is mapped.
//!
//! A store that the program of the target before this one left open is not opened again.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use rblk_config::image::Contradiction;
use rblk_config::{
    BackingConfig, ByteSize, CacheMode, DirectIo, ImageName, TargetConfig, VolumeConfig,
};
use rblk_fabric::{PageKind, Region};
use rblk_operate::said_once;
use rblk_protocol::{BlockCount, BlockSize, Name};
use sha2::{Digest, Sha256};

use crate::pool::image;
use crate::store::backing::{Backing, Direct, LeftOpen, OpenOptions};
use crate::store::rbd::group_member::{GroupMember, MoreWishes};
use crate::store::rbd::image_claim::Wish;
use crate::store::rbd::{self, ClusterPlace, ImageError, ImageOptions};
use crate::store::{Image, Losses, OpenStore, StoreError, StoreErrorKind};
use crate::volume::ids::VolumeIndex;
use crate::volume::limits::Limiter;
use crate::volume::{Placement, Volume};
use rblk_operate::target::volume_notes::VolumeNotes;

/// How long to wait for the lock of a store: a target that was killed holds it until its last I/O
/// has ended.
const LOCK_WAIT: Duration = Duration::from_secs(5);

/// Discards of an image that are smaller, or not aligned to it, free no space
/// (`rbd_discard_granularity_bytes`).
const IMAGE_GRANULE: u32 = 64 << 10;

/// A volume that was opened.
#[derive(Debug)]
pub struct OpenedVolume {
    /// The exported volume.
    pub volume: Arc<Volume>,
    /// Its store, if it has one.
    pub backing: Option<OpenStore>,
    /// Notes for people.
    pub notes: VolumeNotes,
    /// The contradiction between its image and its block size, when it was opened.
    pub contradiction: Option<Contradiction>,
}

/// A file with another length than in the configuration.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {bytes} bytes, but the configuration says size = {configured}: {fix}")]
pub(crate) struct WrongSize {
    path: String,
    bytes: u64,
    configured: u64,
    fix: String,
}

impl WrongSize {
    /// The target never makes the file longer here: a file that was cut, or another file, looks
    /// like one that lost its new length in a power failure, and a file system that finds zeros may
    /// do harm.
    fn new(path: &Path, bytes: u64, configured: u64, is_file: bool) -> Self {
        let path = path.display().to_string();
        let fix = match is_file && bytes < configured {
            true => format!(
                "if the file was made longer and the host lost power then, `truncate -s {configured} {path}` does it again; \
                 else put the right file back, or correct `size`"
            ),
            false => "correct one of them".to_owned(),
        };
        Self { path, bytes, configured, fix }
    }
}

/// A configured volume that cannot be served as it is, while all others can.
#[derive(Clone, Debug)]
pub(crate) struct AwayVolume {
    /// The volume's name.
    pub name: String,
    /// Why, and the remedy.
    pub why: String,
    /// Another member of the group serves it: that is no fault.
    pub elsewhere: bool,
    /// It was handed over, and no member is known to serve it.
    pub handed_over: bool,
}

impl AwayVolume {
    /// A volume that is away for this reason, a fault.
    pub(crate) fn new(name: impl ToString, why: impl Into<String>) -> Self {
        Self { name: name.to_string(), why: why.into(), elsewhere: false, handed_over: false }
    }

    /// A volume that another member of the group serves.
    pub(crate) fn elsewhere(name: impl ToString, why: impl Into<String>) -> Self {
        Self { elsewhere: true, ..Self::new(name, why) }
    }

    /// A volume that was handed over, and that no member is known to serve.
    pub(crate) fn handed_over(name: impl ToString, why: impl Into<String>) -> Self {
        Self { handed_over: true, ..Self::new(name, why) }
    }

    /// A volume that could not be opened.
    pub(crate) fn unopened(name: impl ToString, error: &anyhow::Error) -> Self {
        let why = said_once(error.as_ref());
        Self { elsewhere: is_elsewhere(error), ..Self::new(name, why) }
    }
}

/// Opens every volume of a configuration, as the target would. `target` is the name of the target.
///
/// # Errors
/// The first volume that cannot be opened, with name and cause.
pub(crate) fn open_volumes(
    config: &TargetConfig,
    target: &Name,
) -> anyhow::Result<Vec<OpenedVolume>> {
    let member = member_of(config);
    config
        .volumes
        .iter()
        .enumerate()
        .map(|(index, volume)| {
            open_volume(index, volume, (target, member.as_ref()), LockWait::ForLocks)
                .with_context(|| format!("volume `{}`", volume.name))
        })
        .collect()
}

/// Opens the volumes of a configuration, if their files have the right length, and if their images
/// can be opened: a cluster is another machine. The others are left away and reported: their hosts
/// wait for them, and all other volumes are served. All images are opened side by side, so that
/// those of a cluster that does not answer delay the start once. Goes on with the stores that the
/// program before `left` open, by volume, if there was one. A store that it did not leave is left
/// away while its lock is held: a write of that program is still in the kernel.
///
/// # Errors
/// Any other reason why a volume cannot be opened, with name and cause. And if no volume were left.
pub(crate) fn open_right_ones(
    config: &TargetConfig,
    target: &Name,
    left: Option<HashMap<String, LeftOpen>>,
) -> anyhow::Result<(Vec<OpenedVolume>, Vec<AwayVolume>)> {
    let (mut opened, mut away) = (Vec::new(), Vec::new());
    let took_over = left.is_some();
    let mut left = left.unwrap_or_default();
    let member = member_of(config);
    let openings: Vec<_> =
        config.volumes.iter().map(|volume| begin_image(volume, member.as_ref())).collect();
    for (volume, opening) in config.volumes.iter().zip(openings) {
        let source = match (left.remove(&volume.name), opening) {
            (Some(left), _) => StoreSource::Left(left),
            (None, Some(opening)) => StoreSource::Opening(opening),
            (None, None) => StoreSource::Path(LockWait::ForLocks),
        };
        match open_from(opened.len(), volume, (target, member.as_ref()), source) {
            Ok(one) => match served_already(&opened, &one) {
                None => opened.push(one),
                Some(error) => away.push((volume, error)),
            },
            Err(error)
                if error.is::<WrongSize>()
                    || is_of_image(&error)
                    || (took_over && is_locked(&error)) =>
            {
                away.push((volume, error));
            }
            Err(error) => return Err(error.context(format!("volume `{}`", volume.name))),
        }
    }
    // A member of a group may serve no volume, and take those of others later.
    if opened.is_empty()
        && member.is_none()
        && let Some((volume, error)) = away.pop()
    {
        return Err(error.context(format!("volume `{}`", volume.name)));
    }
    let told = |(volume, error): (&VolumeConfig, anyhow::Error)| {
        let away = AwayVolume::unopened(&volume.name, &error);
        let AwayVolume { name, why, elsewhere, .. } = &away;
        match elsewhere {
            true => tracing::info!(volume = name, why, "another member serves a volume"),
            false => tracing::error!(
                volume = name,
                why,
                "the volume is not served, all others are; then `rblk-target reload` adds it"
            ),
        }
        away
    };
    Ok((opened, away.into_iter().map(told).collect()))
}

/// Begins to open the image of a volume, if it is on one. Another fault of its configuration is
/// found when the volume is opened.
fn begin_image(
    volume: &VolumeConfig,
    member: Option<&GroupMember>,
) -> Option<Result<rbd::Opening, ImageError>> {
    let Ok(BackingConfig::Rbd { image, cluster, .. }) = volume.backing() else { return None };
    let place = ClusterPlace::from(&cluster);
    let of = (volume.block_size, member);
    Some(rbd::begin_open(image_options(image, place, of, LockWait::ForLocks)))
}

fn image_options(
    name: ImageName,
    cluster: ClusterPlace,
    (block_size, member): (u32, Option<&GroupMember>),
    wait: LockWait,
) -> ImageOptions {
    let lock_wait = if wait == LockWait::No { Duration::ZERO } else { LOCK_WAIT };
    ImageOptions { name, cluster, block_size, lock_wait, group: member.cloned() }
}

/// A target in a group, as it claims images that nobody serves.
pub(crate) fn member_of(config: &TargetConfig) -> Option<GroupMember> {
    let (name, addresses) = (config.member.clone()?, config.listen.clone());
    let more = MoreWishes::default();
    Some(GroupMember { name, addresses, wish: Wish::Idle, may_break: true, more })
}

/// The users of clusters by which a member of a group opens images, each with one of its images. A
/// target in no group has none.
pub(crate) fn group_users(config: &TargetConfig) -> Vec<(ClusterPlace, ImageName)> {
    let mut users: Vec<(ClusterPlace, ImageName)> = Vec::new();
    for volume in config.volumes.iter().filter(|_| config.member.is_some()) {
        // Another fault of its configuration is found when the volume is opened.
        if let Ok(BackingConfig::Rbd { image, cluster, .. }) = volume.backing()
            && image.snap.is_none()
        {
            let place = ClusterPlace::from(&cluster);
            if users.iter().all(|(known, _)| *known != place) {
                users.push((place, image));
            }
        }
    }
    users
}

/// Why a volume cannot be served beside those: no lock keeps a second one from a snapshot of an
/// image, and both would have one UUID.
fn served_already(opened: &[OpenedVolume], one: &OpenedVolume) -> Option<anyhow::Error> {
    let same = opened.iter().find(|other| other.volume.uuid == one.volume.uuid)?;
    let name = same.volume.name;
    Some(anyhow::anyhow!("volume {name} has the same store: give each volume its own"))
}

/// Whether a volume is not opened because another member of the group serves it.
pub(crate) fn is_elsewhere(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(StoreError::Image(ImageError::Elsewhere { .. })))
}

/// Whether an image could not be opened.
fn is_of_image(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(StoreError::Image(_)))
}

fn is_locked(error: &anyhow::Error) -> bool {
    let error: Option<&StoreError> = error.downcast_ref();
    error.is_some_and(|error| error.kind() == StoreErrorKind::Locked)
}

/// Opens one volume beside those that are served, at the target of that name, or of that member of
/// a group.
///
/// # Errors
/// The volume cannot be opened, with name and cause.
pub(crate) fn open_one(
    index: usize,
    config: &VolumeConfig,
    target: (&Name, Option<&GroupMember>),
) -> anyhow::Result<OpenedVolume> {
    open_volume(index, config, target, LockWait::No)
        .with_context(|| format!("volume `{}`", config.name))
}

/// Whether to wait for the lock of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LockWait {
    /// As long as a target that was killed may hold it.
    ForLocks,
    /// Not at all.
    No,
}

/// The source of a store.
#[derive(Debug)]
enum StoreSource {
    /// A path to open.
    Path(LockWait),
    /// A store that is left open.
    Left(LeftOpen),
    /// An image that is being opened.
    Opening(Result<rbd::Opening, ImageError>),
}

impl StoreSource {
    fn open(
        self,
        config: &VolumeConfig,
        path: &Path,
        options: &OpenOptions,
    ) -> Result<Backing, StoreError> {
        let wait = match self {
            Self::Left(left) => return Backing::go_on(left, path, options),
            Self::Path(wait) => wait,
            // Only images are opened so.
            Self::Opening(_) => LockWait::ForLocks,
        };
        match Backing::open(path, &OpenOptions { lock_wait: Duration::ZERO, ..*options }) {
            Err(held @ (StoreError::Locked { .. } | StoreError::Claimed { .. }))
                if wait == LockWait::ForLocks =>
            {
                tracing::info!(volume = %config.name, within = ?LOCK_WAIT, %held, "waiting for the store");
                Backing::open(path, options)
            }
            opened => opened,
        }
    }
}

/// Opens one volume of a configuration.
///
/// # Errors
/// The volume cannot be opened: the cause, without the name of the volume.
pub(crate) fn open_volume(
    index: usize,
    config: &VolumeConfig,
    target: (&Name, Option<&GroupMember>),
    wait: LockWait,
) -> anyhow::Result<OpenedVolume> {
    open_from(index, config, target, StoreSource::Path(wait))
}

fn open_from(
    index: usize,
    config: &VolumeConfig,
    (target, member): (&Name, Option<&GroupMember>),
    source: StoreSource,
) -> anyhow::Result<OpenedVolume> {
    let mut volume = empty(index, config, target)?;
    let mut notes = VolumeNotes::default();
    let (mut backing, mut contradiction) = (None, None);
    // A store that goes on was examined when it was opened.
    let is_new = !matches!(source, StoreSource::Left(_));
    match config.backing()? {
        BackingConfig::File { path, size, direct, cache, read_ahead } => {
            let opened = open_store(config, path, direct, size.map(|size| size.0), source)?;
            volume.blocks = blocks_in(opened.size_bytes(), volume.block_size)?;
            store_keys(&mut volume, config, (cache, read_ahead))?;
            if opened.memory_alignment() > config.block_size {
                // A block of the volume that is cached in parts would be read and written in parts.
                tracing::warn!(
                    volume = %volume.name, path = %path.display(), alignment = opened.memory_alignment(),
                    "direct I/O there needs memory aligned to more than block_size: no cache for this volume"
                );
                volume.cache = CacheMode::None;
            }
            volume.discard = opened.can_discard();
            volume.discard_granularity_bytes = opened.discard_granularity();
            volume.read_only |= opened.read_only();
            contradiction = look_at(path, config, &opened).filter(|_| is_new);
            notes = VolumeNotes {
                path: Some(path.display().to_string()),
                direct: Some(opened.direct()),
                snapshot_of: config.snapshot_of.clone(),
            };
            backing = Some(OpenStore::Local(Arc::new(opened)));
        }
        BackingConfig::Rbd { image, cluster, size, cache, read_ahead } => {
            let begin = |wait| {
                let place = ClusterPlace::from(&cluster);
                rbd::begin_open(image_options(image, place, (config.block_size, member), wait))
            };
            let opening = match source {
                StoreSource::Opening(opening) => opening,
                StoreSource::Path(wait) => begin(wait),
                StoreSource::Left(_) => begin(LockWait::ForLocks),
            };
            let opened = opened_image(opening, size)?;
            volume.uuid = opened.uuid();
            volume.blocks = blocks_in(opened.size_bytes(), volume.block_size)?;
            store_keys(&mut volume, config, (cache, read_ahead))?;
            volume.discard = !opened.read_only();
            volume.discard_granularity_bytes = IMAGE_GRANULE;
            volume.is_durable_at_once = true;
            volume.read_only |= opened.read_only();
            let path = Some(opened.name());
            notes = VolumeNotes { path, direct: None, snapshot_of: config.snapshot_of.clone() };
            backing = Some(OpenStore::Image(Arc::new(opened)));
        }
        BackingConfig::Memory { size } => {
            volume.blocks = blocks_in(size.0, volume.block_size)?;
            let len = usize::try_from(size.0).context("size")?;
            volume.placement = Placement::Memory(Region::allocate(len, PageKind::Normal)?);
        }
        BackingConfig::Null { size } => volume.blocks = blocks_in(size.0, volume.block_size)?,
    }
    Ok(OpenedVolume { volume: Arc::new(volume), backing, notes, contradiction })
}

/// Sets the keys of a volume that has a store.
fn store_keys(
    volume: &mut Volume,
    config: &VolumeConfig,
    (cache, read_ahead): (CacheMode, ByteSize),
) -> anyhow::Result<()> {
    volume.placement = Placement::Store;
    volume.cache = cache;
    volume.cache_min_bytes = config.cache_min.unwrap_or_default().0;
    volume.cache_max_bytes = config.cache_max.map(|max| max.0);
    volume.read_ahead_bytes = u32::try_from(read_ahead.0).context("read_ahead")?;
    Ok(())
}

/// An image that is open and locked. It must have `size` bytes, if that is given.
fn opened_image(
    opening: Result<rbd::Opening, ImageError>,
    size: Option<ByteSize>,
) -> anyhow::Result<Image> {
    let opened = opening.and_then(rbd::Opening::end).map_err(StoreError::from)?;
    let bytes = opened.size_bytes();
    match size.map(|size| size.0).filter(|size| *size != bytes) {
        Some(configured) => {
            Err(WrongSize::new(Path::new(&opened.name()), bytes, configured, false).into())
        }
        None => Ok(opened),
    }
}

/// Logs a contradiction between the image of a store and the block size of its volume.
fn look_at(path: &Path, config: &VolumeConfig, opened: &Backing) -> Option<Contradiction> {
    let found = image::look(path, opened.size_bytes(), config.block_size)?;
    tracing::warn!(volume = %config.name, path = %path.display(), "{found}");
    Some(found)
}

/// A volume of a configuration without a size and a place for its bytes.
fn empty(index: usize, config: &VolumeConfig, target: &Name) -> anyhow::Result<Volume> {
    let name = Name::new(&config.name)?;
    let block_size = BlockSize::new(config.block_size).context("block size")?;
    Ok(Volume {
        index: VolumeIndex(u16::try_from(index).context("more than 65535 volumes")?),
        name,
        uuid: uuid_of(target, &name),
        block_size,
        blocks: BlockCount(0),
        read_only: config.read_only,
        placement: Placement::Null,
        cache: CacheMode::None,
        cache_min_bytes: 0,
        cache_max_bytes: None,
        read_ahead_bytes: 0,
        discard: true,
        discard_granularity_bytes: block_size.bytes(),
        is_durable_at_once: false,
        limits: Limiter::renewed(None, config.limits),
    })
}

/// The stable identity of a volume: a hash of the names of target and volume.
fn uuid_of(target: &Name, volume: &Name) -> [u8; 16] {
    let mut hash = Sha256::new();
    hash.update(target.as_str());
    hash.update([0]);
    hash.update(volume.as_str());
    let digest = hash.finalize();
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&digest[..16]);
    uuid
}

/// Opens and locks the file or device of a volume, or goes on with it. It must have `size` bytes,
/// if that is given.
fn open_store(
    config: &VolumeConfig,
    path: &Path,
    direct: DirectIo,
    size: Option<u64>,
    source: StoreSource,
) -> anyhow::Result<Backing> {
    let options = OpenOptions {
        read_only: config.read_only,
        direct: match direct {
            DirectIo::Required => Direct::Required,
            DirectIo::Preferred => Direct::Preferred,
            DirectIo::Off => Direct::Off,
        },
        block_size: config.block_size,
        lock_wait: LOCK_WAIT,
        losses: Losses::HeldUntilNoted,
    };
    let opened = match (source.open(config, path, &options), size) {
        (Err(StoreError::Empty { .. }), Some(size)) => {
            return Err(WrongSize::new(path, 0, size, path.is_file()).into());
        }
        (Err(StoreError::NotWholeBlocks { size: bytes, .. }), Some(size)) => {
            return Err(WrongSize::new(path, bytes, size, path.is_file()).into());
        }
        (opened, _) => opened?,
    };
    let bytes = opened.size_bytes();
    if let Some(configured) = size
        && configured != bytes
    {
        return Err(WrongSize::new(path, bytes, configured, opened.is_file()).into());
    }
    if !opened.direct() && direct == DirectIo::Preferred {
        tracing::warn!(volume = %config.name, path = %path.display(), "no direct I/O there: going through the page cache");
    }
    Ok(opened)
}

/// The number of blocks in this many bytes, at least one.
fn blocks_in(bytes: u64, block_size: BlockSize) -> anyhow::Result<BlockCount> {
    block_size.blocks_in(bytes).filter(|blocks| blocks.0 > 0).with_context(|| {
        format!("size of {bytes} bytes is not a multiple of the block size {}", block_size.bytes())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_that_another_member_serves_has_no_fault() {
        let away = |error| AwayVolume::unopened("v", &StoreError::Image(error).into());
        let image = || "rbd/v".to_owned();
        let (member, addresses) = ("a".to_owned(), vec!["tcp://192.0.2.1".to_owned()]);
        let busy = Some("volume w is resized".to_owned());
        for (addresses, why) in [(addresses, None), (Vec::new(), busy)] {
            let member = member.clone();
            assert!(
                away(ImageError::Elsewhere { image: image(), member, addresses, why }).elsewhere
            );
        }
        let owner = "192.0.2.9:0/77".to_owned();
        assert!(!away(ImageError::Locked { image: image(), owner }).elsewhere);
    }

    #[test]
    fn each_user_of_a_cluster_is_asked_once_for_its_fences() {
        let text = r#"
            name = "store"
            member = "a"
            [[volume]]
            name = "v"
            store = "rbd"
            image = "rbd/v"
            [[volume]]
            name = "w"
            store = "rbd"
            image = "rbd/w"
            [[volume]]
            name = "x"
            store = "rbd"
            image = "rbd/x"
            user = "other"
            [[volume]]
            name = "s"
            store = "rbd"
            image = "rbd/v@snap"
            user = "third"
        "#;
        let mut config = TargetConfig::parse(text, "test").unwrap();
        let users: Vec<_> = group_users(&config)
            .into_iter()
            .map(|(place, image)| (place.user, image.to_string()))
            .collect();
        assert_eq!(users.len(), 2, "{users:?}");
        assert_eq!(users[0].1, "rbd/v");
        assert_eq!(users[1], ("other".to_owned(), "rbd/x".to_owned()));
        // A target in no group fences only what members left.
        config.member = None;
        assert!(group_users(&config).is_empty());
    }
}
