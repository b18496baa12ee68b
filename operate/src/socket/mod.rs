//! Unix sockets between the programs of one host.

pub mod private_socket;
