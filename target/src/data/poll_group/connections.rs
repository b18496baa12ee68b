//! [`Connections`]: the connections of a poll group, by index, and those to post for.

use rblk_protocol::width::wide;

use crate::data::connection::Connection;
use crate::volume::ids::ConnectionId;

/// The connections of a poll group.
#[derive(Default)]
pub(super) struct Connections {
    // Boxed, so that a place without a connection costs a word.
    places: Vec<Option<Box<Connection>>>,
    generation: u32,
    // Connections that ended and are still in their places.
    ending: usize,
    // Indices of those that have something to post.
    listed: Vec<u16>,
}

impl Connections {
    /// A name for a new connection. `None`: there are too many.
    pub(super) fn next_id(&mut self) -> Option<ConnectionId> {
        let free = self.places.iter().position(Option::is_none);
        let index = u16::try_from(free.unwrap_or(self.places.len())).ok()?;
        self.generation = self.generation.wrapping_add(1);
        Some(ConnectionId { index, generation: self.generation })
    }

    /// Adds the connection that was made for [`Self::next_id`].
    pub(super) fn add(&mut self, connection: Connection) {
        let at = wide(connection.id().index);
        if self.places.len() <= at {
            self.places.resize_with(at + 1, || None);
        }
        debug_assert!(self.places[at].is_none());
        self.places[at] = Some(Box::new(connection));
    }

    /// Takes a connection out of its place.
    pub(super) fn remove(&mut self, index: usize) -> Option<Connection> {
        let mut connection = *self.places.get_mut(index)?.take()?;
        self.ending -= usize::from(!connection.is_live());
        if connection.leave_list() {
            self.listed.retain(|listed| wide(*listed) != index);
        }
        Some(connection)
    }

    /// The connection at an index.
    #[inline]
    pub(super) fn at(&mut self, index: usize) -> Option<&mut Connection> {
        self.places.get_mut(index)?.as_deref_mut()
    }

    /// Whether that connection is still here.
    #[inline]
    pub(super) fn has(&self, id: ConnectionId) -> bool {
        let place = self.places.get(wide(id.index)).and_then(Option::as_deref);
        place.is_some_and(|connection| connection.id() == id)
    }

    /// Whether there is no connection.
    pub(super) fn is_empty(&self) -> bool {
        self.places.iter().all(Option::is_none)
    }

    /// Places, empty ones too.
    pub(super) fn places(&self) -> usize {
        self.places.len()
    }

    /// All connections.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Connection> {
        self.places.iter().flatten().map(|connection| &**connection)
    }

    /// All connections.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Connection> {
        self.places.iter_mut().flatten().map(|connection| &mut **connection)
    }

    /// A connection that is here ended.
    pub(super) fn note_end(&mut self) {
        self.ending += 1;
    }

    /// Whether connections that ended are still here.
    #[inline]
    pub(super) fn has_ending(&self) -> bool {
        self.ending > 0
    }

    /// Puts a connection on the list of those to post for.
    #[inline]
    pub(super) fn list(&mut self, index: u16) {
        self.listed.push(index);
    }

    /// The connection to post for that is `at` that place of the list.
    #[inline]
    pub(super) fn listed(&self, at: usize) -> Option<usize> {
        self.listed.get(at).map(|index| wide(*index))
    }

    /// Empties the list of connections to post for, all of which left it.
    #[inline]
    pub(super) fn clear_list(&mut self) {
        self.listed.clear();
    }
}
