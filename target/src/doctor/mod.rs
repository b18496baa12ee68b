//! `rblk-target doctor`: what keeps this host from serving, each thing with the command that mends
//! it.
//!
//! `facts` reads the host; `judge` makes findings of that and does no I/O. A target that runs has
//! its stores, ports and memory already: then they are not tried again.

mod facts;
mod judge;

use std::path::Path;

use rblk_config::TargetConfig;
use rblk_config::doctor::{Finding, Report};

use crate::args::CONFIG;
use facts::Facts;

/// Looks at this host, as far as a configuration asks for it: the one that is named, or the usual
/// one if it is there.
///
/// # Errors
/// No runtime can be had.
pub fn doctor(path: Option<&Path>) -> anyhow::Result<Report> {
    let mut report = Report::default();
    let usual = Path::new(CONFIG);
    let path = path.or_else(|| usual.exists().then_some(usual));
    let loaded = path.map(TargetConfig::load);
    report.add([judge::config(path, loaded.as_ref())]);
    // Where it names no address, those are judged that `serve` would listen on.
    let config = loaded.and_then(Result::ok).map(|mut config| {
        crate::listen::fill_in(&mut config);
        config
    });
    let facts = Facts::read(Path::new("/"), config.as_ref())?;
    report.add(judge::host(&facts, config.as_ref()));
    if let Some(config) = &config {
        report.add(judge::memory(&facts, config));
        report.add(judge::network(&facts, config));
        report.add(judge::keys(&facts, config));
        report.add(judge::files(&facts, config));
        report.add(judge::volumes(&facts));
    }
    report.add(facts.systemd.judge(facts::UNIT));
    report.add([match (path, &config) {
        (Some(_), None) => Finding::skip("target", "needs a configuration"),
        _ => judge::running(&facts, path),
    }]);
    Ok(report)
}
