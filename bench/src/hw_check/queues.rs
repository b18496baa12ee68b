//! QPs and CQs of the sizes that rblk may ask for, beside the granted ones.

use anyhow::Result;
use rblk_fabric::{QpFacts, Transport};
use rblk_operate::doctor::Finding;

use super::Out;
use super::ends::{Ends, limits};
use super::judge;
use super::site::Site;

const DEPTHS: [u32; 3] = [128, 512, 1024];
const ENTRIES: [u32; 4] = [1 << 10, 1 << 12, 1 << 14, 1 << 16];

pub(super) fn check(site: &Site, out: &Out) -> Result<()> {
    let caps = site.device.caps();
    for depth in DEPTHS {
        let sizes = limits(caps, depth);
        let entries = sizes.send_wrs + sizes.recv_wrs;
        let subject = format!("QP of {depth} WRs");
        if entries > caps.max_cq_entries {
            let words = format!("a CQ has {} entries at most", caps.max_cq_entries);
            out.add(Finding::warn(subject, words));
            continue;
        }
        let made = Ends::new(site, entries).and_then(|mut ends| {
            let link = ends.connect(site, sizes, &[])?;
            ends.close(link);
            Ok(link)
        });
        match made {
            Ok(link) => {
                // The packets of iWARP are those of TCP.
                let iwarp = caps.transport == Transport::Iwarp;
                let facts = link.facts.map(|facts| match iwarp {
                    true => QpFacts { mtu: 0, ..facts },
                    false => facts,
                });
                out.add(judge::queue(depth, &sizes, facts.as_ref()));
                if let Some(facts) = facts {
                    out.figure(format!("send_wrs_of_{depth}"), facts.send_wrs.into());
                    out.figure(format!("recv_wrs_of_{depth}"), facts.recv_wrs.into());
                    out.figure(format!("sges_of_{depth}"), facts.send_sges.into());
                    out.figure(format!("inline_bytes_of_{depth}"), facts.inline_bytes.into());
                }
            }
            // The usual depth is the smallest of these.
            Err(error) if depth == DEPTHS[0] => {
                out.add(Finding::fail(subject, format!("{error:#}")));
            }
            Err(error) => out.add(Finding::warn(subject, format!("{error:#}"))),
        }
    }
    let pd = site.device.alloc_pd()?;
    let mut granted = Vec::new();
    for entries in ENTRIES {
        if entries > caps.max_cq_entries {
            granted.push(format!("{entries}: more than the device has"));
            continue;
        }
        let (poller, handle) = match pd.poller(entries) {
            Ok(made) => made,
            Err(error) => {
                out.add(Finding::warn(format!("CQ of {entries}"), error.to_string()));
                continue;
            }
        };
        let has = handle.entries().unwrap_or(entries);
        out.figure(format!("cq_entries_of_{entries}"), has.into());
        granted.push(format!("{entries}: {has}"));
        drop((poller, handle));
    }
    out.add(Finding::ok("CQ entries", granted.join(", ")));
    Ok(())
}
