//! [`DeviceInfo`]: the driver's description of a device. Unknown values, such as states of newer
//! kernels, are kept.

use crate::front::ublk::abi;
use crate::front::ublk::feature::Features;
use crate::front::ublk::token::DeviceToken;

/// The state of a device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DeviceState {
    /// No disk: not started yet, or stopped.
    Dead,
    /// Served.
    Live,
    /// The server is gone; requests wait for the next one.
    Quiesced,
    /// The server is gone; requests fail until the next one.
    FailIo,
    /// A state of a newer kernel.
    Unknown(u16),
}

/// The driver's description of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceInfo {
    /// The N of `/dev/ublkbN`.
    pub id: u32,
    /// Hardware queues.
    pub queues: u16,
    /// Tags of each.
    pub depth: u16,
    /// Size of a tag's buffer.
    pub max_io_bytes: u32,
    /// Its state.
    pub state: DeviceState,
    /// Features in use.
    pub flags: Features,
    /// The process that serves it, or served it last. Before 7.0 the id of a dead process stays.
    pub server_pid: Option<i32>,
    /// The token of its server; `None` for a server without tokens, or with those of another
    /// program.
    pub token: Option<DeviceToken>,
}

impl DeviceInfo {
    pub(super) fn from_abi(info: &abi::DevInfo) -> Self {
        Self {
            id: info.dev_id,
            queues: info.nr_hw_queues,
            depth: info.queue_depth,
            max_io_bytes: info.max_io_buf_bytes,
            state: match info.state {
                abi::STATE_DEAD => DeviceState::Dead,
                abi::STATE_LIVE => DeviceState::Live,
                abi::STATE_QUIESCED => DeviceState::Quiesced,
                abi::STATE_FAIL_IO => DeviceState::FailIo,
                other => DeviceState::Unknown(other),
            },
            flags: Features::from_bits(info.flags),
            server_pid: (info.ublksrv_pid > 0).then_some(info.ublksrv_pid),
            token: DeviceToken::of(info.ublksrv_flags),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_states_are_kept() {
        let info = abi::DevInfo { state: 9, ublksrv_pid: -1, ..abi::DevInfo::default() };
        let info = DeviceInfo::from_abi(&info);
        assert_eq!((info.state, info.server_pid), (DeviceState::Unknown(9), None));
    }
}
