//! The keeper of an image: the thread that opens it, looks after its lock, and closes it.
//!
//! Calls that may block are made here: an OSD that does not answer stops this thread, and no other
//! one. Only the looks at the lock have a thread of their own ([`Looker`]), so that no resize
//! delays them.

use std::collections::BTreeSet;
use std::ffi::{c_char, c_int, c_void};
use std::path::PathBuf;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use rblk_config::ImageName;

use super::claiming::{ClaimPlaces, Claimed, claim, wait_for_former};
use super::cluster::{Cluster, Pool, checked, read_text, text};
use super::error::ImageError;
use super::fencing::fence_rights::{FenceRights, try_to_fence};
use super::fencing::fenced_client::{FENCE_SECONDS, warn_of_short_fences};
use super::group_member::GroupMember;
use super::header_lock::{HeaderLock, LockOwner};
use super::image_claim::{AskAnswer, FormerHosts, Outcome};
use super::image_watchers::ImageWatchers;
use super::keeper_order::Order;
use super::library::{FEATURE_EXCLUSIVE_LOCK, Handle, ImageSetting, LOCK_EXCLUSIVE, Library};
use super::looker::Looker;
use super::needed_setting::{NeededSetting, OF_LONE, OF_MEMBERS, broken_in};
use super::open_image::{
    Image, ImageFacts, ImageOptions, Shared, boot_ms, identity_of, uuid_of, whole_blocks,
};
use super::ownership::before_lone::{BeforeLone, LoneStep};
use super::ownership::lock_proof::BeforeClose;
use super::ownership::owner_note::OwnerNote;
use super::ownership::state_change::StatePlace;
use super::state_keeper::{Asking, ImageRecord, StateKeeper};
use super::state_object::StateObject;

/// How long an open may take. The cluster itself takes 30 s to notice that a former owner of the
/// lock is dead.
const OPEN_DEADLINE: Duration = Duration::from_secs(60);
/// How long a program waits for its images to close when it ends.
pub(crate) const CLOSE_WAIT: Duration = Duration::from_secs(30);
/// Time between two tries to get the lock from a live client.
const LOCK_RETRY: Duration = Duration::from_millis(200);
/// Time between two looks for the loss of an image that is about to close.
const CLOSE_STEP: Duration = Duration::from_millis(100);
/// Most settings of an image: librbd of Ceph 19 has about 90.
const SETTINGS_MOST: usize = 512;

/// The number of keepers, and a way to wait for the last one.
static KEEPERS: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// Counts a keeper as long as it lives.
struct Counted;

impl Counted {
    fn begin() -> Self {
        *keepers() += 1;
        Self
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        *keepers() -= 1;
        KEEPERS.1.notify_all();
    }
}

fn keepers() -> MutexGuard<'static, usize> {
    KEEPERS.0.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until every dropped image is closed, and its lock given back. False: that took longer.
pub(crate) fn wait_until_closed(at_most: Duration) -> bool {
    let waited = KEEPERS.1.wait_timeout_while(keepers(), at_most, |keepers| *keepers > 0);
    let (left, _) = waited.unwrap_or_else(PoisonError::into_inner);
    *left == 0
}

/// An open, as the one who waits for it and the keeper know it.
#[derive(Debug)]
struct OpenCourse {
    // For an error.
    step: Mutex<&'static str>,
    // Nobody waits for it any more.
    is_abandoned: AtomicBool,
}

impl OpenCourse {
    fn begin(&self, step: &'static str) {
        *self.step.lock().unwrap_or_else(PoisonError::into_inner) = step;
    }
}

/// The images that this process opens as a member of a group. A cluster that does not answer keeps
/// an open for as long, and hosts ask again and again: each open would have a client of its own,
/// and all of them would act when the cluster answers.
static OPENING: Mutex<BTreeSet<OpenPlace>> = Mutex::new(BTreeSet::new());

/// The configuration file of a cluster, if one is named, and an image there.
type OpenPlace = (Option<PathBuf>, String);

