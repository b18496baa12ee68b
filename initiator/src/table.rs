//! Tables for people.

use std::fmt::Write;

use rblk_config::ByteSize;
use rblk_initiator::mount::status::MountStatus;

/// The mounts of this host.
pub(crate) fn mounts(mounts: &[MountStatus]) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "{:<20} {:<14} {:>10} {:<13} {:>6} {:>4} {:<12} {:<6} TARGET",
        "NAME", "DEVICE", "SIZE", "STATE", "QUEUES", "GEN", "TRANSPORT", "DIGEST"
    );
    for m in mounts {
        let _ = writeln!(
            text,
            "{:<20} {:<14} {:>10} {:<13} {:>6} {:>4} {:<12} {:<6} {} ({})",
            m.name,
            m.device,
            ByteSize(m.size_bytes).to_string(),
            m.state,
            m.queues,
            m.generation_shown(),
            transport(m),
            if m.digest { "crc32c" } else { "-" },
            m.address,
            m.target_name
        );
    }
    text
}

/// What carries the data; `soft/TLS` for TCP that is encrypted.
fn transport(mount: &MountStatus) -> &str {
    match mount.transport.as_str() {
        "soft/TCP" if mount.encrypted => "soft/TLS",
        transport => transport,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encrypted_data_is_shown() {
        let shown = |transport: &str, encrypted| {
            let transport = transport.to_owned();
            let mount = MountStatus { transport, encrypted, ..MountStatus::default() };
            let text = mounts(std::slice::from_ref(&mount));
            let column = text.find("TRANSPORT").unwrap();
            text.lines().nth(1).unwrap()[column..].split(' ').next().unwrap().to_owned()
        };
        assert_eq!(shown("soft/TCP", true), "soft/TLS");
        assert_eq!(shown("soft/TCP", false), "soft/TCP");
        assert_eq!(shown("RoCE", false), "RoCE");
    }

    #[test]
    fn a_generation_is_shown_where_it_says_something() {
        let shown = |generation, ephemeral| {
            let name = "m".to_owned();
            let mount = MountStatus { name, generation, ephemeral, ..MountStatus::default() };
            let text = mounts(std::slice::from_ref(&mount));
            let column = text.find("GEN").unwrap();
            let line = text.lines().nth(1).unwrap();
            let json = serde_json::to_value(&mount).unwrap();
            assert_eq!(json["generation"], generation, "JSON has the number");
            line[..column + 3].rsplit(' ').next().unwrap().to_owned()
        };
        assert_eq!(shown(7, false), "7");
        assert_eq!(shown(1_795_360_000_000_001, true), "-", "a volume in memory");
        assert_eq!(shown(0, false), "-", "a mount that waits for its first connect");
    }
}
