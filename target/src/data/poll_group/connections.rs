//! [`Connections`]: the connections of a poll group by index, and the list of connections to post
//! for.

use rblk_protocol::width::wide;

use crate::data::connection::Connection;
use crate::volume::ids::ConnectionId;

/// The connections of a poll group.
#[derive(Default)]
pub(super) struct Connections {
    // Boxed, so that an empty place costs a word.
    places: Vec<Option<Box<Connection>>>,
    generation: u32,
    // Connections that ended but still have their places.
    ending: usize,
    // Indices of connections that have WRs to post.
    listed: Vec<u16>,
}

impl Connections {
    /// A name for a new connection. `None`: the table is full.
    pub(super) fn next_id(&mut self) -> Option<ConnectionId> {
        let free = self.places.iter().position(Option::is_none);
        let index = u16::try_from(free.unwrap_or(self.places.len())).ok()?;
        self.generation = self.generation.wrapping_add(1);
        Some(ConnectionId { index, generation: self.generation })
    }

    /// Adds the connection made for [`Self::next_id`].
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

    /// Whether this connection is still in the table.
    #[inline]
    pub(super) fn has(&self, id: ConnectionId) -> bool {
        let place = self.places.get(wide(id.index)).and_then(Option::as_deref);
        place.is_some_and(|connection| connection.id() == id)
    }

    /// Whether the table has no connection.
    pub(super) fn is_empty(&self) -> bool {
        self.places.iter().all(Option::is_none)
    }

    /// Number of places, including empty ones.
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

    /// Counts a connection that ended but is still in the table.
    pub(super) fn note_end(&mut self) {
        self.ending += 1;
    }

    /// Whether the table still has ended connections.
    #[inline]
    pub(super) fn has_ending(&self) -> bool {
        self.ending > 0
    }

    /// Puts a connection on the list to post for.
    #[inline]
    pub(super) fn list(&mut self, index: u16) {
        self.listed.push(index);
    }

    /// The connection at an index of the list to post for.
    #[inline]
    pub(super) fn listed(&self, at: usize) -> Option<usize> {
        self.listed.get(at).map(|index| wide(*index))
    }

    /// Empties the list to post for. Its connections have left it.
    #[inline]
    pub(super) fn clear_list(&mut self) {
        self.listed.clear();
    }
}
