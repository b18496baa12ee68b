//! How a mount ends on a command and a signal together, and the log lines and replies about it.

use std::io::Write;
use std::sync::Mutex;

use tokio::sync::oneshot;

use super::*;
use crate::mount::device::write_back::{Left, WrittenBack};
use crate::mount::socket::Asked;
use crate::mount::unmount::{MountEnd, UnmountProgress};
use rblk_operate::mount::mount_ask::Ask;

/// The log of a test.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// Runs a closure and returns its log.
    fn of<T>(does: impl FnOnce() -> T) -> (T, String) {
        let log = Self::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).finish();
        let result = tracing::subscriber::with_default(subscriber, does);
        let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        (result, text)
    }
}

/// The request of a command, and the receiver of its answer.
fn command(force: bool) -> (Asked, oneshot::Receiver<Response>) {
    let (reply, answer) = oneshot::channel();
    (Asked { ask: Ask::Unmount { force }, reply }, answer)
}

fn done(left: Left) -> anyhow::Result<WrittenBack> {
    Ok(WrittenBack::Done(left))
}

fn late() -> anyhow::Result<WrittenBack> {
    Err(anyhow::anyhow!("it takes longer than 55s"))
}

fn is_by_force(end: Option<&MountEnd>) -> Option<bool> {
    match end {
        Some(MountEnd::Unmount { force }) => Some(*force),
        Some(MountEnd::HandOver(_)) => panic!("handed over"),
        None => None,
    }
}

#[test]
fn the_first_signal_takes_over_the_write_back_of_a_command() {
    runtime().block_on(async {
        let toy = Toy::new().await;
        let mount = mounted(&config(&[&toy])).await;
        let (request, _answer) = command(false);
        let mut ending = UnmountProgress::writing_back(Some(request), false);
        assert!(ending.on_terminate("d").is_none(), "the page cache is not dropped");
        let end = ending.on_synced(done(Left::default()), &mount);
        assert_eq!(is_by_force(end.as_ref()), Some(false));

        for result in [Ok(WrittenBack::InUse("process 7".to_owned())), late()] {
            let (request, mut answer) = command(false);
            let mut ending = UnmountProgress::writing_back(Some(request), false);
            assert!(ending.on_terminate("d").is_none());
            assert!(ending.on_synced(result, &mount).is_none());
            let (Response::Busy(text) | Response::Error(text)) = answer.try_recv().unwrap() else {
                panic!("done");
            };
            assert!(!text.contains("stays mounted"), "{text}");
            assert!(ending.deadline().is_some(), "an unmount of the process's own begins");
            let (end, log) = Log::of(|| ending.on_terminate("d"));
            assert_eq!(is_by_force(end.as_ref()), Some(true), "the second ends it at once");
            assert!(log.contains("told to end a second time"), "{log}");
        }
    });
}

#[test]
fn a_failed_write_back_reports_the_consequence() {
    runtime().block_on(async {
        let toy = Toy::new().await;
        let mount = mounted(&config(&[&toy])).await;
        let (request, mut answer) = command(false);
        let mut ending = UnmountProgress::writing_back(Some(request), false);
        assert!(ending.on_synced(late(), &mount).is_none());
        let Response::Error(text) = answer.try_recv().unwrap() else { panic!("no error") };
        assert!(text.contains("it stays mounted, --force gives up"), "{text}");

        let (request, _answer) = command(true);
        let by_force = UnmountProgress::writing_back(Some(request), true);
        let mut told = UnmountProgress::writing_back(None, false);
        assert!(told.on_terminate("d").is_none());
        for (mut ending, words) in
            [(by_force, "the disk goes by force"), (told, "this process ends")]
        {
            let (end, log) = Log::of(|| ending.on_synced(late(), &mount));
            assert_eq!(is_by_force(end.as_ref()), Some(true));
            assert!(log.contains("longer than 55s") && log.contains(words), "{log}");
            assert!(!log.contains("stays mounted"), "{log}");
        }
    });
}

#[test]
fn only_synced_data_is_reported_as_kept() {
    runtime().block_on(async {
        let toy = Toy::new().await;
        let mount = mounted(&config(&[&toy])).await;
        let used = Some("dm-0 (x) still stood on it".to_owned());
        for forced in [false, true] {
            let log_of = |left: Left| {
                let mut ending = UnmountProgress::writing_back(None, forced);
                let (end, log) = Log::of(|| ending.on_synced(done(left), &mount));
                assert_eq!(is_by_force(end.as_ref()), Some(forced));
                log
            };
            let kept = log_of(Left { used: used.clone(), unsynced: None });
            assert!(kept.contains("dm-0 (x)") && kept.contains("is kept"), "{kept}");
            let unsynced = Some("/dev/dm-0: Operation not permitted".to_owned());
            let lost = log_of(Left { used: used.clone(), unsynced });
            assert!(lost.contains("/dev/dm-0: Operation not permitted"), "{lost}");
            assert!(!lost.contains("is kept") && lost.contains("may be lost"), "{lost}");
            assert_eq!(log_of(Left::default()), "");
        }
    });
}
