//! [`FuzzedDisk`]: the disk of a guest for `tests/fuzz`: all of its threads, and a socket. There is
//! no target: requests fail at once. The threads of the rings are as slow as the fuzzer wants.

use std::io;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rblk_config::ByteSize;
use rblk_fabric::{PageKind, Region};
use rblk_protocol::{BlockSize, QueueDepth};
use rblk_runtime::spin::SpinMode;
use tokio::sync::mpsc;

use super::{GuestDisk, GuestLeft, Memories, Served, ThreadParts};
use crate::engine::QueueStats;
use crate::queue::{EngineDriverParts, FromQueue, ToQueue, mail};

const DEPTH: u16 = 8;
const STRIDE: usize = 64 << 10;
const EIO: i32 = 5;

/// The disk of a guest without a target.
#[derive(Debug)]
pub struct FuzzedDisk {
    served: Served,
    socket: PathBuf,
    from_queues: mpsc::UnboundedReceiver<FromQueue>,
    // Without it, the queues would take control for gone.
    _mail: Vec<rblk_runtime::mailbox::Sender<ToQueue>>,
}

impl FuzzedDisk {
    /// Serves so many rings at a socket of that path, to guests with at most so much memory.
    ///
    /// # Errors
    /// The system's.
    pub fn start(socket: &Path, rings: u16, memory_max: ByteSize) -> io::Result<Self> {
        let block_size = BlockSize::new(512).ok_or(io::ErrorKind::InvalidInput)?;
        let disk = GuestDisk {
            size_bytes: 1 << 20,
            block: block_size.bytes(),
            read_only: false,
            volatile_cache: true,
            discard: Some(512),
            write_zeroes: true,
            max_io: 64 << 10,
            queues: rings,
            id: GuestDisk::id_of("fuzzed"),
        };
        let (outbox, from_queues) = mpsc::unbounded_channel();
        let (mut parts, mut mails) = (Vec::new(), Vec::new());
        for queue in 0..rings {
            let (sender, mail) = mail()?;
            let _ = sender.send(ToQueue::Fail(Some(EIO)));
            mails.push(sender);
            let buffers = Region::allocate(usize::from(DEPTH) * STRIDE, PageKind::Normal);
            let target = EngineDriverParts {
                queue,
                depth: QueueDepth::new(DEPTH).ok_or(io::ErrorKind::InvalidInput)?,
                stride: STRIDE,
                data_max: STRIDE,
                shared: 0,
                ledger: None,
                ways: None,
                pulse: None,
                mail,
                outbox: outbox.clone(),
                stats: Arc::new(QueueStats::default()),
            };
            let buffers = buffers.map_err(io::Error::other)?;
            parts.push(ThreadParts { target, buffers, block_size, id: disk.id });
        }
        let (memories, mut asked) = mpsc::unbounded_channel();
        std::thread::spawn(move || {
            while let Some(Memories { reply, .. }) = asked.blocking_recv() {
                let _ = reply.try_send(());
            }
        });
        let listener = (UnixListener::bind(socket)?, Some(memory_max));
        let (left, parts) = (GuestLeft::default(), (parts, None));
        let served = Served::start(listener, disk, parts, &left, SpinMode::Never, memories)?;
        Ok(Self { served, socket: socket.to_owned(), from_queues, _mail: mails })
    }

    /// The path of the socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Makes the threads of the rings sleep so long before each turn.
    pub fn set_pace(micros: u32) {
        super::pace::set(micros);
    }

    /// Whether a front end is connected.
    #[must_use]
    pub fn has_front_end(&self) -> bool {
        self.served.news().has_front_end()
    }

    /// Checks that the disk and all its threads run.
    ///
    /// # Panics
    /// The disk broke, or a thread ended.
    pub fn must_be_served(&mut self) {
        if let Ok(FromQueue::Stopped { queue, error }) = self.from_queues.try_recv() {
            panic!("ring {queue} ended: {error:?}");
        }
        assert!(
            !self.served.news().has_ended(),
            "the disk broke: {:?}",
            self.served.news().broke_by()
        );
    }
}