/// One of them, until the drop.
#[derive(Debug)]
struct OneOpening(OpenPlace);

impl OneOpening {
    fn begin(options: &ImageOptions) -> Result<Self, ImageError> {
        let place = (options.cluster.conf.clone(), options.name.to_string());
        match openings().insert(place.clone()) {
            true => Ok(Self(place)),
            false => Err(ImageError::Opening { image: place.1 }),
        }
    }
}

impl Drop for OneOpening {
    fn drop(&mut self) {
        openings().remove(&self.0);
    }
}

fn openings() -> MutexGuard<'static, BTreeSet<OpenPlace>> {
    OPENING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An image that is being opened. The drop has it closed when it is open.
#[derive(Debug)]
pub(crate) struct Opening {
    name: ImageName,
    course: Arc<OpenCourse>,
    opened: Receiver<Result<Image, ImageError>>,
    began: Instant,
}

impl Drop for Opening {
    fn drop(&mut self) {
        self.course.is_abandoned.store(true, Ordering::Relaxed);
    }
}

impl Opening {
    /// Waits for the image, at most until [`OPEN_DEADLINE`] after the begin.
    ///
    /// # Errors
    /// [`ImageError`] names the image, the cause and the fix.
    pub(crate) fn end(self) -> Result<Image, ImageError> {
        let left = OPEN_DEADLINE.saturating_sub(self.began.elapsed());
        self.opened.recv_timeout(left).unwrap_or_else(|_| {
            // The thread closes what it may still open.
            let what = *self.course.step.lock().unwrap_or_else(PoisonError::into_inner);
            let (image, pool) = (self.name.to_string(), self.name.pool.clone());
            Err(ImageError::NoAnswer { image, pool, what, within: OPEN_DEADLINE })
        })
    }
}

/// Begins to open an image and to take its lock, in a new keeper. A snapshot has no lock.
///
/// # Errors
/// The libraries of Ceph are missing, or the system has no thread left.
pub(crate) fn begin_open(options: ImageOptions) -> Result<Opening, ImageError> {
    let library = Library::get()?;
    let one = options.group.is_some().then(|| OneOpening::begin(&options)).transpose()?;
    let course =
        OpenCourse { step: Mutex::new("connect to it"), is_abandoned: AtomicBool::new(false) };
    let course = Arc::new(course);
    let (answer, opened) = mpsc::sync_channel(1);
    let (name, at) = (options.name.clone(), Arc::clone(&course));
    let counted = Counted::begin();
    let spawned = thread::Builder::new().name("rblk-image".to_owned()).spawn(move || {
        let _counted = counted;
        keep(library, (&options, one), &at, &answer);
    });
    spawned.map_err(|source| ImageError::System { image: name.to_string(), source })?;
    Ok(Opening { name, course, opened, began: Instant::now() })
}

/// The life of a keeper.
fn keep(
    library: &'static Library,
    (options, one): (&ImageOptions, Option<OneOpening>),
    course: &OpenCourse,
    answer: &SyncSender<Result<Image, ImageError>>,
) {
    let (sender, orders) = mpsc::channel();
    let kept = Kept::open(library, options, course, sender.clone());
    drop(one);
    let kept = match kept {
        Ok(kept) => kept,
        // An error means that nothing waits any more.
        Err(error) => return drop(answer.send(Err(error))),
    };
    // If nothing waits any more, the drop of the image is the order to close it.
    let (group, orders_to) = (kept.group.clone(), (sender, kept.looker.proofs()));
    drop(answer.send(Ok(Image::new(Arc::clone(&kept.shared), orders_to, group))));
    kept.run(&orders);
}

/// An image of librbd. The drop closes it, which gives the lock back.
struct OpenImage {
    library: &'static Library,
    handle: Handle,
}

impl Drop for OpenImage {
    fn drop(&mut self) {
        // SAFETY: no op, watch or thread uses the image any more.
        let closed = checked(unsafe { (self.library.rbd_close)(self.handle) });
        if let Err(errno) = closed {
            tracing::warn!(%errno, "an image was not closed in good order");
        }
    }
}

