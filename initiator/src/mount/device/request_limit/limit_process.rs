//! The process that limits the requests of a disk whose server leaves, and that reads from the
//! disk. Each of its steps may wait for the server or for the next one.
//!
//! It makes both changes of `nr_requests`, so their order is certain. The last one waits in the
//! kernel until a server has answered the requests of before: it holds for any next server.

use std::fs::{File, read_to_string, write};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rblk_operate::mount::flags::LimitArgs;

use super::super::queue_settings::directory;
use super::limit_news::LimitNews;
use crate::front::ublk::{DiskFiller, UblkError, stay_in_memory};

/// Another change of the number may come late: that of an earlier process.
const SETTLE: Duration = Duration::from_millis(50);
/// Between two rounds of reads, in milliseconds.
const ROUND_MS: u8 = 5;

/// The next word of the server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Order {
    /// It has none yet.
    Wait,
    /// Read from the disk.
    Read,
    /// It has left, or does without the limit.
    End,
}

/// Limits the disk of a device in this process until the standard input ends. Returns the exit
/// code.
#[must_use]
pub fn here(args: &LimitArgs) -> u8 {
    // The server reaps the first process at once: the next program in it knows of no child.
    if nix::unistd::daemon(true, true).is_err() {
        return 1;
    }
    stay_in_memory();
    let queue = directory(args.device);
    let said = match is_unsorted(&queue) {
        Ok(true) => limited(args),
        // The limit would be that of the scheduler, which may keep requests back.
        Ok(false) => Err("the disk has a scheduler".to_owned()),
        Err(error) => Err(format!("{queue}/scheduler: {error}")),
    };
    match said {
        Ok(()) => 0,
        Err(why) => {
            let _ = say(&LimitNews::Failed(why));
            1
        }
    }
}

/// Whether the disk has no scheduler.
fn is_unsorted(queue: &str) -> io::Result<bool> {
    read_to_string(format!("{queue}/scheduler")).map(|text| text.contains("[none]"))
}

/// Limits the disk, and ends the limit in the end.
fn limited(args: &LimitArgs) -> Result<(), String> {
    let requests = format!("{}/nr_requests", directory(args.device));
    let in_requests = |error: io::Error| format!("{requests}: {error}");
    let mut disk = None;
    let worked =
        set(&requests, args.limit).map_err(in_requests).and_then(|()| serve(args, &mut disk));
    if let Err(why) = worked {
        // Perhaps nobody listens.
        let _ = say(&LimitNews::Failed(why));
    }
    // The close may wait, too. It comes at once all the same: nobody takes this process for a user
    // of the disk.
    let _ = std::thread::Builder::new().spawn(move || drop(disk));
    write(&requests, args.usual.to_string()).map_err(in_requests)
}

/// Sets the number of requests, and checks that it stays.
fn set(requests: &str, number: u16) -> io::Result<()> {
    write(requests, number.to_string())?;
    std::thread::sleep(SETTLE);
    match read_to_string(requests)?.trim() {
        set if set == number.to_string() => Ok(()),
        other => Err(io::Error::other(format!("{other} and not {number}"))),
    }
}

/// Carries out the orders of the server until the last one.
fn serve(args: &LimitArgs, disk: &mut Option<File>) -> Result<(), String> {
    let unheard = |error: io::Error| error.to_string();
    say(&LimitNews::Limited).map_err(unheard)?;
    loop {
        match next_order(PollTimeout::NONE) {
            Order::Wait => {}
            Order::Read => break,
            Order::End => return Ok(()),
        }
    }
    let text = |error: UblkError| error.to_string();
    let mut filler = DiskFiller::open(args.device, args.limit, &args.cpus).map_err(text)?;
    for queue in filler.without_cpu() {
        say(&LimitNews::NoCpu(queue)).map_err(unheard)?;
    }
    let result = loop {
        if let Err(error) = filler.send() {
            break Err(error.to_string());
        }
        if next_order(ROUND_MS.into()) == Order::End {
            break Ok(());
        }
        if filler.refused().try_for_each(|queue| say(&LimitNews::Refused(queue))).is_err() {
            break Ok(());
        }
    };
    *disk = Some(filler.into_disk());
    result
}

/// Waits for the next order.
fn next_order(within: PollTimeout) -> Order {
    let input = io::stdin();
    let mut ready = [PollFd::new(input.as_fd(), PollFlags::POLLIN)];
    match poll(&mut ready, within) {
        Ok(0) | Err(Errno::EINTR) => return Order::Wait,
        Ok(_) => {}
        Err(_) => return Order::End,
    }
    let mut word = [0; 64];
    match nix::unistd::read(input.as_fd(), &mut word) {
        Ok(1..) => Order::Read,
        Err(Errno::EINTR | Errno::EAGAIN) => Order::Wait,
        Ok(_) | Err(_) => Order::End,
    }
}

/// Says something to the server.
fn say(news: &LimitNews) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{news}")?;
    out.flush()
}
