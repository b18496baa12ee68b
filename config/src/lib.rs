//! The configuration of rblk: TOML in, validated values out.
//!
//! Files and their types:
//!
//! | file | type | holds |
//! | --- | --- | --- |
//! | `/etc/rblk/target.toml` and `target.d/*.toml` | [`TargetConfig`] | what a target serves |
//! | `/etc/rblk/target.d/host-NAME.toml` | [`HostFile`] | one host that may connect |
//! | `/etc/rblk/target.d/volume-NAME.toml` | [`VolumeFile`] | one volume |
//! | `/etc/rblk/mounts.d/NAME.toml` | [`MountConfig`] | one mount |
//! | `/etc/rblk/target.key`, `host.key` | [`key_file`] | the secret key of this end |
//!
//! A command line uses the same types: set the fields, then call `validate`, which applies the
//! rules of a file. [`ByteSize`] and [`Duration`] are `FromStr`, so a file and a command line
//! accept the same texts. `dump` writes TOML that loads to the same value.
//!
//! An error names the place (file, line, column), the key, the value, what is wrong and what to
//! write instead. All faults of a configuration are reported at once.
//!
//! ```
//! use rblk_config::TargetConfig;
//!
//! let text = "listen = ['rdma://0.0.0.0']\nmax_io = '3MiB'\n";
//! let error = TargetConfig::parse(text, "target.toml").unwrap_err();
//! assert_eq!(
//!     error.to_string(),
//!     "target.toml:2:10: max_io = \"3MiB\": not a power of two; \
//!      write a power of two from \"4KiB\" to \"4MiB\", such as \"2MiB\" or \"4MiB\""
//! );
//! ```
#![forbid(unsafe_code)]

mod cache_part;
mod cpu_list;
mod difference;
mod digest_wish;
pub mod doctor;
mod document;
mod drop_in;
mod error;
mod exit;
pub mod figures;
mod host;
pub mod image;
pub mod journal;
mod judge;
pub mod key_file;
mod limits;
mod log;
mod mount;
mod narrowing;
mod on_loss;
mod output;
pub mod precautions;
pub mod private_socket;
mod protection;
pub mod quoted;
mod rule;
mod said_once;
pub mod screen;
mod spin;
pub mod table;
mod target;
pub mod unit_file;
mod units;
mod volume;
mod word;

pub use cpu_list::{CpuList, NoCpuList};
pub use difference::{Difference, KeyChange, VolumeDifference};
pub use digest_wish::{DigestWish, DigestWishError};
pub use document::ignored_drop_ins;
pub use drop_in::{DropIn, DropInError, Entry, HostFile, VolumeFile};
pub use error::{ConfigError, Fault, Site};
pub use exit::Exit;
pub use host::{
    HostConfig, KEYS_MAX, VolumeAccess, VolumeRight, VolumeRightError, named_in_rights,
};
pub use key_file::KeyFileError;
pub use limits::{ByteRate, Limits};
pub use log::{Log, LogWriter};
pub use mount::MountConfig;
pub use narrowing::{losers, narrowed};
pub use on_loss::OnLoss;
pub use output::{CannotPrint, Output, wants_colour};
pub use protection::{Auth, Encrypt};
pub use rule::{Key, Rule, Schema};
pub use said_once::said_once;
pub use spin::Spin;
pub use target::{HugePages, LISTEN_DEFAULT, NoTargetKey, TargetConfig};
pub use units::{ByteSize, ByteSizeError, Duration, DurationError};
pub use volume::{Backing, CacheMode, DirectIo, StoreKind, VolumeConfig};