/// The notices of a change of an image. The drop ends them.
struct Watch {
    library: &'static Library,
    handle: Handle,
    number: u64,
    argument: *mut Sender<Order>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        // SAFETY: the image is open, and the watch is its own.
        let ended = unsafe { (self.library.rbd_update_unwatch)(self.handle, self.number) };
        if checked(ended).is_ok() {
            // SAFETY: made by `Box::into_raw`; no callback runs after the end of the watch.
            drop(unsafe { Box::from_raw(self.argument) });
        }
    }
}

unsafe extern "C" fn on_update(argument: *mut c_void) {
    // SAFETY: the argument of the watch, which lives as long as the watch.
    let orders = unsafe { &*argument.cast::<Sender<Order>>() };
    // An error means that the keeper ends.
    let _ = orders.send(Order::Changed);
}

/// An image in the hands of its keeper. The fields are dropped in this order.
struct Kept {
    looker: Looker,
    _watch: Watch,
    // Gives the image back before the lock: a claim in between would fence this client.
    state: Option<StateKeeper>,
    image: OpenImage,
    // The lock, with this client as its owner.
    held: Option<(HeaderLock, LockOwner)>,
    _pool: Pool,
    cluster: Cluster,
    user: String,
    shared: Arc<Shared>,
    group: Option<(ImageRecord, Asking)>,
}

/// The record of an image in its state object, and the questions of other members.
fn group_of(keeper: &StateKeeper, name: &ImageName, facts: &ImageFacts) -> (ImageRecord, Asking) {
    let place = format!("the state of image {name}");
    (keeper.record(uuid_of(&facts.identity), place), keeper.asking())
}

impl Kept {
    fn open(
        library: &'static Library,
        options: &ImageOptions,
        course: &OpenCourse,
        orders: Sender<Order>,
    ) -> Result<Self, ImageError> {
        let begin = |what| course.begin(what);
        let name = &options.name;
        let fail = Failing { name, user: &options.cluster.user };
        let cluster = Cluster::connect(library, &options.cluster, name)?;
        let of_lock = set_of_lock(&cluster, options, &fail)?;
        let fsid = cluster.fsid().map_err(|errno| fail.at("read the id of the cluster", errno))?;
        begin("open its pool");
        let (image_name, pool_name) = (|| name.to_string(), || name.pool.clone());
        let pool = cluster.pool(name).map_err(|errno| match errno {
            Errno::ENOENT => ImageError::NoPool { image: image_name(), pool: pool_name() },
            errno => fail.at("open its pool", errno),
        })?;
        begin("open the image");
        let image = open_in(library, &pool, name).map_err(|errno| match errno {
            Errno::ENOENT => ImageError::NoImage { image: image_name(), pool: pool_name() },
            errno => fail.at("open the image", errno),
        })?;
        refuse_settings(&image, of_lock, &fail)?;
        let id = read_id(&image, &fail)?;
        let (mut state, mut lineage, mut holder_alone_until) = (None, 0, 0);
        let (lock, proven_at) = match name.snap {
            Some(_) => (None, boot_ms()),
            None => {
                begin("take its exclusive lock");
                let lock = HeaderLock::of(&cluster, name, &id);
                let lock = lock.map_err(|errno| fail.at("look at its exclusive lock", errno))?;
                require_lock_feature(&image, &fail)?;
                let places = (&cluster, &image, &lock);
                let (claimed, keeper) = own(places, (name, &id), (options, course), &fail)?;
                (state, lineage) = (keeper, claimed.note.lineage);
                holder_alone_until = claimed.holder_alone_until();
                let (owner, at) = (claimed.owner, claimed.proven_at);
                (Some((lock, owner)), at)
            }
        };
        begin("read the image");
        let facts = read_facts(&image, (&fsid, &pool, &id), options, &fail)?;
        let own_address = lock.as_ref().map(|(_, owner)| owner.address.clone());
        let facts = ImageFacts { own_address, lineage, holder_alone_until, ..facts };
        let size = measure(&image).map_err(|errno| fail.at("measure it", errno))?;
        whole_blocks(name, size, options.block_size)?;
        let watch = watch(&image, orders).map_err(|errno| fail.at("watch it", errno))?;
        let shared = Arc::new(Shared::new(facts, size));
        shared.proven(proven_at);
        let group = state.as_ref().map(|keeper| group_of(keeper, name, &shared.facts));
        let held = again((&cluster, name, &id), lock.as_ref(), &fail)?;
        let looker = Looker::begin(Arc::clone(&shared), lock);
        let looker = looker.map_err(|source| ImageError::System { image: image_name(), source })?;
        let (versions, lock) = (library.versions(), shared.facts.own_address.as_deref());
        tracing::info!(image = %name, identity = shared.facts.identity, lock, versions, "an image is open");
        Ok(Self {
            looker,
            _watch: watch,
            state,
            image,
            held,
            _pool: pool,
            cluster,
            user: options.cluster.user.clone(),
            shared,
            group,
        })
    }

