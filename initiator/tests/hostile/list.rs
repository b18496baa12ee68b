//! Targets with a LIST that does not end.

use std::time::{Duration, Instant};

use rblk_fabric::ConnectOptions;
use rblk_initiator::volume::error::SessionError;
use rblk_protocol::{
    AccessMode, BlockCount, BlockSize, CommandCapsule, Name, Opcode, Status, VolumeEntry,
    VolumeFlags, VolumeListHeader,
};

use super::target::{Answer, Manners, listen};
use super::{connect, login_reply, runtime};

const PAGE: u32 = 42;
/// More pages than an initiator may request here. The list ends then, so that an initiator without
/// a bound fails the test at once.
const PAGES_MOST: u32 = 65_536 / PAGE + 100;

/// The course of a list: the number of entries on the page from that index, and the announced
/// total.
type Course = fn(u32) -> (u32, u32);

struct Lister {
    course: Course,
    pause: Duration,
    pages: u32,
}

impl Manners for Lister {
    fn has_proofs(&self) -> bool {
        false
    }

    fn answer(&mut self, command: &CommandCapsule, _: &[u8]) -> Option<Answer> {
        match command.opcode {
            Opcode::Login => Some(Answer::ok(login_reply().to_wire())),
            Opcode::OpenVolume => {
                Some(Answer { status: Status::NoSuchVolume, ..Answer::ok(Vec::new()) })
            }
            Opcode::ListVolumes => {
                self.pages += 1;
                if self.pages > PAGES_MOST {
                    return Some(Answer { status: Status::InvalidField, ..Answer::ok(Vec::new()) });
                }
                let (entries, total) = (self.course)(u32::try_from(command.lba.0).unwrap());
                let entry = VolumeEntry {
                    name: Name::new("v").unwrap(),
                    flags: VolumeFlags::default(),
                    block_size: BlockSize::new(4096).unwrap(),
                    blocks: BlockCount(1),
                    uuid: [1; 16],
                };
                let mut page = VolumeListHeader { entries, total }.to_wire().to_vec();
                (0..entries).for_each(|_| page.extend(entry.to_wire()));
                Some(Answer { after: self.pause, ..Answer::ok(page) })
            }
            other => panic!("{other:?}"),
        }
    }
}

/// The result of a list, and the number of requested pages.
fn list(course: Course, pause: Duration, timeout: Duration) -> (Result<usize, SessionError>, u32) {
    runtime().block_on(async {
        let (address, lister) = listen(Lister { course, pause, pages: 0 }).await;
        let options = ConnectOptions { timeout, ..ConnectOptions::default() };
        let mut session = connect(&address, &options, None).await.unwrap();
        let result = session.list().await.map(|volumes| volumes.len());
        let pages = lister.lock().unwrap().pages;
        (result, pages)
    })
}

const LONG: Duration = Duration::from_secs(60);

#[test]
fn a_list_without_end() {
    let is_error = |result: &Result<usize, SessionError>| matches!(result, Err(SessionError::Protocol(why)) if why.contains("list"));
    // The announced length is refused: nothing is taken.
    let (result, pages) = list(|_| (PAGE, u32::MAX), Duration::ZERO, LONG);
    assert!(is_error(&result) && pages == 1, "{result:?} after {pages} pages");
    // Every page announces another.
    let (result, pages) = list(|from| (PAGE, from + 2 * PAGE), Duration::ZERO, LONG);
    assert!(is_error(&result) && pages <= 65_536 / PAGE + 1, "{result:?} after {pages} pages");
    // More entries come than announced.
    let (result, pages) = list(|_| (PAGE, 1), Duration::ZERO, LONG);
    assert!(is_error(&result) && pages == 1, "{result:?} after {pages} pages");
    // No entries come.
    let (result, pages) = list(|_| (0, 1), Duration::ZERO, LONG);
    assert!(is_error(&result) && pages == 1, "{result:?} after {pages} pages");
}

#[test]
fn a_long_list_is_taken() {
    let (result, pages) = list(|from| (PAGE.min(1000 - from), 1000), Duration::ZERO, LONG);
    assert_eq!((result.unwrap(), pages), (1000, 1000_u32.div_ceil(PAGE)));
}

#[test]
fn all_pages_have_one_deadline() {
    let begun = Instant::now();
    let pause = Duration::from_millis(100);
    let (result, _) = list(|_| (1, 60_000), pause, Duration::from_secs(1));
    let timed_out = matches!(result, Err(SessionError::TimedOut { what: Opcode::ListVolumes }));
    assert!(timed_out, "{result:?}");
    // Without the deadline the list would take 6000 s.
    assert!(begun.elapsed() < Duration::from_secs(300), "{:?}", begun.elapsed());
}

#[test]
fn a_mount_that_finds_no_volume_asks_for_no_endless_list() {
    runtime().block_on(async {
        let course: Course = |_| (PAGE, u32::MAX);
        let (address, _) = listen(Lister { course, pause: Duration::ZERO, pages: 0 }).await;
        let mut session = connect(&address, &ConnectOptions::default(), None).await.unwrap();
        let error = session.open(&Name::new("v").unwrap(), AccessMode::Exclusive).await;
        assert!(matches!(error, Err(SessionError::Protocol(_))), "{error:?}");
    });
}
