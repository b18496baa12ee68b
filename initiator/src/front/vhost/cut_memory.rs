//! [`Marked`]: files of a guest's memory, for the log line about a missing page. The front end can
//! truncate such a file, and its file system can be full. A process that touches the page then ends
//! by SIGBUS: there is no memory to go on with. The line names the file.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use rblk_fabric::Region;

/// Limit of the files marked at once: those of the present memory, of its replacement, and of a
/// memory that a path still has.
const PLACES: usize = 24;
/// Limit of the line's length.
const LINE_MAX: usize = 256;
/// The standard error may be a pipe without a reader.
const WRITE_SECONDS: u32 = 2;

/// Read by the handler of a signal, which may interrupt anything: atomics only.
struct CutPlace {
    // 0: free. 1: being described.
    start: AtomicUsize,
    len: AtomicUsize,
    device: AtomicU64,
    inode: AtomicU64,
}

static FILES: [CutPlace; PLACES] = [const {
    CutPlace {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        device: AtomicU64::new(0),
        inode: AtomicU64::new(0),
    }
}; PLACES];

/// A mark on a file, while this lives.
#[derive(Debug)]
pub(super) struct Marked {
    // `None`: no place was free. The line is less precise then.
    place: Option<usize>,
}

impl Marked {
    /// Marks a mapping of a file.
    pub(super) fn new(region: &Region, device: u64, inode: u64) -> Self {
        static HANDLER: Once = Once::new();
        HANDLER.call_once(handle);
        let take = |place: &CutPlace| {
            place.start.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        let place = FILES.iter().position(take);
        if let Some(CutPlace { start, len, device: of, inode: number }) =
            place.and_then(|at| FILES.get(at))
        {
            len.store(region.len(), Ordering::Relaxed);
            of.store(device, Ordering::Relaxed);
            number.store(inode, Ordering::Relaxed);
            start.store(usize::try_from(region.address()).unwrap_or(1), Ordering::Release);
        }
        Self { place }
    }
}

impl Drop for Marked {
    fn drop(&mut self) {
        if let Some(place) = self.place.and_then(|at| FILES.get(at)) {
            place.start.store(0, Ordering::Release);
        }
    }
}

fn handle() {
    let handler = SigHandler::SigAction(on_sigbus);
    let action = SigAction::new(handler, SaFlags::SA_ONSTACK, SigSet::empty());
    // SAFETY: the handler calls functions only that a handler may call, and takes no lock.
    let _ = unsafe { sigaction(Signal::SIGBUS, &action) };
}

/// Writes the line about the missing page. The access is repeated afterwards, and ends the process.
extern "C" fn on_sigbus(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel gives the handler a description of the signal, and SIGBUS has an address.
    let address = unsafe { (*info).si_addr() }.addr();
    let line = SigbusLine::of(address);
    // SAFETY: `alarm` and `write` may be called by a handler. Should the write wait for a reader,
    // SIGALRM ends the process, as nothing here handles it.
    unsafe {
        libc::alarm(WRITE_SECONDS);
        let _ = libc::write(libc::STDERR_FILENO, line.text.as_ptr().cast(), line.len);
        libc::alarm(0);
        libc::signal(libc::SIGBUS, libc::SIG_DFL);
    }
}

/// A line that needs no allocation.
struct SigbusLine {
    text: [u8; LINE_MAX],
    len: usize,
}

impl SigbusLine {
    fn of(address: usize) -> Self {
        let mut line = Self { text: [0; LINE_MAX], len: 0 };
        let found = FILES.iter().find_map(|place| {
            let start = place.start.load(Ordering::Acquire);
            let within = address.checked_sub(start).filter(|_| start > 1)?;
            (within < place.len.load(Ordering::Relaxed)).then_some((place, within))
        });
        line.add(b"rblk-initiator: SIGBUS: ");
        match found {
            Some((CutPlace { device, inode, .. }, within)) => {
                line.add(b"byte ");
                line.number(within as u64);
                line.add(b" of a file of the guest's memory is gone (device ");
                line.number(device.load(Ordering::Relaxed));
                line.add(b", inode ");
                line.number(inode.load(Ordering::Relaxed));
                line.add(
                    b"): its front end cut the file, or the file system that holds it is full\n",
                );
            }
            None => line.add(b"memory of this process is gone\n"),
        }
        line
    }

    fn add(&mut self, text: &[u8]) {
        for byte in text {
            if let Some(place) = self.text.get_mut(self.len) {
                *place = *byte;
                self.len += 1;
            }
        }
    }

    fn number(&mut self, number: u64) {
        let mut unit = 1;
        while number / unit > 9 {
            unit *= 10;
        }
        while unit > 0 {
            // A digit is less than 10.
            self.add(&[b'0' + u8::try_from(number / unit % 10).unwrap_or(0)]);
            unit /= 10;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;

    fn said(address: usize) -> String {
        let line = SigbusLine::of(address);
        String::from_utf8_lossy(&line.text[..line.len]).into_owned()
    }

    #[test]
    fn the_line_names_the_file_and_the_byte() {
        let file = File::from(memfd_create(c"m", MFdFlags::MFD_CLOEXEC).unwrap());
        file.set_len(8192).unwrap();
        let region = Region::map_file_lazily(&file).unwrap();
        let start = usize::try_from(region.address()).unwrap();
        let marked = Marked::new(&region, 26, 1_234_567);
        assert_eq!(
            said(start + 4096),
            "rblk-initiator: SIGBUS: byte 4096 of a file of the guest's memory is gone (device 26, inode 1234567): \
             its front end cut the file, or the file system that holds it is full\n"
        );
        assert!(said(start).contains("byte 0 of"));
        assert!(said(start + 8192).contains("memory of this process"));
        drop(marked);
        assert!(said(start).contains("memory of this process"));
    }
}