    /// Carries out orders until the image is to close.
    fn run(mut self, orders: &Receiver<Order>) {
        while let Ok(order) = orders.recv() {
            match order {
                Order::Changed => self.measure(),
                Order::Resize(to, reply) => {
                    let was = self.shared.size();
                    let resized = self.resize(to);
                    if reply.send(resized).is_err() {
                        // Given up: the volume stays as it was, or is lost.
                        self.shared.set_size(was);
                    }
                }
                Order::MayFence(reply) => drop(reply.send(self.may_fence())),
                Order::Close => break,
            }
        }
        self.wait_for_former();
        if let (false, Some(state)) = (self.may_give_back(), &mut self.state) {
            state.lose();
        }
    }

    /// Waits until the owner before answers nobody. The next owner would not know of that one, and
    /// let any host in. Nobody listens to the questions of other members any more: they are told to
    /// wait.
    fn wait_for_former(&self) {
        if let Some((_, asking)) = &self.group {
            let answers = asking.clone();
            let hand_over = move |ticket, _| answers.answer(ticket, AskAnswer::HandsOver, None);
            asking.listen(Box::new(hand_over));
        }
        while !self.shared.is_lost() && !self.shared.for_holder_alone().is_zero() {
            thread::sleep(self.shared.for_holder_alone().min(CLOSE_STEP));
        }
    }

    /// Whether the image still belongs to this client. May block as long as the cluster does.
    fn may_give_back(&self) -> bool {
        match BeforeClose::of(self.shared.is_lost(), self.shared.is_silent()) {
            BeforeClose::GiveBack => true,
            BeforeClose::Look => {
                let has_it = |(lock, own): &(HeaderLock, LockOwner)| {
                    lock.owner().is_ok_and(|owner| owner.as_ref() == Some(own))
                };
                self.held.as_ref().is_some_and(has_it)
            }
            BeforeClose::Nothing => false,
        }
    }

    fn may_fence(&self) -> Result<(), ImageError> {
        try_to_fence(&self.cluster, &self.user, &self.shared.facts.name)
    }

    fn measure(&self) {
        match measure(&self.image) {
            Ok(_) if self.shared.facts.name.snap.is_some() => {}
            Ok(size) => self.shared.measured(size),
            Err(Errno::ESHUTDOWN) => self.shared.lose_by_fence(),
            Err(errno) => {
                tracing::warn!(image = %self.shared.facts.name, %errno, "cannot measure an image");
            }
        }
    }

