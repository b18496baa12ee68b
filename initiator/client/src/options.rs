//! [`Options`]: the options of an open.

use rblk_config::MountConfig;
use rblk_initiator::front::program::{VolumeWish, open};
use rblk_initiator::mount::note::neighbour;
use rblk_initiator::volume::session::HostIdentity;
use rblk_protocol::{HostId, Name};

use crate::{OpenError, Volume};

/// The options for opening a volume.
#[derive(Clone, Debug)]
pub struct Options {
    config: MountConfig,
    host_id: Option<HostId>,
    take_over: bool,
    spare_buffers: u16,
}

impl Options {
    /// Opens the volume as a mount with that configuration would. `queues` is 1 if it is absent.
    /// `device_id` has no effect.
    #[must_use]
    pub fn new(config: MountConfig) -> Self {
        Self { config, host_id: None, take_over: false, spare_buffers: 0 }
    }

    /// Buffers of each queue beyond its depth: for data that the program keeps while the queue is
    /// full.
    #[must_use]
    pub fn spare_buffers(mut self, count: u16) -> Self {
        self.spare_buffers = count;
        self
    }

    /// Fences the host that holds the volume.
    #[must_use]
    pub fn take_over(mut self) -> Self {
        self.take_over = true;
        self
    }

    /// The id by which targets know this program. Without it, each open of a volume gets a random
    /// id: the target takes every other mount or program for a different holder, and gives none of
    /// them the volume without [`Self::take_over`]. That is true of the same program after a crash,
    /// too. It has to wait for the `lease` of the target (30 s), unless it keeps an id of its own:
    /// the holder with the same id gets its volume back at once. Never give one id to two programs
    /// that may run at the same time: the second one fences the first one while that one waits for
    /// its target.
    ///
    /// Zeros count as no id.
    ///
    /// With keys the id has no effect: the target knows a program by its key (`key_file`). Give
    /// each program a key of its own.
    #[must_use]
    pub fn host_id(mut self, id: [u8; 16]) -> Self {
        self.host_id = (id != [0; 16]).then_some(HostId(id));
        self
    }

    /// Opens the volume. The call blocks until the target answers: call it only where that is
    /// allowed. It takes at most the `connect_timeout` and `wait` of the configuration, and for
    /// each address half a minute more for a target with many logins, or one that is changing the
    /// volume.
    ///
    /// # Errors
    /// [`OpenError`] with the reason. Nothing is left then.
    pub fn open(self) -> Result<Volume, OpenError> {
        let Self { config, host_id, take_over, spare_buffers } = self;
        let may_open = |config: &MountConfig, host: &HostIdentity, target_name: &Name| {
            neighbour::must_not_hold("", config, host.id, Some(target_name))
        };
        open(VolumeWish { config, host_id, take_over, spare_buffers, may_open })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_options_are_refused_before_any_try() {
        let error = Options::new(MountConfig::default()).open().unwrap_err();
        assert!(!error.is_transient());
        assert!(error.to_string().contains("target"), "{error}");
        let config = MountConfig::new("tcp://127.0.0.1:1", "vol0");
        let error = Options::new(config).open().unwrap_err();
        assert!(error.is_transient(), "{error}");
    }
}
