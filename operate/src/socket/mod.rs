//! Unix sockets between the programs of one host.

pub(crate) mod exchange;
pub mod private_socket;
