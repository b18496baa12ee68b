//! The findings of `rblk-target doctor` about the default ports of a target without `listen`. The
//! test takes such a port itself, so it runs alone.

use std::process::Command;

use rblk_tests::program::{program, run};
use serde_json::Value;

#[test]
fn doctor_checks_the_default_ports_without_addresses() {
    let dir = tempfile::tempdir().unwrap();
    let (config, at) = (dir.path().join("t.toml"), dir.path().display());
    let text = format!(
        "control_socket = '{at}/c.sock'\nstate_dir = '{at}/state'\narena = '8MiB'\ninsecure = true\n"
    );
    std::fs::write(&config, text).unwrap();
    let listens = || {
        let mut command = Command::new(program("rblk-target"));
        let ended = run(command.args(["doctor", "-o", "json", "--config"]).arg(&config));
        let report: Value = serde_json::from_str(&ended.stdout).unwrap();
        let findings = report["findings"].as_array().unwrap().iter();
        let listens = findings.filter(|finding| finding["subject"] == "listen");
        listens.map(|l| (l["verdict"].clone(), l["found"].to_string())).collect::<Vec<_>>()
    };
    let listener = std::net::TcpListener::bind(("::", 7721));
    let listener = listener.unwrap_or_else(|error| panic!("{error}: {:#?}", listens()));
    let taken: Vec<_> = listens().into_iter().filter(|(verdict, _)| verdict == "fail").collect();
    let by = format!("(os error 98) by process {} (", std::process::id());
    assert_eq!(taken.len(), 1, "{taken:#?}");
    assert!(taken[0].1.contains("7721: ") && taken[0].1.contains(&by), "{taken:?}");
    drop(listener);
    let free = listens();
    assert!(
        free.iter().any(|(verdict, found)| verdict == "ok" && found.contains("7721")),
        "{free:?}"
    );
}
