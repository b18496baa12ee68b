//! `rblk-target doctor`: the faults that keep this host from serving, each with the command that
//! mends it.
//!
//! `facts` reads the host, and `seen` the files as the user of the target finds them; `judge` makes
//! findings of them and does no I/O. A running target has its stores, ports and memory already:
//! then they are not tried again.

mod seen;
mod target_facts;
mod target_findings;

use std::path::Path;

use rblk_config::TargetConfig;
use rblk_config::unit_file::TARGET_UNIT;
use rblk_operate::doctor::{Finding, Report};

use rblk_operate::target::flags::CONFIG;
pub use seen::{Seen, Trouble};
use target_facts::Facts;

/// Examines this host, as far as a configuration asks for it: the one at `path`, or the usual one
/// if it exists.
///
/// # Errors
/// No runtime can be made.
pub fn doctor(path: Option<&Path>) -> anyhow::Result<Report> {
    let mut report = Report::default();
    let usual = Path::new(CONFIG);
    let path = path.or_else(|| usual.exists().then_some(usual));
    let loaded = path.map(TargetConfig::load);
    // Without an address in the file, judges the addresses that `serve` would listen on.
    let loaded = loaded.map(|loaded| {
        loaded.map(|mut config| {
            rblk_operate::target::listen::fill_in(&mut config, crate::daemon::CAN_RDMA);
            config
        })
    });
    let read = loaded.as_ref().and_then(|loaded| loaded.as_ref().ok());
    // If this process cannot read it, no other user is asked.
    let facts = Facts::read(Path::new("/"), path.filter(|_| read.is_some()), read)?;
    report.add([target_findings::config(path, loaded.as_ref(), &facts.seen)]);
    let config = loaded.and_then(Result::ok);
    report.add(target_findings::host(&facts, config.as_ref()));
    if let Some(config) = &config {
        report.add(target_findings::memory(&facts, config));
        report.add(target_findings::network(&facts, config));
        if facts.seen.config.is_none() {
            report.add(target_findings::keys(&facts, config));
        }
        report.add(target_findings::files(&facts, config));
        report.add(target_findings::volumes(&facts));
    }
    report.add(facts.systemd.judge(TARGET_UNIT));
    report.add([match (path, &config) {
        (Some(_), None) => Finding::skip("target", "needs a configuration"),
        _ => target_findings::running(&facts, path),
    }]);
    Ok(report)
}
