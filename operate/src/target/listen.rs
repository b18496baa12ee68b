//! The addresses of a target without any in its configuration: every address of the host.

use std::path::Path;

use crate::sysfs;
use rblk_config::{LISTEN_DEFAULT, TargetConfig};

/// The kernel's default of IPV6_V6ONLY: whether an IPv6 address takes no IPv4 peers. Exists only
/// with IPv6.
const IPV6_ONLY: &str = "/proc/sys/net/ipv6/bindv6only";

/// Sets the addresses of a configuration that names none. `can_rdma`: the serving program has RDMA.
pub fn fill_in(config: &mut TargetConfig, can_rdma: bool) {
    if config.listen.is_empty() {
        let has_rdma = can_rdma && has_entries(&sysfs::rdma_class(Path::new("/")));
        let ipv6 = std::fs::read_to_string(IPV6_ONLY).ok();
        config.listen = every_address(has_rdma, ipv6.as_deref().map(str::trim));
    }
}

fn has_entries(dir: &Path) -> bool {
    std::fs::read_dir(dir).is_ok_and(|mut dir| dir.next().is_some())
}

/// `[::]` takes peers of IPv4, too, unless `ipv6_only` is `1`. A kernel without IPv6 refuses it.
fn every_address(has_rdma: bool, ipv6_only: Option<&str>) -> Vec<String> {
    let rdma = ["rdma://0.0.0.0:7720", "rdma://[::]:7720"];
    let tcp = ["tcp://0.0.0.0:7721", LISTEN_DEFAULT];
    let hosts = match ipv6_only {
        None => 0..1,
        Some("1") => 0..2,
        Some(_) => 1..2,
    };
    let rdma = rdma[hosts.clone()].iter().filter(|_| has_rdma);
    rdma.chain(&tcp[hosts]).map(|address| (*address).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_address_of_the_host() {
        let addresses = |rdma, ipv6_only| every_address(rdma, ipv6_only).join(" ");
        assert_eq!(addresses(true, Some("0")), "rdma://[::]:7720 tcp://[::]:7721");
        assert_eq!(addresses(false, Some("0")), "tcp://[::]:7721");
        assert_eq!(addresses(true, None), "rdma://0.0.0.0:7720 tcp://0.0.0.0:7721");
        assert_eq!(addresses(false, Some("1")), "tcp://0.0.0.0:7721 tcp://[::]:7721");
    }

    #[test]
    fn a_configured_address_stays() {
        let mut config =
            TargetConfig { listen: vec!["tcp://127.0.0.1".to_owned()], ..TargetConfig::default() };
        fill_in(&mut config, true);
        assert_eq!(config.listen, ["tcp://127.0.0.1"]);
        config.listen.clear();
        fill_in(&mut config, true);
        assert!(
            config
                .listen
                .iter()
                .all(|address| address.contains("[::]") || address.contains("0.0.0.0"))
        );
        assert!(!config.listen.is_empty());
    }
}
