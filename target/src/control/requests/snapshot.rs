//! Snapshots: the file of a volume is cloned while hosts use the volume, and the clone is served
//! read-only as a volume of its own.
//!
//! First the clone is whole and durable, then it gets its name, then it is served. Any failure
//! leaves no file behind, and the volume goes on.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rblk_config::{Exit, StoreKind, TargetConfig, VolumeConfig};
use tokio::sync::mpsc;

use super::file_work::with_files;
use super::orders::{asked, change, open, send_change, store_faults};
use super::reread::Reread;
use crate::control::ToControl;
use crate::control::core::VolumeChange;
use crate::control::volumes::change_files::ChangeFiles;
use crate::pool::reflink::{CloneError, CloneFile};
use rblk_operate::target::ask::VolumeReport;
use rblk_operate::target::refusal::Refusal;

/// Takes a snapshot of the volume `name`, and serves it as `new_name`.
///
/// # Errors
/// Why no snapshot was taken.
pub(in crate::control) async fn take(
    requests: &mpsc::Sender<ToControl>,
    reread: &Reread,
    name: &str,
    new_name: String,
    path: Option<PathBuf>,
) -> Result<VolumeReport, Refusal> {
    // One change at a time.
    let _lock = reread.lock_changes().await;
    let running = asked(requests, ToControl::Running).await.ok_or("the target is stopping")?;
    let config = config_of(&running, name, new_name, path)?;
    let (Some(from), Some(to)) = (source_of(&running, name), config.path.clone()) else {
        return Err(format!("{name} has no file").into());
    };
    let fault = store_faults(requests).await?.remove(name);
    let mut file = Unserved::begin(to).await?;
    let files = ChangeFiles::of_snapshot(Arc::clone(&file.file));
    send_change(requests, (VolumeChange::Snapshot { name: name.to_owned() }, files), true).await?;
    file.keep(from).await?;
    match serve(requests, reread, config).await {
        Ok(report) => {
            file.served();
            Ok(VolumeReport { store_fault: fault, ..report })
        }
        // The file is of no use, and its name is free for the next one.
        Err(error) => Err(file.discard().await.err().unwrap_or(error).into()),
    }
}

/// The file of a snapshot that is not served yet. When this is dropped, as by a target that stops,
/// the file is removed.
#[derive(Debug)]
struct Unserved {
    file: Arc<CloneFile>,
    // Either the file is served, or its own work sees to it.
    is_done: bool,
}

impl Unserved {
    async fn begin(path: PathBuf) -> Result<Self, String> {
        let file = blocking(move || CloneFile::begin(&path)).await?;
        Ok(Self { file: Arc::new(file), is_done: false })
    }

    /// Gives the file its name, with the mode of its source.
    async fn keep(&mut self, source: PathBuf) -> Result<(), String> {
        let file = Arc::clone(&self.file);
        let kept = blocking(move || file.keep(&source)).await;
        if kept.is_err() {
            // The file system may hang: the work under way leaves nothing behind.
            self.file.give_up();
            self.is_done = true;
        }
        kept
    }

    async fn discard(mut self) -> Result<(), String> {
        self.is_done = true;
        let file = Arc::clone(&self.file);
        blocking(move || {
            file.discard();
            Ok(())
        })
        .await
    }

    fn served(mut self) {
        self.is_done = true;
    }
}

impl Drop for Unserved {
    fn drop(&mut self) {
        if !self.is_done {
            // If the file is being kept now, that work sees the first call, or the second one sees
            // its name.
            self.file.give_up();
            self.file.discard();
        }
    }
}

async fn serve(
    requests: &mpsc::Sender<ToControl>,
    reread: &Reread,
    config: VolumeConfig,
) -> Result<VolumeReport, String> {
    let opened = open(reread, config.clone()).await.map_err(|away| away.why)?;
    change(requests, (VolumeChange::Add(config), ChangeFiles::of_new(opened))).await
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, CloneError> + Send + 'static,
) -> Result<T, String> {
    let late = || "the file of the snapshot was not made or removed".to_owned();
    with_files("the file of a snapshot".to_owned(), late, || {
        work().map_err(|error| error.to_string())
    })
    .await
}

