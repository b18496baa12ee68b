//! Error texts: each cause is there exactly once.

use std::error::Error;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rblk_config::{HostFile, MountConfig, TargetConfig, key_file};
use rblk_fabric::{Address, FabricError, PostError};
use rblk_initiator::front::ublk::UblkError;
use rblk_initiator::volume::error::SessionError;
use rblk_operate::said_once;
use rblk_target::store::StoreError;

const CAUSE: &str = "a cause of the system";

fn cause() -> io::Error {
    io::Error::other(CAUSE)
}

/// Errors with a cause in their text, of every crate.
fn with_causes() -> Vec<Box<dyn Error + Send + Sync>> {
    let address = || "tcp://192.0.2.1:7721".to_owned();
    let path = || PathBuf::from("/srv/v.img");
    let listen = || FabricError::Listen { address: address(), error: cause() };
    let call = || FabricError::Call { call: "rdma_bind_addr", source: cause() };
    vec![
        Box::new(listen()),
        Box::new(call()),
        Box::new(PostError { posted: 1, source: cause() }),
        Box::new(SessionError::Fabric(listen())),
        Box::new(SessionError::Fabric(call())),
        Box::new(SessionError::System { what: "a buffer", source: cause() }),
        Box::new(SessionError::Unreachable {
            address: address(),
            after: Duration::from_secs(5),
            last: call().to_string(),
        }),
        Box::new(StoreError::Io { path: path(), what: "open it", source: cause() }),
        Box::new(StoreError::Ring { entries: 8, source: cause() }),
        Box::new(StoreError::Register { path: path(), source: cause() }),
        Box::new(UblkError::NoIoUring { source: cause() }),
        Box::new(UblkError::System { action: "starting a thread".to_owned(), source: cause() }),
    ]
}

/// Errors of this host, caused by the kernel.
fn of_this_host() -> Vec<anyhow::Error> {
    let none = Path::new("/no/such/directory/file.toml");
    vec![
        TargetConfig::load(none).unwrap_err().into(),
        MountConfig::load(Path::new("/")).unwrap_err().into(),
        key_file::read(none, key_file::Side::Target).unwrap_err().into(),
        HostFile::path_of(none, "a/b").unwrap_err().into(),
        "x:0".parse::<Address>().unwrap_err().into(),
        "".parse::<rblk_config::ByteSize>().unwrap_err().into(),
        "5".parse::<rblk_config::Duration>().unwrap_err().into(),
    ]
}

/// Parts between colons that occur twice.
fn doubled(text: &str) -> Vec<&str> {
    let parts: Vec<&str> = text.split(": ").filter(|part| part.len() >= 10).collect();
    let twice = |(at, part): (usize, &&&str)| parts[..at].contains(part);
    parts
        .iter()
        .enumerate()
        .filter(|(at, part)| twice((*at, part)))
        .map(|(_, part)| *part)
        .collect()
}

#[test]
fn no_error_says_its_cause_twice() {
    for error in with_causes() {
        let text = said_once(error.as_ref());
        assert_eq!(text.matches(CAUSE).count(), 1, "{text}");
        let around = anyhow::Error::from_boxed(error).context("volume `v`");
        let text = said_once(around.as_ref());
        assert_eq!(text.matches(CAUSE).count(), 1, "{text}");
        assert!(text.starts_with("volume `v`: "), "{text}");
    }
    for error in of_this_host() {
        let text = said_once(error.context("the configuration").as_ref());
        assert_eq!(doubled(&text), Vec::<&str>::new(), "{text}");
    }
    assert_eq!(
        doubled("a: Address already in use: Address already in use"),
        ["Address already in use"]
    );
}

/// `{:#}` prints causes again that an error's text already has.
#[test]
fn no_program_prints_a_whole_chain_of_causes() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut looked = 0;
    let mut found = Vec::new();
    for dir in ["config/src", "fabric/src", "operate/src", "target/src", "initiator/src", "cli/src"]
    {
        let mut dirs = vec![root.join(dir)];
        while let Some(dir) = dirs.pop() {
            for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
                let path = entry.path();
                if path.is_dir() {
                    dirs.push(path);
                    continue;
                }
                let text = fs::read_to_string(&path).unwrap();
                let code = text.split("#[cfg(test)]").next().unwrap_or_default();
                looked += 1;
                let is_test = path.ends_with("tests.rs") || path.iter().any(|part| part == "tests");
                if !is_test && ["{error:#}", "{e:#}"].iter().any(|form| code.contains(form)) {
                    found.push(path);
                }
            }
        }
    }
    assert!(looked > 100, "{looked}");
    assert_eq!(found, Vec::<PathBuf>::new(), "use rblk_operate::said_once");
}
