//! A disk in memory, or in a file, served through `rblk_initiator::ublk`: the smallest complete
//! server.
//!
//! ```text
//! ublk_ram --size-mib 256 --queues 2 --depth 32              # until SIGINT or SIGTERM
//! ublk_ram --file /dev/shm/disk --recover 0        # take over after a crash or a hand-over
//! ublk_ram --cycles 50                                       # add, start, read, stop, delete
//! ublk_ram --list
//! ```

// ublk is for 64-bit Linux, and a request's data is at most 32 MiB.
#![allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap)]

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use clap::Parser;
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::signal::{SigSet, Signal};
use rblk_fabric::{PageKind, Region};
use rblk_initiator::ublk::{
    BlockOp, BlockRequest, Buffers, Control, Device, DeviceSpec, DiscardParams, DiskParams, Event,
    Features, Queue, QueueConfig, QueueStats, Recovery, Wait, WatchToken,
};

#[derive(Parser, Clone, Debug)]
struct Options {
    /// Size of the disk in MiB.
    #[arg(long, default_value_t = 64)]
    size_mib: u32,
    /// Hardware queues, one thread each.
    #[arg(long, default_value_t = 1)]
    queues: u16,
    /// Tags of each queue.
    #[arg(long, default_value_t = 64)]
    depth: u16,
    /// Logical block in bytes.
    #[arg(long, default_value_t = 4096)]
    block: u32,
    /// Buffer of each tag in KiB.
    #[arg(long, default_value_t = 1024)]
    io_kib: u32,
    /// Keep the data in this file instead of memory.
    #[arg(long)]
    file: Option<String>,
    /// Device id; without it the lowest free one.
    #[arg(long)]
    id: Option<u32>,
    /// Take over this device instead of adding one.
    #[arg(long)]
    recover: Option<u32>,
    /// No recovery: the disk goes with its server.
    #[arg(long)]
    mortal: bool,
    /// Requests come and go in batches (7.0).
    #[arg(long)]
    batch: bool,
    /// End after so many seconds; 0 waits for a signal.
    #[arg(long, default_value_t = 0)]
    seconds: u64,
    /// Hold every request that comes after the first second for so long.
    #[arg(long, default_value_t = 0)]
    delay_ms: u64,
    /// Answer reads and writes with at most this many KiB; 0 answers in full.
    #[arg(long, default_value_t = 0)]
    partial_kib: u32,
    /// At the end park the device for another server instead of deleting it.
    #[arg(long)]
    hand_over: bool,
    /// At the end leave the device to another server without a word to the driver.
    #[arg(long)]
    leave: bool,
    /// At the end stop the disk under the running queues, instead of ending the queues first.
    #[arg(long)]
    stop_live: bool,
    /// Add, start, read, stop and delete a device so many times.
    #[arg(long, default_value_t = 0)]
    cycles: u32,
    /// At the end grow the disk to so many MiB first, and look.
    #[arg(long)]
    grow_mib: Option<u32>,
    /// Show the driver's features and devices.
    #[arg(long)]
    list: bool,
    /// Stop a device whose server died, without deleting it.
    #[arg(long)]
    stop: Option<u32>,
}

/// Where the data is.
#[derive(Clone)]
enum Store {
    Memory(Arc<Region>),
    File(Arc<File>),
}

impl Store {
    fn open(options: &Options) -> Result<Self> {
        let bytes = u64::from(options.size_mib) << 20;
        let Some(path) = &options.file else {
            return Ok(Self::Memory(Region::allocate(usize::try_from(bytes)?, PageKind::Normal)?));
        };
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        if file.metadata()?.len() < bytes {
            file.set_len(bytes)?;
        }
        Ok(Self::File(Arc::new(file)))
    }

