//! [`LimitArgs`]: other limits of a volume or a host.

use clap::Args;
use rblk_config::{ByteRate, ByteSize};

use crate::target::ask::{LimitsWish, Wish};

/// The most that a volume or a host may have per second.
#[derive(Debug, Args)]
pub struct LimitArgs {
    /// Most commands per second, or none.
    #[arg(long, value_name = "N|none")]
    pub iops: Option<Wish<u32>>,
    /// Most bytes per second, such as 200MiB, or none.
    #[arg(long, value_name = "SIZE|none")]
    pub bandwidth: Option<Wish<ByteRate>>,
    /// Most commands at once after a pause; none: those of a tenth of a second.
    #[arg(long, value_name = "N|none")]
    pub iops_burst: Option<Wish<u32>>,
    /// Most bytes at once after a pause; none: those of a tenth of a second.
    #[arg(long, value_name = "SIZE|none")]
    pub bandwidth_burst: Option<Wish<ByteSize>>,
}

impl LimitArgs {
    /// The changes of the limits.
    #[must_use]
    pub fn wish(&self) -> LimitsWish {
        let Self { iops, bandwidth, iops_burst, bandwidth_burst } = *self;
        LimitsWish { iops, bandwidth, iops_burst, bandwidth_burst }
    }
}