    fn resize(&self, to: u64) -> Result<(), ImageError> {
        let (shared, facts) = (&self.shared, &self.shared.facts);
        let image = || facts.name.to_string();
        let fail = |errno| ImageError::Other { image: image(), what: "change its size", errno };
        let was = shared.size();
        let has = measure(&self.image).map_err(fail)?;
        if facts.name.snap.is_some() {
            if has < to {
                return Err(ImageError::Short { image: image(), size: has, wanted: to });
            }
            shared.set_size(to);
            return Ok(());
        }
        // A volume that grows does not cut off bytes that others wrote behind the end in force.
        if has < to || (to <= was && has != to) {
            // First, so that a smaller image is no loss.
            shared.set_size(was.min(to));
            // SAFETY: an open image.
            let resized = unsafe { (facts.library.rbd_resize)(facts.handle, to) };
            checked(resized).map_err(|errno| {
                shared.set_size(was);
                fail(errno)
            })?;
        }
        shared.set_size(to);
        shared.measured(measure(&self.image).map_err(fail)?);
        Ok(())
    }
}

/// The lock once more, for another thread.
fn again(
    (cluster, name, id): (&Cluster, &ImageName, &str),
    lock: Option<&(HeaderLock, LockOwner)>,
    fail: &Failing<'_>,
) -> Result<Option<(HeaderLock, LockOwner)>, ImageError> {
    let Some((_, owner)) = lock else { return Ok(None) };
    let lock = HeaderLock::of(cluster, name, id);
    let lock = lock.map_err(|errno| fail.at("look at its exclusive lock", errno))?;
    Ok(Some((lock, owner.clone())))
}

/// Makes errors of one image.
struct Failing<'n> {
    name: &'n ImageName,
    user: &'n str,
}

impl Failing<'_> {
    fn at(&self, what: &'static str, errno: Errno) -> ImageError {
        let (image, user) = (self.name.to_string(), self.user.to_owned());
        match errno {
            Errno::EPERM | Errno::EACCES => {
                ImageError::Capability { image, user, pool: self.name.pool.clone(), what, errno }
            }
            errno => ImageError::Other { image, what, errno },
        }
    }
}

fn open_in(library: &'static Library, pool: &Pool, name: &ImageName) -> Result<OpenImage, Errno> {
    let image = text(&name.image);
    let snap = name.snap.as_deref().map(text);
    let mut handle = ptr::null_mut();
    // SAFETY: an open pool; the names live as long as the call, which writes the handle.
    let opened = unsafe {
        match &snap {
            None => (library.rbd_open)(pool.handle(), image.as_ptr(), &raw mut handle, ptr::null()),
            Some(snap) => (library.rbd_open_read_only)(
                pool.handle(),
                image.as_ptr(),
                &raw mut handle,
                snap.as_ptr(),
            ),
        }
    };
    checked(opened).map(|_| OpenImage { library, handle })
}

fn read_id(image: &OpenImage, fail: &Failing<'_>) -> Result<String, ImageError> {
    let id = read_text(|buffer: *mut c_char, len| {
        // SAFETY: an open image; the call writes at most `len` bytes into the buffer.
        unsafe { (image.library.rbd_get_id)(image.handle, buffer, len) }
    });
    id.map_err(|errno| fail.at("read its id", errno))
}

fn read_facts(
    image: &OpenImage,
    (fsid, pool, id): (&str, &Pool, &str),
    options: &ImageOptions,
    fail: &Failing<'_>,
) -> Result<ImageFacts, ImageError> {
    let OpenImage { library, handle } = *image;
    let name = &options.name;
    let snap = name.snap.as_deref().map(|snap| {
        let (snap, mut number) = (text(snap), 0);
        // SAFETY: the name lives as long as the call, which writes the number.
        let read = unsafe { (library.rbd_snap_get_id)(handle, snap.as_ptr(), &raw mut number) };
        checked(read).map(|_| number).map_err(|errno| fail.at("read its snapshot", errno))
    });
    let identity = identity_of(fsid, pool.id(), &name.namespace, id, snap.transpose()?);
    let (name, block_size) = (name.clone(), options.block_size);
    let (own_address, lineage, holder_alone_until) = (None, 0, 0);
    let known = ImageFacts {
        library,
        handle,
        name,
        block_size,
        identity,
        lineage,
        own_address,
        holder_alone_until,
    };
    Ok(known)
}