fn source_of(running: &TargetConfig, name: &str) -> Option<PathBuf> {
    running.volumes.iter().find(|volume| volume.name == name)?.path.clone()
}

/// The snapshot as a volume: read-only, with the blocks of its source, in a file beside it unless
/// `path` names another one.
fn config_of(
    running: &TargetConfig,
    name: &str,
    new_name: String,
    path: Option<PathBuf>,
) -> Result<VolumeConfig, Refusal> {
    let source = running.volumes.iter().find(|volume| volume.name == name);
    let source = source.ok_or_else(|| Refusal::no_volume(name))?;
    let (StoreKind::File, Some(from)) = (source.store, &source.path) else {
        return Err(format!("{name} is not in a file, and only a file can be cloned").into());
    };
    if running.volumes.iter().any(|volume| volume.name == new_name) {
        let text = format!("there is a volume {new_name} already: choose another name (--as)");
        return Err(Refusal::new(Exit::AlreadyThere, text));
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

/// A file of that name in the directory of another one, with its extension.
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
    use std::collections::HashMap;

    use super::*;
    use crate::control::volumes::ChangedVolume;

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

    /// Control that serves one volume, and carries out orders until one adds another volume.
    async fn control(mut requests: mpsc::Receiver<ToControl>, running: TargetConfig) -> ToControl {
        loop {
            match requests.recv().await.expect("somebody who asks") {
                ToControl::Running(reply) => drop(reply.send(Box::new(running.clone()))),
                ToControl::StoreFaults(reply) => drop(reply.send(HashMap::new())),
                ToControl::Change { change, files, reply, .. }
                    if matches!(*change, VolumeChange::Snapshot { .. }) =>
                {
                    files.clone.expect("its file").share_zeroes(1 << 20);
                    drop(reply.send(Ok(ChangedVolume::default())));
                }
                other => return other,
            }
        }
    }

    #[test]
    fn a_snapshot_that_is_not_served_leaves_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let (source, to) = (directory.path().join("a.img"), directory.path().join("s.img"));
        std::fs::write(&source, vec![7; 1 << 20]).unwrap();
        let running = TargetConfig {
            listen: vec!["tcp://127.0.0.1:1".to_owned()],
            volumes: vec![VolumeConfig::file("db", source)],
            ..TargetConfig::default()
        };
        let name = rblk_protocol::Name::new("t").unwrap();
        let reread = Reread::new(&running, (name, false), || unreachable!("nothing is read"));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (requests, asked) = mpsc::channel(1);
            let take = take(&requests, &reread, "db", "s".to_owned(), None);
            let deadline = std::time::Duration::from_secs(20);
            let add = async {
                tokio::select! {
                    taken = take => panic!("{taken:?}"),
                    add = control(asked, running.clone()) => add,
                }
            };
            // `take` is dropped, as by a stop, while control should serve the clone.
            let add = tokio::time::timeout(deadline, add).await.expect("an order");
            let ToControl::Change { change, .. } = &add else { panic!("{add:?}") };
            let VolumeChange::Add(config) = &**change else { panic!("{change:?}") };
            assert_eq!(config.path.as_ref(), Some(&to));
        });
        assert!(!to.exists(), "nobody serves it");
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
    fn a_snapshot_that_cannot_be_served_is_refused_first() {
        let refused = |name: &str, new: &str, path: Option<&str>| {
            config_of(&running(), name, new.to_owned(), path.map(Into::into)).unwrap_err()
        };
        assert!(refused("nosuch", "s", None).text().contains("no volume nosuch"));
        assert!(refused("ram", "s", None).text().contains("only a file can be cloned"));
        assert!(refused("db", "ram", None).text().contains("a volume ram already"));
        assert!(refused("db", ".s", None).text().contains("name"), "it is no name");
        assert!(refused("db", "../s", None).text().contains("name"), "it leads elsewhere");
        assert!(refused("db", "s", Some("s.img")).text().contains("path"), "it is relative");
    }
}
