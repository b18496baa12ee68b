//! CM ids, their events, and the verbs on them that may take long.

pub(super) mod cm_id;
pub(super) mod event_channel;
pub(super) mod slow_verbs;
