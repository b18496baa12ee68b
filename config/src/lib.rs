//! The configuration of rblk: TOML in, validated values out.
//!
//! Files and their types:
//!
//! | file | type | holds |
//! | --- | --- | --- |
//! | `/etc/rblk/target.toml` and `target.d/*.toml` | [`TargetConfig`] | volumes and resources |
//! | `/etc/rblk/target.d/host-NAME.toml` | [`HostFile`] | one host that may connect |
//! | `/etc/rblk/target.d/volume-NAME.toml` | [`VolumeFile`] | one volume |
//! | `/etc/rblk/mounts.d/NAME.toml` | [`MountConfig`] | one mount |
//! | `/etc/rblk/target.key`, `host.key` | [`key_file`] | the secret key of this end |
//!
//! Each key is described once: [`Key`] has its name, rule, default, help and flag. A command line
//! is a [`FlagLayer`] over the files, so a flag has the rule and the error of its key. A program
//! sets the fields, then calls `validate`, which applies the rules of a file. `dump` writes TOML
//! that loads to the same value.
//!
//! An error names the place (file, line, column), the key, the value, the cause and the fix. All
//! faults of a configuration are reported at once.
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

mod error;
mod exit;
mod host_config;
pub mod key_file;
mod mount;
pub mod quoted;
mod schema;
mod setting;
mod target;
pub mod unit_file;
mod units;
mod volume;

pub use error::{ConfigError, Fault, Site};
pub use exit::Exit;
pub use host_config::{
    HostConfig, KEYS_MAX, VolumeAccess, VolumeRight, VolumeRightError, named_in_rights,
};
pub use key_file::KeyFileError;
pub use mount::MountConfig;
pub use schema::document::ignored_drop_ins;
pub use schema::flag_layer::{FlagLayer, Flagged};
pub use schema::rule::Rule;
pub use schema::rule::{Key, RetiredKey, Schema};
pub use setting::connection_protection::{Auth, Encrypt};
pub use setting::digest_wish::{DigestWish, DigestWishError};
pub use setting::on_loss::OnLoss;
pub use setting::paths::Paths;
pub use setting::rate_limits::{ByteRate, Limits};
pub use setting::spin_key::Spin;
pub use setting::transport_keys::TransportKeys;
pub use target::difference::{Difference, KeyChange, VolumeDifference};
pub use target::drop_in::{DropIn, DropInError, Entry, HostFile, VolumeFile};
pub use target::narrowing::{losers, narrowed};
pub use target::{HugePages, LISTEN_DEFAULT, NoTargetKey, TargetConfig};
pub use units::{ByteSize, ByteSizeError, Duration, DurationError};
pub use volume::image;
pub use volume::image_name::ImageName;
pub use volume::{BackingConfig, CacheMode, ClusterConfig, DirectIo, StoreKind, VolumeConfig};