    /// Serves a request, of which at most `limit` bytes if it has data. Gives bytes, or a negative
    /// errno.
    fn serve(&self, request: &BlockRequest, buffers: &Buffers, tag: u16, limit: u32) -> i32 {
        let (offset, slot) = (request.offset(), buffers.offset(tag));
        let len = request.data_len().min(limit) as usize;
        let region = buffers.region();
        let done = match (self, request.op) {
            (_, BlockOp::Flush | BlockOp::Discard) => Ok(()),
            (Self::Memory(disk), op) => {
                let range = if op.has_data() { len } else { request.bytes() as usize };
                let at = offset as usize;
                if disk.pointer(at, range).is_none() {
                    return -libc::EIO;
                }
                match op {
                    BlockOp::Read => disk.copy_to(at, region, slot, len),
                    BlockOp::Write => region.copy_to(slot, disk, at, len),
                    _ => disk.zero(at, range),
                }
                Ok(())
            }
            (Self::File(file), BlockOp::Read) => {
                let mut bytes = vec![0; len];
                file.read_exact_at(&mut bytes, offset).map(|()| region.write(slot, &bytes))
            }
            (Self::File(file), BlockOp::Write) => {
                let mut bytes = vec![0; len];
                region.read(slot, &mut bytes);
                file.write_all_at(&bytes, offset)
            }
            (Self::File(file), BlockOp::WriteZeroes) => {
                let zeroes = vec![0; request.bytes() as usize];
                file.write_all_at(&zeroes, offset)
            }
        };
        match done {
            Ok(()) => len as i32,
            Err(e) => -e.raw_os_error().unwrap_or(libc::EIO),
        }
    }
}

/// A data thread: its queue, and nothing shared but the store.
fn serve(
    config: &QueueConfig,
    store: &Store,
    options: &Options,
    bell: &Bell,
) -> Result<QueueStats> {
    let stride = config.max_io_bytes() as usize;
    let memory = Region::allocate(stride * usize::from(config.depth()), PageKind::Normal)?;
    let buffers = Buffers::new(memory, 0, stride, config.depth())?;
    let mut queue = Queue::new(config, buffers)?;
    queue.watch(bell.fd.as_raw_fd(), WatchToken(7))?;
    queue.fetch_all();
    let delay = Duration::from_millis(options.delay_ms);
    let limit = match options.partial_kib {
        0 => u32::MAX,
        kib => kib << 10,
    };
    let mut held: VecDeque<(Instant, u16, BlockRequest)> = VecDeque::new();
    let mut leaving = false;
    // Kernels before 7.0 read the partition table while the device is being started.
    let delay_from = Instant::now() + Duration::from_secs(1);
    while !queue.is_down() && (!leaving || queue.held() > 0) {
        let wait = held.front().map_or(Duration::from_secs(1), |(due, ..)| {
            due.saturating_duration_since(Instant::now()).max(Duration::from_micros(50))
        });
        queue.enter(Wait::For(wait))?;
        while let Some(event) = queue.next_event() {
            match event {
                Event::Request(tag, request) if delay.is_zero() || Instant::now() < delay_from => {
                    let result = store.serve(&request, queue.buffers(), tag, limit);
                    queue.complete(tag, result)?;
                }
                Event::Request(tag, request) => {
                    held.push_back((Instant::now() + delay, tag, request));
                }
                Event::Watch(_) => {
                    let _ = bell.fd.read();
                    leaving |= bell.leave.load(Ordering::Acquire);
                }
                Event::Stopping => {}
                other => return Err(anyhow!("queue {}: {other:?}", queue.queue_id())),
            }
        }
        let hurry = leaving || queue.is_stopping();
        while held.front().is_some_and(|(due, ..)| hurry || *due <= Instant::now()) {
            if let Some((_, tag, request)) = held.pop_front() {
                let result = store.serve(&request, queue.buffers(), tag, limit);
                queue.complete(tag, result)?;
            }
        }
    }
    // The last completions.
    queue.enter(Wait::No)?;
    Ok(queue.stats())
}

/// How the main thread reaches a data thread.
struct Bell {
    fd: EventFd,
    leave: AtomicBool,
}

/// The data threads of a device.
struct Server {
    threads: Vec<JoinHandle<Result<QueueStats>>>,
    bells: Vec<Arc<Bell>>,
}

impl Server {
    fn spawn(device: &Device, store: &Store, options: &Options) -> Result<Self> {
        let mut server = Self { threads: Vec::new(), bells: Vec::new() };
        for id in 0..device.info().queues {
            let config = device.queue_config(id).context("queue of the device")?;
            let (store, options) = (store.clone(), options.clone());
            let fd = EventFd::from_flags(EfdFlags::EFD_NONBLOCK)?;
            let bell = Arc::new(Bell { fd, leave: AtomicBool::new(false) });
            server.bells.push(Arc::clone(&bell));
            let thread = std::thread::Builder::new().name(format!("ublk-queue-{id}"));
            server.threads.push(thread.spawn(move || {
                let result = serve(&config, &store, &options, &bell);
                if let Err(error) = &result {
                    eprintln!("queue {}: {error:#}", config.queue_id());
                }
                result
            })?);
        }
        Ok(server)
    }

