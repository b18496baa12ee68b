//! How members of a group reach each other by the cluster: [`member_calls`], and the watches that
//! these calls and the questions to owners need, [`object_watch`].

pub(crate) mod member_calls;
pub(super) mod object_watch;