fn measure(image: &OpenImage) -> Result<u64, Errno> {
    let mut size = 0;
    // SAFETY: an open image; the call writes the size.
    checked(unsafe { (image.library.rbd_get_size)(image.handle, &raw mut size) }).map(|_| size)
}

fn watch(image: &OpenImage, orders: Sender<Order>) -> Result<Watch, Errno> {
    let OpenImage { library, handle } = *image;
    let argument = Box::into_raw(Box::new(orders));
    let mut number = 0;
    // SAFETY: an open image; the argument lives until the watch has ended.
    let watched =
        unsafe { (library.rbd_update_watch)(handle, &raw mut number, on_update, argument.cast()) };
    match checked(watched) {
        Ok(_) => Ok(Watch { library, handle, number, argument }),
        Err(errno) => {
            // SAFETY: made above; no watch has it.
            drop(unsafe { Box::from_raw(argument) });
            Err(errno)
        }
    }
}

/// Refuses an image that cannot have an exclusive lock.
fn require_lock_feature(image: &OpenImage, fail: &Failing<'_>) -> Result<(), ImageError> {
    let mut features = 0;
    // SAFETY: an open image; the call writes the features.
    let read =
        checked(unsafe { (image.library.rbd_get_features)(image.handle, &raw mut features) });
    read.map_err(|errno| fail.at("read its features", errno))?;
    match features & FEATURE_EXCLUSIVE_LOCK {
        0 => Err(ImageError::NoLockFeature { image: fail.name.to_string() }),
        _ => Ok(()),
    }
}

/// What a target in no group does with the note of a group.
const LONE: &str = "note in the object beside it that no group has it (osd blocklist)";
/// Time between two looks at a member that does not watch the image.
const SECOND_LOOK: Duration = Duration::from_secs(1);

/// The places in which a target in no group takes a lock.
type LonePlaces<'p> = (&'p Cluster, &'p OpenImage, &'p HeaderLock, &'p StateObject);

/// Makes this target the owner of an image, alone or as a member of a group, which keeps the state
/// beside the image.
fn own(
    (cluster, image, lock): (&Cluster, &OpenImage, &HeaderLock),
    (name, id): (&ImageName, &str),
    (options, course): (&ImageOptions, &OpenCourse),
    fail: &Failing<'_>,
) -> Result<(Claimed, Option<StateKeeper>), ImageError> {
    if let Some(member) = &options.group {
        FenceRights::of_process().require(cluster, &options.cluster, name)?;
        let claimant = (member, course);
        let (claimed, keeper) = claim_it((cluster, image, lock), (name, id), claimant, fail)?;
        return Ok((claimed, Some(keeper)));
    }
    let object = StateObject::of(cluster, name, id).map_err(|errno| fail.at(LONE, errno))?;
    let places = (cluster, image, lock, &object);
    let (owner, proven_at) = take_lock(places, options.lock_wait, fail)?;
    let lineage = own_alone(cluster, &object, &owner, fail)?;
    let note = OwnerNote { lineage, ..OwnerNote::default() };
    Ok((Claimed { note, owner, proven_at, former: (FormerHosts::Nobody, 0) }, None))
}

/// The owner of before. None: the user has capabilities for the image alone, and members of a group
/// need more.
fn owner_before(object: &StateObject, fail: &Failing<'_>) -> Result<Option<OwnerNote>, ImageError> {
    match object.owner() {
        Ok(before) => Ok(Some(before)),
        Err(Errno::EPERM | Errno::EACCES) => Ok(None),
        Err(errno) => Err(fail.at(LONE, errno)),
    }
}

