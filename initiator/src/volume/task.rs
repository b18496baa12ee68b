//! Waits for an optional task or an optional time.

use std::time::Instant;

use tokio::task::JoinHandle;

/// A running task, if there is one.
pub(crate) type Running<T> = Option<JoinHandle<anyhow::Result<T>>>;

/// Waits for the task and removes it. Waits for ever without one. Cancel safe.
pub(crate) async fn next<T>(running: &mut Running<T>) -> anyhow::Result<T> {
    match running {
        Some(task) => {
            let result = task.await;
            *running = None;
            result?
        }
        None => std::future::pending().await,
    }
}

/// Ends the task at any point.
pub(super) fn abort<T>(running: &mut Running<T>) {
    if let Some(task) = running.take() {
        task.abort();
    }
}

/// Waits until the deadline, or for ever without one. Cancel safe.
pub(crate) async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
