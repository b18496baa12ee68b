//! The queue threads of a device, one for each of its hardware queues.

use std::sync::Arc;

use anyhow::Context;
use rblk_protocol::width::wide;

use crate::front::disk::{QueueParts, start};
use crate::front::ublk::{Buffers, Device};
use crate::volume::queues::{QueuePlan, Queues, spin_mode};

/// The CPUs that submit to a queue of the device. Empty if the driver does not report them: then
/// the thread runs anywhere.
fn cpus_of(device: &mut Device, queue: u16) -> Vec<usize> {
    device.queue_cpus(queue).unwrap_or_else(|error| {
        tracing::debug!(queue, %error, "the driver does not say which CPUs a queue serves");
        Vec::new()
    })
}

/// Starts a thread for every queue of the device, and each fetches every tag. The queues have
/// no paths: requests wait.
///
/// # Errors
/// Memory or a thread is missing, or the driver refuses.
pub(crate) fn start_queues(
    queues: &mut Queues,
    device: &mut Device,
    plan: &QueuePlan<'_>,
) -> anyhow::Result<()> {
    let wish = plan.setup.wish;
    for queue in 0..device.info().queues {
        let Some(config) = device.queue_config(queue) else { continue };
        let region = plan.setup.buffers.get(usize::from(queue)).and_then(Option::as_ref);
        let region = region.context("a queue too many")?;
        let buffers = Buffers::new(Arc::clone(region), 0, wish.buffer_stride(), wish.depth.get())?;
        let handle = start(QueueParts {
            config,
            buffers,
            shared: Arc::clone(plan.setup.shared.lens()),
            data_max: wide(wish.io_max_bytes),
            block_size: plan.block_size,
            ledger: plan.ledger(),
            ways: plan.ways,
            pulse: Some(plan.pulse),
            spin: spin_mode(plan.spin),
            cpus: cpus_of(device, queue),
            outbox: plan.outbox.clone(),
        })?;
        queues.add(handle);
    }
    Ok(())
}
