//! Crowds of sessions and strangers against the real target over TCP: their effects on other hosts
//! and on the log.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_config::DigestWish;
use rblk_fabric::{ConnectOptions, PageKind, Region};
use rblk_initiator::engine::io::{Io, IoOp};
use rblk_initiator::engine::{Engine, QueueStats};
use rblk_initiator::volume::session::{Credentials, HostIdentity, QueueWish, Session};
use rblk_protocol::auth::{PublicKey, SecretKey};
use rblk_protocol::{AccessMode, BlockSize, Features, HostId, Name, QueueDepth, Tag};
use rblk_tests::program::{Client, Target, program, run};

const MIB: u32 = 1 << 20;
const SECOND: Duration = Duration::from_secs(1);

/// A target of two hosts that prove their keys, with a volume in a file.
struct Bed {
    directory: tempfile::TempDir,
    target: Target,
    key: PublicKey,
    hosts: [SecretKey; 2],
}

impl Bed {
    fn new(arena: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let key_file = directory.path().join("target.key").display().to_string();
        let made =
            run(Command::new(program("rblk-target")).args(["key", "new", "--file", &key_file]));
        let hosts = [(); 2].map(|()| SecretKey::generate().unwrap());
        let store = directory.path().join("v.img");
        fs::File::create(&store).unwrap().set_len(1 << 30).unwrap();
        let entry = |(name, key): (&str, &SecretKey)| {
            let key = key.public();
            format!("[[host]]\nname = '{name}'\nkeys = ['{key}']\nvolumes = ['v:ro']\n")
        };
        let text = format!(
            "listen = ['tcp://127.0.0.1:1']\nauth = 'required'\nencrypt = 'off'\narena = '{arena}'\n\
             sessions_max = 2048\nkey_file = '{key_file}'\n[[volume]]\nname = 'v'\nstore = 'file'\npath = '{}'\n{}{}",
            store.display(),
            entry(("many", &hosts[0])),
            entry(("one", &hosts[1])),
        );
        let config = directory.path().join("target.toml");
        fs::write(&config, text).unwrap();
        let target = Target::start(directory.path(), &["--config", config.to_str().unwrap()]);
        Self { key: made.stdout.trim_end().parse().unwrap(), directory, target, hosts }
    }

    fn credentials(&self, host: usize) -> Credentials {
        Credentials::new(self.hosts[host].clone(), vec![self.key]).unwrap()
    }

    fn log_bytes(&self) -> u64 {
        fs::metadata(self.directory.path().join("target.log")).unwrap().len()
    }
}

/// A session that asks for a megabyte twice and takes nothing.
struct Deaf {
    _session: Session,
    _engine: Engine,
}

impl Deaf {
    async fn new(bed: &Bed, buffers: &Arc<Region>, at: u64) -> Self {
        let name = |name| Name::new(name).unwrap();
        let identity = HostIdentity { id: HostId([1; 16]), name: name("many") };
        // It asks for the longest possible time.
        let detect = Duration::from_secs(120);
        let options = ConnectOptions { detect, timeout: detect, ..ConnectOptions::default() };
        let credentials = bed.credentials(0);
        let address = &bed.target.address;
        let mut session =
            Session::connect(address, &options, &identity, Some(&credentials), None).await.unwrap();
        let volume = session.open(&name("v"), AccessMode::ReadOnly).await.unwrap();
        let depth = QueueDepth::new(2).unwrap();
        let wish = QueueWish {
            depth,
            io_max_bytes: MIB,
            in_capsule_bytes: 4096,
            features: Features::WRITE_WITH_IMM.or(Features::CAPSULE_LISTS),
            digest: DigestWish::Off,
            lanes: None,
            queues: 1,
        };
        let memory = Arc::clone(buffers).into();
        let path = session.connect_queue(0, wish, volume.handle, &memory).await.unwrap();
        let mut engine = Engine::new(depth, MIB as usize, Arc::new(QueueStats::default()));
        let now = Instant::now();
        engine.connect(path, now);
        let size = BlockSize::new(volume.block_size.bytes()).unwrap();
        for tag in 0..2 {
            let offset = (2 * at + u64::from(tag)) % 512 * u64::from(MIB);
            let io = Io::new(IoOp::Read, offset, u64::from(MIB), size).unwrap();
            engine.submit(Tag(tag), io).unwrap();
        }
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(3) {
            engine.begin_turn(now);
            let _ = engine.turn(now, |_, _| {});
            if engine.outstanding() == 2 {
                break;
            }
        }
        Self { _session: session, _engine: engine }
    }
}

/// The times of reads that miss the cache, during `time`, sorted.
fn reads(client: &mut Client, from: u64, time: Duration) -> Vec<Duration> {
    let begun = Instant::now();
    let mut times = Vec::new();
    for at in 0.. {
        if begun.elapsed() > time {
            break;
        }
        let read = Instant::now();
        // Beyond the range of the deaf sessions; each block is read once.
        let offset = (512 << 20) + (from + at) * 65536 % (511 << 20);
        assert_eq!(client.read(offset, 65536).len(), 65536);
        times.push(read.elapsed());
    }
    times.sort();
    times
}

