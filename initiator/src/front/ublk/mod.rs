//! A block device in user space: our own front end to the kernel's ublk driver, over io_uring.
//!
//! ```text
//! control thread                              data threads, one per hardware queue
//! Control::open
//! Device::add (or recover)  -- QueueConfig -> UblkQueue::new, fetch_all, enter
//! Device::start   (waits for all fetches)     enter, next_event: requests out, completions in
//! tell the data threads to leave ----------> answer held requests, enter once more, drop the queue
//! Device::close   (waits for the last queue)
//! ```
//!
//! # Ownership
//!
//! - A [`Device`] owns the kernel's device. When it is dropped, on any path, it stops and deletes a
//!   device that this process added, and leaves alone a device that it recovered or has disowned.
//!   The device shares the open `/dev/ublkcN` with its queues. When the last holder closes that,
//!   the driver knows that the server is gone.
//! - A [`UblkQueue`] lives on one thread from `new` to drop (it is not `Send`): the thread that
//!   fetches a tag is the only one the driver takes its completion from.
//! - A tag, with its slice of the [`Buffers`], is the caller's from [`UblkEvent::Request`] to
//!   [`UblkQueue::complete`], and the kernel's otherwise. The driver copies on the data thread
//!   itself, inside its turns. So no one touches a buffer after the queue is dropped, and there is
//!   no copy in the completion path of a write or before the delivery of a read.
//! - A data thread enters the ring at most once a turn, and without waiting not at all when
//!   [`UblkQueue::needs_enter`] is false. It allocates nothing, takes no lock and writes no log.
//!   Nothing the kernel hands over can make it panic.
//!
//! # Kernels
//!
//! 6.4 is the first with ioctl-encoded commands, the only ones used. Later features are asked for
//! with GET_FEATURES (6.5) and never assumed:
//!
//! | release | feature | used for |
//! |---|---|---|
//! | 6.4 | USER_RECOVERY, REISSUE | the disk outlives a crash |
//! | 6.9 | DEL_DEV_ASYNC | a deletion that does not block; else the blocking one, cut short |
//! | 6.13 | USER_RECOVERY_FAIL_IO | [`Recovery::FailAll`] |
//! | 6.16 | death is seen when the char node is closed | before: maybe late, or never; see Ending |
//! | 6.16 | UPDATE_SIZE | a volume that grows; before: a new mount |
//! | 7.0 | partitions are read after the start | before: the start waits for reads |
//! | 7.0 | BATCH_IO | not used: see below |
//! | 7.1 | SHMEM_ZC | direct I/O with shared memory is not copied; before: no such mount |
//!
//! # Not used
//!
//! Batch commands (7.0: one command for many requests): as of 7.2, a server that dies while a
//! request is on its way to it leaves the delivery to a worker of the kernel, which copies to the
//! server's addresses in the memory map that the worker has at that moment (seen on 7.2.12 as a
//! panic in `__ublk_batch_dispatch`). And QUIESCE_DEV makes requests of a batch device fail instead
//! of letting them wait.
//!
//! QUIESCE_DEV (6.16: park a live disk): a device asks for this feature where the kernel has it,
//! and other programs may use the command. rblk does not send it.
//!
//! Zero copy, user copy, zones and a stop that refuses while the disk is open (7.0) have their bits
//! in `Features` and no code: request pages without an address cannot be registered with an RDMA
//! device.
//!
//! # Starting
//!
//! START_DEV and END_USER_RECOVERY wait in the kernel until every tag of every queue is fetched, so
//! the queues come first, on their threads. They must be given the pid of the process that opened
//! the char node. A start that times out before that leaves the device as it was. Kernels before
//! 7.0 then read the partition table inside START_DEV; if the server dies while such a read is
//! unanswered, the device is stuck until the machine restarts (seen on 6.12). So the first reads
//! should not depend on a link that is not up yet.
//!
//! # Ending
//!
//! - [`Device::close`], after the queues are dropped, is the way out: with no server left, nothing
//!   in the kernel waits for one. [`Device::stop`] on a live disk waits for the requests in flight;
//!   a process killed in the middle of that with a request unanswered can hang, and its device with
//!   it.
//! - Before 6.16 a server that is killed may leave a disk that no other can take over: a request
//!   that comes while a thread ends may be handed to that thread. A server that hands its disk over
//!   lets none come: another process limits the disk to a few requests, and reads until the queues
//!   can get no other (`leave_gate`, [`DiskFiller`]). The server itself touches neither the disk
//!   nor its settings in sysfs: both can wait for an answer that it withholds.
//! - On a recoverable device the driver fails all I/O from the moment of the stop, the kernel's own
//!   write-back included: sync, or unmount, before it.
//! - DEL_DEV stops a live device under the lock of all devices: here a stop always comes first.
//! - After the death of its server, a device without recovery keeps its `/dev/ublkcN` and id
//!   ([`DeviceState::Dead`], no server) until a program deletes it.
//!
//! # Recovery
//!
//! 1. The server dies. The state becomes [`DeviceState::Quiesced`]; requests wait in the kernel.
//! 2. [`Device::recover`] retries START_USER_RECOVERY until the old process is gone, and opens the
//!    char node.
//! 3. Every queue is made and fetches; then [`Device::start`] sends END_USER_RECOVERY, and the
//!    waiting requests flow. With [`Recovery::Reissue`] those that the dead server held come again:
//!    the back end must have fenced the dead server's copies first.
//!
//! Make everything that can fail (connections, buffers) before the first fetch: kernels before 6.16
//! go wrong when a second recovery finds a queue of which only some tags were fetched. On those,
//! also end the old data threads before a recovery within the same process.

pub(crate) mod abi;
mod buffers;
mod control;
mod device;
mod disk_params;
mod error;
mod feature;
mod filler;
mod flusher;
mod leave_gate;
mod pages;
mod queue;
mod request;
mod token;

pub use buffers::Buffers;
pub(crate) use control::disk_sequence;
pub use control::{Control, DeviceInfo, DeviceState, disk_path};
pub use device::{Device, QueueConfig};
pub use disk_params::{DeviceSpec, DiskParams, Recovery};
pub use error::UblkError;
pub use flusher::{become_io_flusher, stay_in_memory};
pub use queue::{TurnSleep, UblkEvent, UblkQueue, UblkQueueStats};
pub use token::DeviceToken;

pub(crate) use disk_params::DiscardParams;
pub(crate) use feature::Features;
pub(crate) use filler::DiskFiller;
pub(crate) use leave_gate::LeaveGate;
pub(crate) use pages::{sync_file_system, write_pages};
pub(crate) use queue::LEFT_DEADLINE;
pub(crate) use request::{BlockOp, BlockRequest, DataAt};