/// Notes that a target in no group owns an image that members of a group had. Returns the lineage
/// of the image.
fn own_alone(
    cluster: &Cluster,
    object: &StateObject,
    owner: &LockOwner,
    fail: &Failing<'_>,
) -> Result<u64, ImageError> {
    let failed = |errno| fail.at(LONE, errno);
    let Some(before) = owner_before(object, fail)? else { return Ok(0) };
    let Some(note) = before.of_alone(&owner.address) else { return Ok(0) };
    if !before.is_alone() && !before.client.is_empty() {
        cluster.fence(&before.client, FENCE_SECONDS).map_err(failed)?;
        warn_of_short_fences(cluster, std::slice::from_ref(&before.client));
    }
    match object.swap_owner(before.epoch, &note).map_err(failed)? {
        true => Ok(note.lineage),
        false => {
            let (image, owner) = (fail.name.to_string(), before.member);
            Err(ImageError::Locked { image, owner })
        }
    }
}

/// Makes a member of a group the owner of an image. Also returns the keeper of the state beside the
/// image.
fn claim_it(
    (cluster, image, lock): (&Cluster, &OpenImage, &HeaderLock),
    (name, id): (&ImageName, &str),
    (member, course): (&GroupMember, &OpenCourse),
    fail: &Failing<'_>,
) -> Result<(Claimed, StateKeeper), ImageError> {
    const WHAT: &str = "claim it (osd blocklist, and an object beside the image)";
    let object = StateObject::of(cluster, name, id).map_err(|errno| fail.at(WHAT, errno))?;
    let places =
        ClaimPlaces { library: image.library, cluster, image: image.handle, lock, object: &object };
    let claimed = claim(&places, member, &course.is_abandoned);
    let claimed = claimed.map_err(|errno| fail.at(WHAT, errno))?;
    let of_image = || name.to_string();
    let mut claimed = claimed.map_err(|(outcome, why)| match outcome {
        Outcome::Foreign(owner) => ImageError::Locked { image: of_image(), owner },
        Outcome::Elsewhere(note) | Outcome::Late(note) | Outcome::Owned(note) => {
            ImageError::Elsewhere {
                image: of_image(),
                member: note.member,
                addresses: note.addresses,
                why,
            }
        }
    })?;
    let OwnerNote { member, epoch, lineage, .. } = &claimed.note;
    tracing::info!(image = %name, member, epoch, lineage, "owns an image");
    let left = claimed.former_answers_until().saturating_sub(boot_ms());
    let not_before = Instant::now() + Duration::from_millis(left);
    let keeper = StateKeeper::begin(object, claimed.note.clone(), not_before);
    let mut keeper = keeper.map_err(|source| ImageError::System { image: of_image(), source })?;
    if claimed.former.0 == FormerHosts::All {
        course.begin("wait until its former owner answers no host any more");
        // Also if nobody waits: the next owner would not know.
        let has_it = wait_for_former(lock, &mut claimed).map_err(|errno| fail.at(WHAT, errno))?;
        if !has_it {
            keeper.lose();
            return Err(ImageError::Lost {
                image: of_image(),
                why: "another client took its lock meanwhile".to_owned(),
            });
        }
    }
    Ok((claimed, keeper))
}

/// What a target in no group does next about the lock. A dead member that has it is fenced here:
/// librbd would fence it for an hour, and no later fence is longer.
fn step_before_lock(
    (cluster, image, lock, object): LonePlaces<'_>,
    before: &mut BeforeLone,
    fail: &Failing<'_>,
) -> Result<LoneStep, ImageError> {
    let failed = |errno| fail.at(LONE, errno);
    let Some(note) = owner_before(object, fail)? else { return Ok(LoneStep::Take) };
    let has_lock = match lock.owner() {
        Ok(owner) => owner.map(|owner| owner.address),
        // Somebody has it by other means than librbd.
        Err(Errno::EBUSY) => None,
        Err(errno) => return Err(failed(errno)),
    };
    if !BeforeLone::is_of_member(&note, has_lock.as_deref()) {
        return Ok(LoneStep::Take);
    }
    let watchers = ImageWatchers::of(image.library, image.handle).map_err(failed)?;
    let step = before.next(&note, watchers.may_have(&note.client));
    if let LoneStep::Fence(client) = &step {
        tracing::warn!(client, owner = note.member, "fences the client of a dead member");
        cluster.fence(client, FENCE_SECONDS).map_err(failed)?;
    }
    Ok(step)
}

