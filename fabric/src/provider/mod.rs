//! Both providers behind one set of types.

pub(crate) mod connection;
pub(crate) mod device;
pub(crate) mod listener;
pub(crate) mod poller;
pub(crate) mod readiness;
pub(crate) mod route;
