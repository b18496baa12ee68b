//! Device, port, firmware, limits, PCIe, NUMA, locked memory.

use std::path::Path;

use anyhow::Result;
use rblk_fabric::Transport;
use rblk_operate::doctor::Finding;

use super::Out;
use super::judge::{self, float};
use super::site::Site;
use crate::sysfs::{Card, Host};

pub(super) fn check(site: &Site, out: &Out) -> Result<()> {
    let caps = site.device.caps();
    let root = Path::new("/");
    let host = Host::read(root, &caps.name);
    let Some(facts) = site.device.facts(site.port())? else {
        out.add(Finding::skip("device", "the software provider has no card"));
        out.add_all(judge::rights(&host));
        return Ok(());
    };
    let index = site.gid.as_ref().map_or(0, |gid| gid.index);
    let card = Card::read(root, &caps.name, site.port(), index);
    out.add_all(judge::port(&card, Some(&facts)));
    out.add(judge::mtu(&facts, &card, caps.transport == Transport::Iwarp));
    let index = site.gid.as_ref().map(|gid| gid.index);
    out.add(judge::gid(&card, index, caps.transport == Transport::Roce));
    if let Some(tos) = card.tos {
        out.add(Finding::ok("default TOS", format!("{tos} for connections that set none")));
    }
    out.add(judge::pcie(card.pcie.as_ref()));
    out.add_all(judge::near(&card, &host, &facts, caps.kernel_software));
    out.add_all(judge::limits(&facts));
    out.add_all(judge::rights(&host));
    let inline = format!("{} B of a small QP", caps.inline_bytes);
    out.add(Finding::ok("inline", inline));
    for (name, value) in [
        ("mtu_bytes", facts.mtu),
        ("max_qps", facts.max_qps),
        ("max_wrs", facts.max_wrs),
        ("max_sges", facts.max_sges),
        ("max_read_sges", facts.max_read_sges),
        ("max_cq_entries", facts.max_cq_entries),
        ("max_mrs", facts.max_mrs),
        ("max_reads_out", facts.max_reads_out),
        ("max_reads_in", facts.max_reads_in),
        ("vectors", facts.vectors),
        ("vendor", facts.vendor),
        ("part", facts.part),
        ("inline_bytes", caps.inline_bytes),
    ] {
        out.figure(name, value.into());
    }
    out.figure("available_bytes", float(host.available));
    Ok(())
}
