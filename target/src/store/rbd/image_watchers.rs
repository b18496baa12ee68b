//! [`ImageWatchers`]: the clients that watch an image. The cluster drops a dead one after 30 s.
//!
//! An owner that is not listed is taken for dead, and fenced for ever. So only a whole list tells
//! that: a list that grows faster than it is read has everybody.

use std::ffi::CStr;
use std::ptr;

use nix::errno::Errno;

use super::cluster::checked;
use super::library::{Handle, ImageWatcher, Library};

/// Clients that an image has at first sight.
const USUAL: usize = 64;
/// Room for clients that come between two tries to read the list.
const SPARE: usize = 64;
/// Tries to read the whole list.
const TRIES: u32 = 8;

/// See the module.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum ImageWatchers {
    /// Those addresses, and no other ones.
    All(Vec<String>),
    /// More than were read.
    TooMany,
}

/// One try to read the list.
enum ListTry {
    All(Vec<String>),
    // There are so many.
    More(usize),
}

impl ImageWatchers {
    /// Those of an open image.
    pub(super) fn of(library: &Library, image: Handle) -> Result<Self, Errno> {
        Self::read_by(|room| list(library, image, room))
    }

    fn read_by(mut list: impl FnMut(usize) -> Result<ListTry, Errno>) -> Result<Self, Errno> {
        let mut room = USUAL;
        for _ in 0..TRIES {
            match list(room)? {
                ListTry::All(addresses) => return Ok(Self::All(addresses)),
                ListTry::More(count) => room = count.max(room).saturating_add(SPARE),
            }
        }
        Ok(Self::TooMany)
    }

    /// Whether a client may be one of them.
    pub(super) fn may_have(&self, client: &str) -> bool {
        match self {
            Self::All(addresses) => addresses.iter().any(|address| address == client),
            Self::TooMany => true,
        }
    }
}

fn list(library: &Library, image: Handle, room: usize) -> Result<ListTry, Errno> {
    let none = ImageWatcher { address: ptr::null_mut(), id: 0, cookie: 0 };
    let mut watchers = vec![none; room];
    let mut count = watchers.len();
    // SAFETY: an open image; the list has room for as many watchers as `count` says.
    let listed = checked(unsafe {
        (library.rbd_watchers_list)(image, watchers.as_mut_ptr(), &raw mut count)
    });
    match listed {
        Ok(_) => {}
        // It has written how many there are.
        Err(Errno::ERANGE) => return Ok(ListTry::More(count)),
        Err(errno) => return Err(errno),
    }
    let address = |watcher: &ImageWatcher| {
        // SAFETY: a text that the call made, which ends with a zero.
        let address = unsafe { CStr::from_ptr(watcher.address) }.to_string_lossy();
        address.strip_prefix("v1:").unwrap_or(&address).to_owned()
    };
    let addresses = watchers[..count.min(watchers.len())].iter().map(address).collect();
    // SAFETY: the list that the call made, which nothing uses any more.
    unsafe { (library.rbd_watchers_list_cleanup)(watchers.as_mut_ptr(), count) };
    Ok(ListTry::All(addresses))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An image with so many clients, and some more at each look. The last one is the owner.
    fn image(clients: usize, more: usize) -> impl FnMut(usize) -> Result<ListTry, Errno> {
        let mut clients = clients;
        move |room| {
            let addresses: Vec<_> = (1..=clients).map(|client| format!("c{client}")).collect();
            clients += more;
            Ok(match addresses.len() > room {
                true => ListTry::More(addresses.len()),
                false => ListTry::All(addresses),
            })
        }
    }

    #[test]
    fn an_owner_beside_many_other_clients_is_found() {
        for clients in [1, USUAL, USUAL + 1, 1000] {
            let found = ImageWatchers::read_by(image(clients, 3)).unwrap();
            assert!(found.may_have(&format!("c{clients}")), "{clients}");
            assert!(!found.may_have("another") && !found.may_have("c"), "{clients}");
        }
    }

    #[test]
    fn an_owner_counts_as_listed_while_the_list_is_not_whole() {
        let found = ImageWatchers::read_by(image(100, 1000)).unwrap();
        assert!(found == ImageWatchers::TooMany && found.may_have("the owner"));
        // A version that does not tell how many there are.
        let found = ImageWatchers::read_by(|_| Ok(ListTry::More(0))).unwrap();
        assert!(found.may_have("the owner"));
        assert_eq!(ImageWatchers::read_by(|_| Err(Errno::EIO)), Err(Errno::EIO));
    }
}
