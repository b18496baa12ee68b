//! [`ImageError`]: the reasons why an image cannot be served. Each text names the image, the cause
//! and the fix.

use std::time::Duration;

use nix::errno::Errno;

/// The reason why an image of a Ceph cluster cannot be served. Sizes are bytes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// A library of Ceph is not installed.
    #[error(
        "{library} is missing: install it with `apt install {package}` (elsewhere a package of Ceph's clients); {why}"
    )]
    NoLibrary {
        /// The file of the library.
        library: String,
        /// Its package.
        package: &'static str,
        /// The reason of the dynamic loader.
        why: String,
    },
    /// A library of Ceph is too old.
    #[error(
        "{library} has no function {function}: install {package} of Ceph 16 (Pacific) or later"
    )]
    OldLibrary {
        /// The file of the library.
        library: String,
        /// Its package.
        package: &'static str,
        /// The missing function.
        function: String,
    },
    /// The configuration of the cluster cannot be read.
    #[error(
        "{image}: the configuration {conf} cannot be read ({errno}): name the right file in ceph_conf"
    )]
    Configuration {
        /// The image.
        image: String,
        /// The file.
        conf: String,
        /// The error.
        errno: Errno,
    },
    /// No monitor answers.
    #[error(
        "{image}: no monitor of the cluster answered within {} s: check `mon_host` in the Ceph configuration (ceph_conf) \
         and the network to the monitors", within.as_secs()
    )]
    NoMonitor {
        /// The image.
        image: String,
        /// The deadline.
        within: Duration,
    },
    /// The OSDs do not answer.
    #[error(
        "{image}: the cluster did not answer within {} s while the target tried to {what}: look at `ceph -s`; the \
         placement groups of pool {pool} may be inactive", within.as_secs()
    )]
    NoAnswer {
        /// The image.
        image: String,
        /// The pool.
        pool: String,
        /// The step.
        what: &'static str,
        /// The deadline.
        within: Duration,
    },
    /// The cluster refuses the key.
    #[error(
        "{image}: the cluster refuses the key of client.{user} ({errno}): give the right file in keyring, see `ceph auth get client.{user}`"
    )]
    Key {
        /// The image.
        image: String,
        /// The user.
        user: String,
        /// The error.
        errno: Errno,
    },
    /// The key is not there.
    #[error(
        "{image}: there is no key of client.{user}: name its file in keyring (`ceph auth get client.{user}` prints it), or another user"
    )]
    NoKey {
        /// The image.
        image: String,
        /// The user.
        user: String,
    },
    /// The user may not do something.
    #[error(
        "{image}: client.{user} may not {what} ({errno}): `ceph auth caps client.{user} mon 'profile rbd' osd \
         'profile rbd pool={pool}'`"
    )]
    Capability {
        /// The image.
        image: String,
        /// The user.
        user: String,
        /// The pool.
        pool: String,
        /// The step.
        what: &'static str,
        /// The error.
        errno: Errno,
    },
    /// The user may not fence other clients.
    #[error(
        "{image}: client.{user} may not fence other clients ({errno}): its key lacks the capability of the monitors for \
         osd blocklist add, without which a target takes no image over; `ceph auth caps client.{user} mon 'profile rbd' \
         osd 'profile rbd pool={pool}'` gives it"
    )]
    NoFencing {
        /// The image.
        image: String,
        /// The user.
        user: String,
        /// The pool.
        pool: String,
        /// The error.
        errno: Errno,
    },
    /// The pool does not exist.
    #[error("{image}: the cluster has no pool {pool}: see `ceph osd pool ls`")]
    NoPool {
        /// The image.
        image: String,
        /// The pool.
        pool: String,
    },
    /// The image or snapshot does not exist.
    #[error(
        "{image}: no such image or snapshot: make it with `rbd create --size 64G {image}`, see `rbd ls --long {pool}`"
    )]
    NoImage {
        /// The image.
        image: String,
        /// The pool.
        pool: String,
    },
    /// The image has no exclusive lock.
    #[error(
        "{image}: the image has no exclusive lock: `rbd feature enable {image} exclusive-lock`"
    )]
    NoLockFeature {
        /// The image.
        image: String,
    },
    /// The image or its pool has another value of a setting that rblk needs.
    #[error(
        "{image}: the image or its pool sets {setting} = {value}, and {otherwise}: `rbd config image set {image} \
         {setting} {wanted}`"
    )]
    Setting {
        /// The image.
        image: String,
        /// The name of the setting.
        setting: &'static str,
        /// Its value.
        value: String,
        /// The value it must have.
        wanted: &'static str,
        /// The harm of another value.
        otherwise: &'static str,
    },
    /// Another client holds the lock.
    #[error(
        "{image}: the image is locked by a live client at {owner}: stop it there, see `rbd status {image}` and `rbd lock ls {image}`"
    )]
    Locked {
        /// The image.
        image: String,
        /// The address of the owner.
        owner: String,
    },
    /// Another member of the group owns the image.
    #[error(
        "{image}: member `{member}` of this target serves it{}{}",
        if addresses.is_empty() { String::new() } else { format!(" ({})", addresses.join(", ")) },
        why.as_ref().map_or_else(String::new, |why| format!(", and keeps it: {why}"))
    )]
    Elsewhere {
        /// The image.
        image: String,
        /// The member; empty: it is about to name itself.
        member: String,
        /// The addresses that the member listens on.
        addresses: Vec<String>,
        /// Why it does not hand over, if it says so.
        why: Option<String>,
    },
    /// This target opens the image already.
    #[error(
        "{image}: this target is opening the image already, and the cluster has not answered yet: look at `ceph -s`"
    )]
    Opening {
        /// The image.
        image: String,
    },
    /// The size is 0.
    #[error("{image}: size is 0; set it with `rbd resize --size 64G {image}`")]
    Empty {
        /// The image.
        image: String,
    },
    /// The size is no whole number of blocks.
    #[error("{image}: size {size} is not a multiple of the block size {block_size}; `rbd resize --size {}B {image}` makes it one", size.next_multiple_of(u64::from(*block_size)))]
    NotWholeBlocks {
        /// The image.
        image: String,
        /// The size in bytes.
        size: u64,
        /// Block size of the volume in bytes.
        block_size: u32,
    },
    /// The image is shorter than it should be.
    #[error(
        "{image}: has {size} bytes, and {wanted} are needed: `rbd resize --size {wanted}B {image}`"
    )]
    Short {
        /// The image.
        image: String,
        /// The size in bytes.
        size: u64,
        /// The wanted size in bytes.
        wanted: u64,
    },
    /// The image was lost.
    #[error("{image}: {why}")]
    Lost {
        /// The image.
        image: String,
        /// The reason.
        why: String,
    },
    /// Any other error of a library.
    #[error("{image}: cannot {what}: {errno}")]
    Other {
        /// The image.
        image: String,
        /// The step.
        what: &'static str,
        /// The error.
        errno: Errno,
    },
    /// The system has no thread or eventfd left.
    #[error("{image}: {source}")]
    System {
        /// The image.
        image: String,
        /// The system's error.
        source: std::io::Error,
    },
}