/// Takes the exclusive lock. Returns this client as its owner, and a moment at which it had the
/// lock, by [`boot_ms`].
fn take_lock(
    places: LonePlaces<'_>,
    wait: Duration,
    fail: &Failing<'_>,
) -> Result<(LockOwner, u64), ImageError> {
    const WHAT: &str = "take its exclusive lock";
    let (_, &OpenImage { library, handle }, lock, _) = places;
    let deadline = Instant::now() + wait;
    let mut before = BeforeLone::default();
    loop {
        match step_before_lock(places, &mut before, fail)? {
            LoneStep::Take | LoneStep::Fence(_) => {
                // SAFETY: an open image.
                match checked(unsafe { (library.rbd_lock_acquire)(handle, LOCK_EXCLUSIVE) }) {
                    Ok(_) => break,
                    Err(Errno::EROFS | Errno::EBUSY | Errno::EAGAIN) => {}
                    Err(errno) => return Err(fail.at(WHAT, errno)),
                }
            }
            LoneStep::LookAgain => {
                thread::sleep(SECOND_LOOK);
                continue;
            }
            LoneStep::Wait => {}
        }
        if Instant::now() >= deadline {
            let owner = lock.owner().ok().flatten().map(|owner| owner.address);
            let owner = owner.unwrap_or_else(|| "an unknown address".to_owned());
            return Err(ImageError::Locked { image: fail.name.to_string(), owner });
        }
        thread::sleep(LOCK_RETRY);
    }
    let began = boot_ms();
    let owner = lock.owner().map_err(|errno| fail.at(WHAT, errno))?;
    owner.map(|owner| (owner, began)).ok_or_else(|| fail.at(WHAT, Errno::ENOLCK))
}

/// Says whether librbd fences the owner of a lock that it breaks. Returns that setting.
fn set_of_lock(
    cluster: &Cluster,
    options: &ImageOptions,
    fail: &Failing<'_>,
) -> Result<NeededSetting, ImageError> {
    let of_lock = if options.group.is_some() { OF_MEMBERS } else { OF_LONE };
    let set = cluster.set(of_lock.name, of_lock.value);
    set.map_err(|errno| fail.at("configure a client of Ceph", errno))?;
    Ok(of_lock)
}

/// Refuses an image whose own settings, or those of its pool, break one that it needs.
fn refuse_settings(
    image: &OpenImage,
    of_lock: NeededSetting,
    fail: &Failing<'_>,
) -> Result<(), ImageError> {
    let OpenImage { library, handle } = *image;
    let none = ImageSetting { name: ptr::null_mut(), value: ptr::null_mut(), source: 0 };
    let mut settings = vec![none; SETTINGS_MOST];
    let mut count = c_int::try_from(settings.len()).unwrap_or(0);
    // SAFETY: an open image; the list has room for as many settings as `count` says.
    let listed =
        unsafe { (library.rbd_config_image_list)(handle, settings.as_mut_ptr(), &raw mut count) };
    checked(listed).map_err(|errno| fail.at("read its settings", errno))?;
    let shown = |text: *mut c_char| {
        // SAFETY: a text that the call made, which ends with a zero.
        unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    let known = usize::try_from(count).unwrap_or(0).min(settings.len());
    let listed = settings[..known].iter().map(|one| (shown(one.name), shown(one.value)));
    let broken = broken_in(listed, of_lock);
    // SAFETY: the list that the call made, which nothing uses any more.
    unsafe { (library.rbd_config_image_list_cleanup)(settings.as_mut_ptr(), count) };
    match broken {
        None => Ok(()),
        Some((NeededSetting { name: setting, value: wanted, otherwise }, value)) => {
            let image = fail.name.to_string();
            Err(ImageError::Setting { image, setting, value, wanted, otherwise })
        }
    }
}
