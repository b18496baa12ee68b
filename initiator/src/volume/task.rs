//! Waiting for a task or a time that may not be there.

use std::time::Instant;

use tokio::task::JoinHandle;

/// A task that was begun and has not ended, if there is one.
pub(crate) type Running<T> = Option<JoinHandle<anyhow::Result<T>>>;

/// Waits for the task, which then is no longer there. Waits indefinitely without one. Cancel safe.
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

/// Ends the task, wherever it is.
pub(super) fn abort<T>(running: &mut Running<T>) {
    if let Some(task) = running.take() {
        task.abort();
    }
}

/// Waits until then, or indefinitely without a deadline. Cancel safe.
pub(crate) async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
