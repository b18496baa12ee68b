//! Fences of clients, as the monitors of a cluster keep them.
//!
//! - [`fence_rights`]: the users that may fence; [`fenced_client`]: a client that is fenced.

pub(crate) mod fence_rights;
pub(crate) mod fenced_client;