fn say(what: &str, times: &[Duration]) {
    let at = |part: usize| times[(times.len() - 1) * part / 100];
    let (p50, p99, max) = (at(50), at(99), at(100));
    println!("{what}: {} reads, p50 {p50:.1?}, p99 {p99:.1?}, max {max:.1?}", times.len());
}

/// Not a gate: prints the effect of 300 deaf sessions of one host on the reads of another host.
#[test]
#[ignore = "a measurement: cargo test -p rblk-tests --test programs crowds:: -- --ignored --nocapture"]
fn reads_beside_deaf_sessions() {
    let bed = Bed::new("256MiB");
    let mut one =
        Client::prove(&bed.target.address, "v", 2, Some(&bed.credentials(1)), AccessMode::ReadOnly)
            .unwrap();
    say("alone", &reads(&mut one, 0, 5 * SECOND));
    let buffers = Region::allocate(2 * MIB as usize, PageKind::Normal).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let begun = Instant::now();
    let deaf: Vec<Deaf> = runtime.block_on(async {
        let mut deaf = Vec::new();
        for at in 0..300 {
            deaf.push(Deaf::new(&bed, &buffers, at).await);
        }
        deaf
    });
    println!("{} deaf sessions, made in {:.1?}", deaf.len(), begun.elapsed());
    say("beside them", &reads(&mut one, 100_000, 25 * SECOND));
}

/// A hello of the framing. Its hello for the target has an unknown version.
fn knock(address: SocketAddr) {
    let mut stream = TcpStream::connect(address).unwrap();
    let mut bytes = b"rblkSOFT".to_vec();
    bytes.extend([1, 0, 0, 0, 0x88, 0x13, 0, 0, 56, 0, 0, 0]);
    bytes.extend([9; 56]);
    stream.set_read_timeout(Some(5 * SECOND)).unwrap();
    stream.write_all(&bytes).unwrap();
    let mut answer = [0; 16];
    // A reply that rejects.
    stream.read_exact(&mut answer).unwrap();
    assert_eq!((&answer[..8], answer[10]), (&b"rblkSOFT"[..], 2));
}

fn address(target: &Target) -> SocketAddr {
    format!("127.0.0.1:{}", target.address.port).parse().unwrap()
}

/// Refused hellos, as fast as possible, during `time`. Returns their number, and the growth of the
/// log in bytes per second.
fn flood(target: &Target, log: &Path, time: Duration) -> (usize, u64) {
    let size = || fs::metadata(log).unwrap().len();
    let (begun, before, to) = (Instant::now(), size(), address(target));
    let mut count = 0;
    while begun.elapsed() < time {
        knock(to);
        count += 1;
    }
    let took = u64::try_from(begun.elapsed().as_millis()).unwrap();
    // Another thread writes the log.
    std::thread::sleep(SECOND);
    (count, (size() - before) * 1000 / took)
}

#[test]
fn a_flood_of_refusals_is_no_flood_of_the_log() {
    let directory = tempfile::tempdir().unwrap();
    let target = Target::start(directory.path(), &["--memory", "m=1MiB"]);
    let log = directory.path().join("target.log");
    let (count, rate) = flood(&target, &log, 3 * SECOND);
    println!("{count} refused hellos in 3 s, {:.1} KiB/s of log", rate as f64 / 1024.0);
    assert!(count > 300, "{count} hellos are no flood");
    assert!(rate < 10 << 10, "{rate} bytes of log in a second");
    // The log has the event, and its number.
    let text = target.log();
    assert!(text.contains("refused a connection"), "{text}");
    assert!(text.contains("lines of the log were left out"), "{text}");
}

#[test]
fn a_flood_of_logins_is_no_flood_of_the_log() {
    let bed = Bed::new("64MiB");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let stranger = Credentials::new(SecretKey::generate().unwrap(), vec![bed.key]).unwrap();
    let identity = HostIdentity { id: HostId([3; 16]), name: Name::new("x").unwrap() };
    let (begun, before) = (Instant::now(), bed.log_bytes());
    let mut count = 0u32;
    while begun.elapsed() < 3 * SECOND {
        let options = ConnectOptions::default();
        let tried =
            Session::connect(&bed.target.address, &options, &identity, Some(&stranger), None);
        assert!(runtime.block_on(tried).is_err(), "nobody knows its key");
        count += 1;
    }
    std::thread::sleep(SECOND);
    let rate = (bed.log_bytes() - before) / 3;
    println!("{count} logins without a right, {:.1} KiB/s of log", rate as f64 / 1024.0);
    assert!(count > 100, "{count} logins are no flood");
    assert!(rate < 40 << 10, "{rate} bytes of log in a second");
    assert!(bed.target.log().contains("did not prove its key"), "{}", bed.target.log());
}
