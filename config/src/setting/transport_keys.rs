//! [`TransportKeys`]: the keys that both ends of a connection have.

use crate::schema::key_table::key_table;
use crate::schema::rule::Key;
use crate::schema::rule::Rule;
use crate::setting::connection_protection::Encrypt;
use crate::setting::spin_key::Spin;
use crate::units::Duration;

key_table! {
    /// The keys of connections. They stand beside the other keys of a target and of a mount.
    pub struct TransportKeys in TRANSPORT_KEYS {
        /// How long an idle data thread looks for work before it sleeps. "adaptive": as long as
        /// that saved time lately, and not at all if other programs need the CPU. "always": the
        /// thread never sleeps.
        pub spin: Spin = Spin::Adaptive => Key::new(Rule::Spin { max: Duration::from_millis(10) });
        /// Whether `tcp://` connections are encrypted, by the kernel (module `tls`). "auto": if
        /// both ends prove their keys and both kernels can. "required": a connection that cannot be
        /// encrypted is refused. "off": never. No effect on `rdma://`.
        pub encrypt: Encrypt = Encrypt::Auto
            => Key::word(Encrypt::WORDS).more("security.md#encryption");
        /// Whether RDMA cards may write to memory in any order before they report it (relaxed
        /// ordering of PCIe). Faster on AMD EPYC, in virtual machines and from 100 Gb/s on. A card
        /// that cannot do it ignores it. "false" is for a host that is suspected to lose the order.
        pub relaxed_ordering: bool = true => Key::new(Rule::Flag);
        /// Type of service (IPv6: traffic class) of the packets of connections: DSCP times 4, plus
        /// ECN. The network chooses a class by it, such as the lossless one for RoCE. On RoCE the
        /// value of the mount applies to both directions.
        pub tos: Option<u8> = None
            => Key::count(0, 255).absent("the default of the system", "106")
                .more("install.md#the-network");
        /// How long an RDMA card waits for an acknowledgement before it sends a packet again,
        /// rounded down to a power of two of 4.096 us. A card may take up to four times as long,
        /// and a connection ends after seven tries.
        pub ack_timeout: Option<Duration> = None
            => Key::span(Duration::from_millis(1), Duration::from_secs(30))
                .absent("the longest with which seven tries fit into the mount's detect, at least 67 ms",
                    "\"134ms\"")
                .more("hardware.md#time-outs");
    }
}
