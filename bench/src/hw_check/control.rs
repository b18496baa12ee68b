//! [`Control`]: a thread that serves connection events while the measuring threads poll.

use std::future::Future;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use rblk_fabric::ConnectOptions;
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// A runtime on a thread of its own, ended on drop.
#[derive(Debug)]
pub(super) struct Control {
    handle: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    pub(super) fn start() -> Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build().context("a runtime")?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("fabric-control".into())
            .spawn(move || {
                // The drop of the sender is an error here, and the end.
                let _ = runtime.block_on(stopped);
            })
            .context("cannot start a thread")?;
        Ok(Self { handle, stop: Some(stop), thread: Some(thread) })
    }

    pub(super) fn wait<T>(&self, what: impl Future<Output = T>) -> T {
        self.handle.block_on(what)
    }

    pub(super) fn options() -> ConnectOptions {
        ConnectOptions { timeout: CONNECT_LIMIT, ..ConnectOptions::default() }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
