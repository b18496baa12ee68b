//! [`Registering`]: the registration of the target's memory with a device, begun when the first
//! connection comes by it.
//!
//! Much memory takes seconds. So a thread does it, and peers that come by the device meanwhile wait
//! for the end. All others are served as usual.

use rblk_fabric::{ConnectionHello, Device, FabricError, Incoming};
use rblk_protocol::RejectReason;
use tokio::sync::mpsc;

use super::admission::refusal;
use super::devices::{Registered, TargetMemory};
use crate::control::peers::account::Origin;

/// Peers that wait for one device, at most. Beyond that, some are refused and have to try again.
const PEERS_MAX: usize = 64;

/// A device that the memory was registered with, or why not.
#[derive(Debug)]
pub(in crate::control) struct Registration {
    /// The device.
    pub(super) device: Device,
    /// The registered memory.
    pub(super) result: Result<Registered, FabricError>,
}

/// The devices, and the peers that wait for each.
#[derive(Debug)]
pub(in crate::control) struct Registering {
    waiting: Vec<(Device, Vec<Incoming>)>,
    done: mpsc::UnboundedSender<Registration>,
}

impl Registering {
    /// No devices, and the receiver of the ends.
    pub(in crate::control) fn new() -> (Self, mpsc::UnboundedReceiver<Registration>) {
        let (done, receiver) = mpsc::unbounded_channel();
        (Self { waiting: Vec::new(), done }, receiver)
    }

    /// Begins to register with the device of a peer, or lets the peer wait for that.
    pub(super) fn wait(&mut self, incoming: Incoming, shared: impl FnOnce() -> TargetMemory) {
        let device = incoming.device();
        match self.waiting.iter_mut().find(|(known, _)| known.same_as(&device)) {
            Some((_, peers)) => {
                if peers.len() >= PEERS_MAX {
                    // All wait for the same device. The origin with most peers loses its oldest
                    // one.
                    let from: Vec<Origin> = peers.iter().map(|p| Origin::of(&p.peer())).collect();
                    peers.remove(oldest_of_most(&from)).reject(&busy());
                }
                peers.push(incoming);
            }
            None => {
                let (done, shared) = (self.done.clone(), shared());
                self.waiting.push((device.clone(), vec![incoming]));
                let register = move || {
                    let result = shared.register(&device);
                    // An error means that the target has ended.
                    let _ = done.send(Registration { device, result });
                };
                let thread = std::thread::Builder::new().name("rblk-register".into());
                if let Err(error) = thread.spawn(register) {
                    tracing::error!(%error, "no thread to register memory with a device");
                    // The peers that wait are rejected as they are dropped.
                    self.waiting.pop();
                }
            }
        }
    }

    /// The peers that waited for a device.
    pub(super) fn end(&mut self, device: &Device) -> Vec<Incoming> {
        let at = self.waiting.iter().position(|(known, _)| known.same_as(device));
        at.map(|at| self.waiting.swap_remove(at).1).unwrap_or_default()
    }
}

/// The place of the oldest peer of the origin that has most.
fn oldest_of_most(from: &[Origin]) -> usize {
    let count = |origin: &Origin| from.iter().filter(|other| *other == origin).count();
    let counts: Vec<usize> = from.iter().map(count).collect();
    let top = counts.iter().max();
    counts.iter().position(|count| Some(count) == top).unwrap_or(0)
}

/// The refusal when the queue is full.
pub(crate) fn busy() -> ConnectionHello {
    refusal(RejectReason::Crowded, "too many connections are being made: connect again")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_origin_with_most_waiting_peers_loses_its_oldest() {
        let from = |peers: &[&str]| peers.iter().map(|p| Origin::of(p)).collect::<Vec<_>>();
        assert_eq!(oldest_of_most(&from(&["10.0.0.1:1", "10.0.0.2:1", "10.0.0.2:2"])), 1);
        assert_eq!(oldest_of_most(&from(&["10.0.0.1:1", "10.0.0.2:1"])), 0);
    }
}