    fn ring(&self, leave: bool) -> Result<()> {
        for bell in &self.bells {
            bell.leave.store(leave, Ordering::Release);
            bell.fd.write(1)?;
        }
        Ok(())
    }

    fn join(self) -> Result<Vec<QueueStats>> {
        self.threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow!("a data thread panicked"))?)
            .collect()
    }
}

fn spec(options: &Options) -> (DeviceSpec, DiskParams) {
    let io = options.io_kib << 10;
    let spec = DeviceSpec {
        id: options.id,
        recovery: if options.mortal { Recovery::Never } else { Recovery::Reissue },
        need: if options.batch { Features::BATCH_IO } else { Features::NONE },
        ..DeviceSpec::new(options.queues, options.depth, io)
    };
    let disk = DiskParams {
        physical_block: 4096.max(options.block),
        io_min: 4096.max(options.block),
        io_opt: 64 << 10,
        volatile_cache: true,
        fua: true,
        discard: Some(DiscardParams {
            granularity: 4096,
            max_discard_sectors: u32::MAX >> 9,
            max_write_zeroes_sectors: 16 << 11,
        }),
        ..DiskParams::new(u64::from(options.size_mib) << 11, options.block, io)
    };
    (spec, disk)
}

fn list() -> Result<()> {
    let mut control = Control::open()?;
    println!("features {:#x}: {}", control.features().bits(), control.features());
    for device in control.list()? {
        println!("{device:?}");
    }
    Ok(())
}

fn cycles(options: &Options) -> Result<()> {
    let begin = Instant::now();
    let store = Store::open(options)?;
    for _ in 0..options.cycles {
        let (spec, disk) = spec(options);
        let mut device = Device::add(Control::open()?, spec, disk)?;
        let server = Server::spawn(&device, &store, options)?;
        let path = device.start(Duration::from_secs(10))?;
        File::open(&path)?.read_exact_at(&mut [0; 4096], 0)?;
        if options.stop_live {
            device.stop(Duration::from_secs(10))?;
            server.join()?;
            device.delete(Duration::from_secs(10))?;
        } else {
            server.ring(true)?;
            server.join()?;
            device.close(Duration::from_secs(10))?;
        }
    }
    println!("{} cycles in {:?}", options.cycles, begin.elapsed());
    Ok(())
}

fn main() -> Result<()> {
    let options = Options::parse();
    if options.list {
        return list();
    }
    if let Some(id) = options.stop {
        return Ok(Control::open()?.stop(id, Duration::from_secs(10))?);
    }
    if options.cycles > 0 {
        return cycles(&options);
    }

    // Before any thread exists, so that the signals go to the one that waits for them.
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGINT);
    signals.add(Signal::SIGTERM);
    signals.thread_block()?;
    let (ended, end) = mpsc::channel();
    std::thread::spawn(move || ended.send(signals.wait()));

    let store = Store::open(&options)?;
    let mut device = match options.recover {
        Some(id) => Device::recover(Control::open()?, id, Duration::from_secs(60))?,
        None => {
            let (spec, disk) = spec(&options);
            Device::add(Control::open()?, spec, disk)?
        }
    };
    let server = Server::spawn(&device, &store, &options)?;
    let begin = Instant::now();
    let path = device.start(Duration::from_secs(30))?;
    println!("{} is up after {:?}: {:?}", path.display(), begin.elapsed(), device.info());

    let seconds = if options.seconds == 0 { u64::MAX >> 8 } else { options.seconds };
    let _ = end.recv_timeout(Duration::from_secs(seconds));

    let id = device.info().id;
    if let Some(mib) = options.grow_mib {
        device.control().update_size(id, u64::from(mib) << 11)?;
        println!("size is now {} sectors", device.control().params(id)?.sectors);
    }
    let begin = Instant::now();
    let show = |stats: Vec<QueueStats>| {
        for (queue, stats) in stats.into_iter().enumerate() {
            println!("queue {queue}: {stats:?}");
        }
    };
    let limit = Duration::from_secs(30);
    if options.hand_over {
        server.ring(false)?;
        device.disown();
        device.control().quiesce(id, limit)?;
        show(server.join()?);
    } else if options.leave {
        device.disown();
        server.ring(true)?;
        show(server.join()?);
    } else if options.stop_live {
        server.ring(false)?;
        device.own();
        device.stop(limit)?;
        show(server.join()?);
        device.delete(limit)?;
    } else {
        server.ring(true)?;
        show(server.join()?);
        device.close(limit)?;
    }
    println!("down after {:?}", begin.elapsed());
    Ok(())
}
