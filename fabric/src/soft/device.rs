//! The software device.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use rblk_protocol::width::narrow;

use crate::caps::{DeviceCaps, Transport};
use crate::connect::QpLimits;
use crate::error::{FabricError, Result};
use crate::work::MAX_SGE;

/// Largest MR: the address space of a process.
const REGION_MAX_BYTES: u64 = 1 << 47;

/// A software device: the one TCP device of the process, or one of an in-memory network.
#[derive(Clone, Debug)]
pub struct Device(Arc<SoftDevice>);

#[derive(Debug)]
struct SoftDevice {
    caps: DeviceCaps,
    // Varies the keys, so that the keys of two domains or two runs rarely are the same.
    salt: u64,
    // Domains that were made, ever.
    domains: AtomicU64,
}

impl Device {
    /// The TCP device: one per process, so that one PD serves every TCP connection.
    #[must_use]
    pub fn tcp() -> Self {
        static TCP: OnceLock<Device> = OnceLock::new();
        TCP.get_or_init(|| {
            use std::hash::{BuildHasher, RandomState};
            let salt = RandomState::new().hash_one(std::process::id());
            Self::new(salt, false, Self::caps_of("soft", Transport::SoftTcp))
        })
        .clone()
    }

    /// The device of an in-memory network. With `late`, its QPs touch memory until they are
    /// destroyed, as the QPs of a card do.
    pub(super) fn memory(seed: u64, max_region_bytes: u64, late: bool) -> Self {
        let caps = Self::caps_of("memory", Transport::SoftMemory);
        let max_region_bytes = max_region_bytes.min(REGION_MAX_BYTES);
        Self::new(seed, late, DeviceCaps { max_region_bytes, ..caps })
    }

    /// The device of an in-memory network that claims to be an iWARP card: it has no immediates,
    /// and the sink of a READ needs the right of remote write.
    pub(super) fn iwarp(seed: u64, late: bool) -> Self {
        let caps = DeviceCaps {
            write_with_imm: false,
            read_sink_needs_remote_write: true,
            ..Self::caps_of("iwarp", Transport::Iwarp)
        };
        Self::new(seed, late, caps)
    }

    /// Seeds the random decisions.
    pub(super) fn salt(&self) -> u64 {
        self.0.salt
    }

    /// Varies the keys of the next domain: a key of one domain names nothing in another.
    pub(super) fn domain_salt(&self) -> u64 {
        let number = self.0.domains.fetch_add(1, Ordering::Relaxed);
        self.0.salt.wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn new(salt: u64, late: bool, caps: DeviceCaps) -> Self {
        let caps = DeviceCaps { touches_until_destroyed: late, ..caps };
        Self(Arc::new(SoftDevice { caps, salt, domains: AtomicU64::new(0) }))
    }

    fn caps_of(name: &str, transport: Transport) -> DeviceCaps {
        DeviceCaps {
            name: name.to_owned(),
            transport,
            max_wrs: 1 << 15,
            max_sges: narrow(MAX_SGE),
            max_cq_entries: 1 << 22,
            max_reads_out: 128,
            max_reads_in: 128,
            max_region_bytes: REGION_MAX_BYTES,
            inline_bytes: 0,
            write_with_imm: true,
            read_sink_needs_remote_write: false,
            kernel_software: false,
            touches_until_destroyed: false,
        }
    }

    /// The abilities of the device.
    #[must_use]
    pub fn caps(&self) -> &DeviceCaps {
        &self.0.caps
    }

    /// Whether both are the same device.
    #[must_use]
    pub(crate) fn same_as(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Checks the sizes of a QP against the claims.
    pub(super) fn check(&self, limits: &QpLimits) -> Result<()> {
        let caps = self.caps();
        self.within("send WRs", caps.max_wrs.into(), limits.send_wrs.into())?;
        self.within("RECVs", caps.max_wrs.into(), limits.recv_wrs.into())?;
        self.within("SGEs", caps.max_sges.into(), limits.send_sges.into())?;
        self.within("SGEs of a RECV", caps.max_sges.into(), limits.recv_sges.into())?;
        self.within("outgoing READs", caps.max_reads_out.into(), limits.reads_out.into())?;
        self.within("incoming READs", caps.max_reads_in.into(), limits.reads_in.into())
    }

    /// Checks one size against its limit.
    pub(super) fn within(&self, what: &'static str, limit: u64, asked: u64) -> Result<()> {
        if asked <= limit {
            return Ok(());
        }
        Err(FabricError::Limit { device: self.caps().name.clone(), what, limit, asked })
    }
}
