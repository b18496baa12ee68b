//! [`Screen`]: plain text that is drawn again and again on a terminal, until `q`, ctrl-C or a
//! signal.
//!
//! Where standard output is no terminal, the frames come one after the other. The terminal is set
//! back when the screen is dropped, and before a signal ends the program: such signals are blocked
//! while the screen is there, and taken where it waits for keys.

use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::signal::{SigSet, Signal, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::termios::{
    LocalFlags, SetArg, SpecialCharacterIndices, Termios, tcgetattr, tcsetattr,
};

use crate::CannotPrint;

/// ctrl-C, where it is a key like others.
const CTRL_C: u8 = 3;
/// To the first line, and nothing below. Lines that are too long are cut, not broken.
const BEGIN: &str = "\x1b[H\x1b[J\x1b[?7l";
/// Long lines are broken again.
const END: &str = "\x1b[?7h";
/// The key hints, below the frame.
const KEYS: &str = "q or ctrl-C: end\n";
/// The signals that end a program from outside.
const ENDING: [Signal; 4] = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM];

/// Where a text is drawn. See the module.
pub struct Screen {
    // None where this is not drawn on a terminal.
    terminal: Option<Terminal>,
}

/// A terminal on which keys come at once, and the signals that are taken meanwhile.
struct Terminal {
    // As the terminal was.
    before: Termios,
    // None where the kernel has no descriptor left: then the signals are not blocked.
    signals: Option<SignalFd>,
    // The terminal can be cleared. A dumb one cannot: there the frames come one after the other.
    clears: bool,
}

impl Terminal {
    fn take(before: Termios) -> Self {
        let ending: SigSet = ENDING.into_iter().collect();
        let signals = SignalFd::with_flags(&ending, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK);
        // From here on signals wait. A signal before the change of the terminal needs no restore.
        let signals = signals.ok().filter(|_| ending.thread_block().is_ok());
        let mut raw = before.clone();
        raw.local_flags &= !(LocalFlags::ICANON | LocalFlags::ECHO | LocalFlags::ISIG);
        raw.control_chars[SpecialCharacterIndices::VMIN as usize] = 0;
        raw.control_chars[SpecialCharacterIndices::VTIME as usize] = 0;
        // Without it, q and ctrl-C need a newline and a signal.
        let _ = tcsetattr(io::stdin(), SetArg::TCSANOW, &raw);
        let clears = std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        Self { before, signals, clears }
    }

    /// The signal that waits, if there is one.
    fn signal(&self) -> Option<Signal> {
        let taken = self.signals.as_ref()?.read_signal().ok()??;
        Signal::try_from(i32::try_from(taken.ssi_signo).ok()?).ok()
    }

    /// The terminal as it was. Signals act again.
    fn set_back(&self) {
        let _ = tcsetattr(io::stdin(), SetArg::TCSANOW, &self.before);
        if self.signals.is_some() {
            let _ = ENDING.into_iter().collect::<SigSet>().thread_unblock();
        }
    }
}

impl std::fmt::Debug for Screen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Screen").field("on_terminal", &self.terminal.is_some()).finish()
    }
}

impl Screen {
    /// This program's terminal, if input and output are one. The program must have no other thread
    /// yet, as a signal that is blocked in one thread acts in another.
    #[must_use]
    pub fn open() -> Self {
        let is_one = io::stdin().is_terminal() && io::stdout().is_terminal();
        let before = is_one.then(|| tcgetattr(io::stdin()).ok()).flatten();
        Self { terminal: before.map(Terminal::take) }
    }

    /// No terminal: the frames come one after the other.
    #[must_use]
    pub fn lines() -> Self {
        Self { terminal: None }
    }

    /// Draws a text in the place of the last one, with the keys below it.
    ///
    /// # Errors
    /// The output is closed.
    pub fn draw(&self, text: &str) -> Result<(), CannotPrint> {
        let mut out = io::stdout().lock();
        let (begin, keys, end) = match &self.terminal {
            Some(Terminal { clears: true, .. }) => (BEGIN, KEYS, END),
            Some(_) => ("", KEYS, ""),
            None => ("", "", ""),
        };
        // One write, so that a signal between two leaves no terminal that cuts lines.
        out.write_all(format!("{begin}{text}{keys}{end}").as_bytes())?;
        Ok(out.flush()?)
    }

    /// Waits for a key, at most for `within`. Returns whether it is `q` or ctrl-C. A signal that
    /// ends programs ends this one here, after the terminal is as it was.
    ///
    /// # Errors
    /// The input broke.
    pub fn wants_to_quit(&self, within: Duration) -> io::Result<bool> {
        let Some(terminal) = &self.terminal else {
            std::thread::sleep(within);
            return Ok(false);
        };
        let until = Instant::now() + within;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            let stdin = io::stdin();
            let keys = PollFd::new(stdin.as_fd(), PollFlags::POLLIN);
            let signals = terminal.signals.iter();
            let signals = signals.map(|fd| PollFd::new(fd.as_fd(), PollFlags::POLLIN));
            let mut polled: Vec<PollFd<'_>> = std::iter::once(keys).chain(signals).collect();
            match nix::poll::poll(&mut polled, timeout) {
                Ok(0) => return Ok(false),
                Ok(_) => {}
                Err(Errno::EINTR) => continue,
                Err(error) => return Err(error.into()),
            }
            if let Some(signal) = terminal.signal() {
                terminal.set_back();
                raise(signal)?;
                // The program ignores this signal. The terminal is set back for its next owner.
                return Ok(true);
            }
            if !polled[0].any().unwrap_or(true) {
                continue;
            }
            let mut keys = [0; 16];
            let count = nix::unistd::read(stdin.as_fd(), &mut keys)?;
            // Without a byte the terminal is gone.
            if count == 0 || keys[..count].iter().any(|key| matches!(*key, b'q' | CTRL_C)) {
                return Ok(true);
            }
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        if let Some(terminal) = &self.terminal {
            terminal.set_back();
        }
    }
}
