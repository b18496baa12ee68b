//! [`Epoll`]: the epoll in which the queue of a program or of a guest sleeps. The program may sleep
//! on it among descriptors of its own: it is readable when the queue has work.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::epoll::{self, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::DescriptorToken;
use super::descriptor_watch::DescriptorWatch;

/// The mailbox, the two descriptors of a path, and the mailbox and the kick of a guest's ring.
const EVENTS: usize = 5;

/// A set of descriptors.
#[derive(Debug)]
pub(crate) struct Epoll {
    epoll: epoll::Epoll,
    // Copies of the descriptors: each stays registered by its copy until it is removed.
    watched: Vec<(DescriptorToken, OwnedFd)>,
}

impl Epoll {
    /// An empty set.
    ///
    /// # Errors
    /// The system has no descriptor.
    pub(crate) fn new() -> io::Result<Self> {
        let epoll = epoll::Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        Ok(Self { epoll, watched: Vec::with_capacity(EVENTS) })
    }

    /// Every sleep ends at a write to the descriptor, even if another process reads it first:
    /// another holder of the descriptor can keep the sleeper neither awake nor asleep.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn watch_edges(
        &mut self,
        fd: BorrowedFd<'_>,
        token: DescriptorToken,
    ) -> io::Result<()> {
        self.add(fd, token, EpollFlags::EPOLLIN | EpollFlags::EPOLLET)
    }

    fn add(
        &mut self,
        fd: BorrowedFd<'_>,
        token: DescriptorToken,
        flags: EpollFlags,
    ) -> io::Result<()> {
        let fd = fd.try_clone_to_owned()?;
        self.epoll.add(&fd, EpollEvent::new(flags, token.0.into()))?;
        self.watched.push((token, fd));
        Ok(())
    }

    /// Sleeps until a descriptor is readable, or that long: in whole milliseconds, rounded up.
    /// `each` gets the tokens of readable descriptors. Returns whether there was one.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn wait(
        &mut self,
        longest: Duration,
        mut each: impl FnMut(DescriptorToken),
    ) -> io::Result<bool> {
        let mut events = [EpollEvent::empty(); EVENTS];
        let ms = longest.as_nanos().div_ceil(1_000_000);
        let ms = u16::try_from(ms).unwrap_or(u16::MAX);
        let found = match self.epoll.wait(&mut events, EpollTimeout::from(ms)) {
            Ok(found) => found,
            // A signal interrupted the sleep. The caller polls, as after every sleep.
            Err(Errno::EINTR) => return Ok(true),
            Err(error) => return Err(error.into()),
        };
        for event in events.iter().take(found) {
            if let Ok(token) = u32::try_from(event.data()) {
                each(DescriptorToken(token));
            }
        }
        Ok(found > 0)
    }
}

impl AsFd for Epoll {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.0.as_fd()
    }
}

impl DescriptorWatch for Epoll {
    fn watch(&mut self, fd: BorrowedFd<'_>, token: DescriptorToken) -> io::Result<()> {
        self.add(fd, token, EpollFlags::EPOLLIN)
    }

    fn unwatch(&mut self, token: DescriptorToken) {
        let Some(at) = self.watched.iter().position(|(known, _)| *known == token) else { return };
        let (_, fd) = self.watched.swap_remove(at);
        // The call fails only for a descriptor that is not in the set.
        let _ = self.epoll.delete(&fd);
    }

    fn submit_removals(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::eventfd::EventFd;

    use super::*;

    const MOMENT: Duration = Duration::from_millis(1);

    fn tokens(epoll: &mut Epoll) -> Vec<u32> {
        let mut tokens = Vec::new();
        let any = epoll.wait(MOMENT, |token| tokens.push(token.0)).unwrap();
        assert_eq!(any, !tokens.is_empty());
        tokens
    }

    #[test]
    fn readable_descriptors_are_reported_until_they_are_unwatched() {
        let mut set = Epoll::new().unwrap();
        let (one, two) = (EventFd::new().unwrap(), EventFd::new().unwrap());
        set.watch(one.as_fd(), DescriptorToken(1)).unwrap();
        set.watch(two.as_fd(), DescriptorToken(2)).unwrap();
        assert!(tokens(&mut set).is_empty());
        two.write(1).unwrap();
        assert_eq!(tokens(&mut set), [2]);
        // A sleeper on an outer epoll wakes, too.
        let mut around = Epoll::new().unwrap();
        around.watch(set.as_fd(), DescriptorToken(7)).unwrap();
        assert_eq!(tokens(&mut around), [7]);
        set.unwatch(DescriptorToken(2));
        set.unwatch(DescriptorToken(9));
        assert!(tokens(&mut set).is_empty());
        assert!(tokens(&mut around).is_empty());
        // An edge-triggered watch reports each write.
        two.read().unwrap();
        set.watch_edges(two.as_fd(), DescriptorToken(3)).unwrap();
        for _ in 0..2 {
            two.write(1).unwrap();
            assert_eq!(tokens(&mut set), [3]);
            assert!(tokens(&mut set).is_empty(), "nobody read it, and it does not wake again");
        }
        // The token is free for the next one.
        set.watch(one.as_fd(), DescriptorToken(2)).unwrap();
    }
}
