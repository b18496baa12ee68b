//! [`VolumeEdit`]: other values for a volume.

use rblk_config::{ByteSize, CacheMode, VolumeConfig};
use rblk_operate::target::ask::{LimitsWish, Wish};

/// Other values for a volume. What is absent stays.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VolumeEdit {
    pub read_only: Option<bool>,
    pub cache: Option<CacheMode>,
    pub read_ahead: Option<ByteSize>,
    pub cache_min: Option<Wish<ByteSize>>,
    pub cache_max: Option<Wish<ByteSize>>,
    pub limits: LimitsWish,
}

impl VolumeEdit {
    /// The volume with these values.
    pub(crate) fn on(self, config: &VolumeConfig) -> VolumeConfig {
        let mut config = config.clone();
        config.limits = self.limits.on(config.limits);
        config.read_only = self.read_only.unwrap_or(config.read_only);
        // The rules of the configuration decide whether its store may have one.
        config.cache = self.cache.or(config.cache);
        config.read_ahead = self.read_ahead.unwrap_or(config.read_ahead);
        config.cache_min = Wish::on(self.cache_min, config.cache_min);
        config.cache_max = Wish::on(self.cache_max, config.cache_max);
        config
    }
}
