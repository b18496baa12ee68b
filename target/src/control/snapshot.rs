//! Snapshots: the file of a volume is cloned while hosts use the volume, and the clone is served
//! read-only as a volume of its own.
//!
//! First the clone is whole and durable, then it gets its name, then it is served. Whatever fails
//! leaves no file behind, and the volume goes on.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rblk_config::{StoreKind, TargetConfig, VolumeConfig};
use tokio::sync::mpsc;

use super::Request;
use super::ask::VolumeReport;
use super::orders::{asked, carry, change, open};
use super::reread::{FILES_TIME, Reread};
use super::volumes::Change;
use crate::store::reflink::{CloneError, CloneFile};

/// Takes a snapshot of the volume `name`, and serves it as `new_name`.
///
/// # Errors
/// There is none, for that reason.
pub(super) async fn take(
    requests: &mpsc::Sender<Request>,
    reread: &Reread,
    name: &str,
    new_name: String,
    path: Option<PathBuf>,
) -> Result<VolumeReport, String> {
    // One change at a time.
    let _turn = reread.turn().await;
    let running = asked(requests, Request::Running).await.ok_or("the target is stopping")?;
    let config = config_of(&running, name, new_name, path)?;
    let (Some(from), Some(to)) = (source_of(&running, name), config.path.clone()) else {
        return Err(format!("{name} has no file"));
    };
    let file = blocking(move || CloneFile::begin(&to)).await?;
    let file = Arc::new(file);
    let snapshot = Change::Snapshot { name: name.to_owned(), file: Arc::clone(&file) };
    carry(requests, snapshot, true).await?;
    let kept = Arc::clone(&file);
    blocking(move || kept.keep(&from)).await?;
    let served = serve(requests, reread, config).await;
    if served.is_err() {
        // It is of no use to anybody, and its name is free for the next one.
        blocking(move || {
            file.discard();
            Ok(())
        })
        .await?;
    }
    served
}

async fn serve(
    requests: &mpsc::Sender<Request>,
    reread: &Reread,
    config: VolumeConfig,
) -> Result<VolumeReport, String> {
    let opened = open(reread.target(), config.clone()).await?;
    change(requests, config.name.clone(), Change::Add(config, opened)).await
}

/// A file system may be slow, and this thread serves everybody; or it may hang, and other changes
/// wait for this one.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, CloneError> + Send + 'static,
) -> Result<T, String> {
    match tokio::time::timeout(FILES_TIME, tokio::task::spawn_blocking(work)).await {
        Ok(Ok(result)) => result.map_err(|error| error.to_string()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!(
            "the file system did not answer within {} s; what it still does is not undone: look whether the file of \
             the snapshot is there",
            FILES_TIME.as_secs()
        )),
    }
}

fn source_of(running: &TargetConfig, name: &str) -> Option<PathBuf> {
    running.volumes.iter().find(|volume| volume.name == name)?.path.clone()
}

/// The snapshot as a volume: read-only, with the blocks of its source, in a file beside it unless
/// another one is named.
fn config_of(
    running: &TargetConfig,
    name: &str,
    new_name: String,
    path: Option<PathBuf>,
) -> Result<VolumeConfig, String> {
    let source = running.volumes.iter().find(|volume| volume.name == name);
    let source = source
        .ok_or_else(|| format!("there is no volume {name}; `rblk-target volume list` shows all"))?;
    let (StoreKind::File, Some(from)) = (source.store, &source.path) else {
        return Err(format!("{name} is not in a file, and only a file can be cloned"));
    };
    if running.volumes.iter().any(|volume| volume.name == new_name) {
        return Err(format!("there is a volume {new_name} already: name another one (--as)"));
    }
    let path = path.unwrap_or_else(|| beside(from, &new_name));
    let snapshot = VolumeConfig {
        block_size: source.block_size,
        direct: source.direct,
        read_ahead: source.read_ahead,
        read_only: true,
        snapshot_of: Some(name.to_owned()),
        ..VolumeConfig::file(new_name, path)
    };
    let mut whole = running.clone();
    whole.volumes.push(snapshot.clone());
    whole.validate().map_err(|error| error.to_string())?;
    Ok(snapshot)
}

/// A file with that name in the directory of another one, with its extension.
fn beside(file: &Path, name: &str) -> PathBuf {
    let mut name = name.to_owned();
    if let Some(extension) = file.extension() {
        name.push('.');
        name.push_str(&extension.to_string_lossy());
    }
    file.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn running() -> TargetConfig {
        let text = "listen = ['tcp://127.0.0.1:1']
            [[volume]]
            name = 'db'
            store = 'file'
            path = '/srv/db.img'
            block_size = 512
            cache = 'write-back'
            [[volume]]
            name = 'ram'
            store = 'memory'
            size = '1MiB'";
        TargetConfig::parse(text, "test").unwrap()
    }

    #[test]
    fn a_snapshot_lies_beside_its_volume_and_is_read_only() {
        let config = config_of(&running(), "db", "db-1.x".to_owned(), None).unwrap();
        assert_eq!(config.path, Some("/srv/db-1.x.img".into()));
        assert_eq!((config.block_size, config.read_only, config.cache), (512, true, None));
        assert_eq!(config.snapshot_of.as_deref(), Some("db"));
        let named = config_of(&running(), "db", "s".to_owned(), Some("/srv/s".into())).unwrap();
        assert_eq!(named.path, Some("/srv/s".into()));
    }

    #[test]
    fn what_cannot_be_served_is_refused_before_anything_is_done() {
        let refused = |name: &str, new: &str, path: Option<&str>| {
            config_of(&running(), name, new.to_owned(), path.map(Into::into)).unwrap_err()
        };
        assert!(refused("nosuch", "s", None).contains("no volume nosuch"));
        assert!(refused("ram", "s", None).contains("only a file can be cloned"));
        assert!(refused("db", "ram", None).contains("a volume ram already"));
        assert!(refused("db", ".s", None).contains("name"), "it is no name");
        assert!(refused("db", "../s", None).contains("name"), "it leads elsewhere");
        assert!(refused("db", "s", Some("s.img")).contains("path"), "it is relative");
    }
}
