//! Several files make one configuration, and every configuration dumps to what loads the same.

use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use rblk_config::{
    Auth, BackingConfig, ByteRate, ByteSize, CacheMode, DigestWish, DirectIo, Duration, Encrypt,
    HostConfig, HugePages, Limits, MountConfig, OnLoss, Paths, Spin, StoreKind, TargetConfig,
    TransportKeys, VolumeAccess, VolumeConfig, VolumeRight,
};
use rblk_protocol::auth::PublicKey;
use tempfile::TempDir;

fn files(files: &[(&str, &str)]) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = directory.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    directory
}

const BASE: &str = "listen = ['rdma://a', 'rdma://b']\narena = '64MiB'\n\
                    [[volume]]\nname = 'one'\nstore = 'file'\npath = '/one'\n";

#[test]
fn drop_ins_add_volumes_and_override_the_rest() {
    let directory = files(&[
        ("target.toml", BASE),
        (
            "target.d/20-b.toml",
            "arena = '32MiB'\n[[volume]]\nname='three'\nstore='memory'\nsize='1MiB'\n",
        ),
        (
            "target.d/10-a.toml",
            "arena = '16MiB'\nlisten = ['tcp://c']\n[[volume]]\nname='two'\nstore='null'\nsize='1MiB'\n",
        ),
        ("target.d/.30-hidden.toml", "nonsense"),
        ("target.d/40.toml.bak", "nonsense"),
    ]);
    let config = TargetConfig::load(&directory.path().join("target.toml")).unwrap();
    assert_eq!(config.arena, ByteSize(32 << 20));
    assert_eq!(config.listen, ["tcp://c"]);
    let names: Vec<_> = config.volumes.iter().map(|volume| volume.name.as_str()).collect();
    assert_eq!(names, ["one", "two", "three"]);
}

#[test]
fn drop_ins_add_hosts() {
    let host = |name: &str, key: u8| {
        let key = keys(key, 1)[0];
        format!("[[host]]\nname = '{name}'\nkeys = ['{key}']\nvolumes = ['one:rw']\n")
    };
    let directory = files(&[
        ("target.toml", &format!("{BASE}{}", host("h1", 4))),
        ("target.d/host-h3.toml", &host("h3", 6)),
        ("target.d/host-h2.toml", &host("h2", 5)),
    ]);
    let config = TargetConfig::load(&directory.path().join("target.toml")).unwrap();
    let names: Vec<_> = config.hosts.iter().map(|host| host.name.as_str()).collect();
    assert_eq!(names, ["h1", "h2", "h3"]);
    assert_eq!(config.hosts[2].keys, keys(6, 1));
}

#[test]
fn faults_name_the_file_they_are_in() {
    let directory = files(&[
        ("target.toml", BASE),
        ("target.d/a.toml", "[[volume]]\nname='two'\nstore='null'\nsize='1MiB'\n"),
        ("target.d/b.toml", "\n[[volume]]\nname = 'one'\nstore='memory'\nsize=512\n"),
    ]);
    let error = TargetConfig::load(&directory.path().join("target.toml")).unwrap_err();
    let root = directory.path().display();
    assert_eq!(
        error.to_string(),
        format!(
            "{root}/target.d/b.toml:3:8: volume[2].name = \"one\": volume[0] has the same name \
             (at {root}/target.toml:4:8); rename one of them\n\
             {root}/target.d/b.toml:5:6: volume[2].size = \"512B\": not a multiple of block_size: \
             512 = 0 x 4096 + 512; write \"4KiB\", or block_size = 512"
        )
    );
}

#[test]
fn a_relation_points_at_the_key_that_is_set() {
    let directory = files(&[("target.toml", BASE), ("target.d/a.toml", "arena = '1MiB'")]);
    let error = TargetConfig::load(&directory.path().join("target.toml")).unwrap_err();
    assert!(
        error.to_string().contains("/target.d/a.toml:1:9: arena = \"1MiB\": too small"),
        "{error}"
    );
}

#[test]
fn backings() {
    let mut volume = VolumeConfig::file("a", "/a");
    volume.direct = DirectIo::Required;
    let file = |cache, read_ahead| BackingConfig::File {
        path: "/a".as_ref(),
        size: None,
        direct: DirectIo::Required,
        cache,
        read_ahead,
    };
    assert_eq!(volume.backing().unwrap(), file(CacheMode::WriteThrough, ByteSize(512 << 10)));
    (volume.cache, volume.read_ahead) = (Some(CacheMode::WriteBack), ByteSize(0));
    assert_eq!(volume.backing().unwrap(), file(CacheMode::WriteBack, ByteSize(0)));
    let size = ByteSize(1 << 20);
    assert_eq!(VolumeConfig::memory("a", size).backing().unwrap(), BackingConfig::Memory { size });
    assert_eq!(VolumeConfig::null("a", size).backing().unwrap(), BackingConfig::Null { size });
    let mut image = VolumeConfig::rbd("a", "ssd/t/a");
    image.keyring = Some("/k".into());
    let BackingConfig::Rbd { image, cluster, cache, .. } = image.backing().unwrap() else {
        panic!("another store");
    };
    assert_eq!((&*image.pool, &*image.namespace, &*image.image), ("ssd", "t", "a"));
    assert_eq!((cluster.conf, cluster.user, cluster.keyring), (None, "admin", Some("/k".as_ref())));
    assert_eq!(cache, CacheMode::WriteThrough);
    volume.store = StoreKind::Null;
    assert!(volume.backing().is_err());
}

#[test]
fn a_path_that_is_no_text_cannot_be_dumped() {
    use std::os::unix::ffi::OsStringExt;
    let path = PathBuf::from(std::ffi::OsString::from_vec(b"/\xff".to_vec()));
    let config = TargetConfig {
        listen: vec!["x".to_owned()],
        volumes: vec![VolumeConfig::file("a", path)],
        ..TargetConfig::default()
    };
    assert!(config.dump().is_err());
    assert!(config.validate().is_err());
}

fn power(range: std::ops::RangeInclusive<u32>) -> impl Strategy<Value = ByteSize> {
    range.prop_map(|shift| ByteSize(1 << shift))
}

fn micros(range: std::ops::RangeInclusive<u64>) -> impl Strategy<Value = Duration> {
    range.prop_map(Duration::from_micros)
}

fn spin() -> impl Strategy<Value = Spin> {
    prop_oneof![Just(Spin::Adaptive), Just(Spin::Always), micros(0..=10_000).prop_map(Spin::For)]
}

fn volume() -> impl Strategy<Value = VolumeConfig> {
    let path = "/[a-z\"'\\\\ \n]{1,20}";
    let kinds = prop_oneof![
        (path, prop::option::of(1u64..1 << 40)).prop_map(|(path, blocks)| VolumeConfig {
            size: blocks.map(|blocks| ByteSize(blocks * 4096)),
            ..VolumeConfig::file("", path)
        }),
        (1u64..1 << 40).prop_map(|blocks| VolumeConfig::memory("", ByteSize(blocks * 4096))),
        (1u64..1 << 40).prop_map(|blocks| VolumeConfig::null("", ByteSize(blocks * 4096))),
    ];
    let direct =
        prop_oneof![Just(DirectIo::Required), Just(DirectIo::Preferred), Just(DirectIo::Off)];
    let cache = prop::option::of(prop_oneof![
        Just(CacheMode::None),
        Just(CacheMode::WriteThrough),
        Just(CacheMode::WriteBack)
    ]);
    (kinds, direct, cache, 0u64..=1024, any::<bool>(), any::<bool>()).prop_map(
        |(volume, direct, cache, read_ahead, read_only, small)| VolumeConfig {
            direct,
            read_only: read_only && cache != Some(CacheMode::WriteBack),
            block_size: if small { 512 } else { 4096 },
            cache: cache.filter(|c| volume.store == StoreKind::File || *c == CacheMode::None),
            read_ahead: ByteSize(read_ahead * 4096),
            cache_min: (volume.store == StoreKind::File && cache != Some(CacheMode::None) && small)
                .then_some(ByteSize(1 << 20)),
            cache_max: (volume.store == StoreKind::File && cache != Some(CacheMode::None))
                .then_some(ByteSize((1 << 20) + read_ahead * 4096)),
            limits: Limits {
                iops: small.then_some(10 + u32::try_from(read_ahead).unwrap()),
                bandwidth: read_only.then_some(ByteRate((1 + read_ahead) << 20)),
                iops_burst: (small && read_only).then_some(7),
                bandwidth_burst: None,
            },
            ..volume
        },
    )
}

/// Keys of hosts, each another one.
fn keys(first: u8, count: usize) -> Vec<PublicKey> {
    (first..).take(count).map(|n| PublicKey::from_bytes([n.max(2); 32])).collect()
}

prop_compose! {
    /// Hosts, with rights to the first volumes, and how many of those there are.
    fn hosts()(
        hosts in prop::collection::vec(
            (1usize..=2, any::<bool>(), prop::option::of(2u32..=65_536), prop::option::of(256u64..1 << 28)),
            0..4,
        ),
        rights in prop::collection::vec(any::<bool>(), 1..4),
    ) -> (Vec<HostConfig>, usize) {
        let access = |writes| if writes { VolumeAccess::ReadWrite } else { VolumeAccess::ReadOnly };
        let named = rights.iter().skip(1).enumerate();
        let named = named.map(|(i, w)| VolumeRight::new(Some(format!("v{i}")), access(*w)));
        let all = VolumeRight::new(None, access(rights[0]));
        let volumes: Vec<VolumeRight> = named.chain([all]).collect();
        let hosts = (10u8..).step_by(2).zip(hosts).map(|(first, (count, take_over, connections_max, memory))| {
            HostConfig {
                name: format!("h{first}"),
                keys: keys(first, count),
                volumes: volumes.clone(),
                take_over,
                connections_max,
                memory_max: memory.map(|pages| ByteSize(pages * 4096)),
                limits: Limits {
                    iops: connections_max.map(|count| 10 * count),
                    bandwidth: connections_max.map(|count| ByteRate(u64::from(count) << 20)),
                    ..Limits::default()
                },
            }
        });
        (hosts.collect(), rights.len() - 1)
    }
}

prop_compose! {
    fn target()(
        name in prop::option::of("[a-z0-9_]{1,64}"),
        member in prop::option::of("[a-z0-9_]{1,64}"),
        cpus in prop::option::of(prop::collection::btree_set(0u16..=8191, 4..9)),
        poll_groups in prop::option::of(1u16..=4),
        max_io in power(14..=22),
        arena in 4096u64..1 << 28,
        hugepages in prop_oneof![Just(HugePages::Auto), Just(HugePages::Never), Just(HugePages::Required)],
        dirty in prop::option::of(0u64..=1000),
        write_back_delay in micros(10_000..=3_600_000_000),
        queue_depth_max in 1u16..=1024,
        inline in 0u64..=32,
        (drain_timeout, stop_timeout) in (micros(0..=3_600_000_000), micros(0..=3_600_000_000)),
        (sessions_max, lease) in (1u32..=65_536, micros(1_000_000..=3_600_000_000)),
        spin in spin(),
        volumes in prop::collection::vec(volume(), 0..5),
        (hosts, named) in hosts(),
        (auth, insecure, encrypt) in prop::sample::select(vec![
            (None, false, Encrypt::Auto),
            (None, false, Encrypt::Required),
            (None, true, Encrypt::Off),
            (Some(Auth::None), true, Encrypt::Auto),
            (Some(Auth::Required), false, Encrypt::Required),
        ]),
        key_file_next in prop::option::of("(/[a-z]{1,20}|credential:[a-z]{1,20})".prop_map(PathBuf::from)),
        http in any::<bool>(),
        slow_io in prop::option::of(micros(1..=3_600_000_000)),
        (relaxed_ordering, tos, ack_timeout) in
            (any::<bool>(), prop::option::of(any::<u8>()), prop::option::of(micros(1000..=30_000_000))),
        devices in prop::option::of(Just(vec!["mlx5_0".to_owned(), "rxe0".to_owned()])),
    ) -> TargetConfig {
        let mut volumes = volumes;
        while volumes.len() < named {
            volumes.push(VolumeConfig::null("", ByteSize(4096)));
        }
        for (index, volume) in volumes.iter_mut().enumerate() {
            volume.name = format!("v{index}");
            volume.path = volume.path.take().map(|path| path.join(index.to_string()));
        }
        let member = member.filter(|_| volumes.iter().all(|volume| volume.image.is_some()));
        let least = max_io.0 / 4096;
        let dirty_max = dirty.map(|permille| least + (arena / 2 - least) * permille / 1000);
        TargetConfig {
            listen: vec!["rdma://[::]:1".to_owned(), "tcp://x".to_owned()],
            devices,
            name,
            member,
            control_socket: PathBuf::from("/s"),
            state_dir: PathBuf::from("/d"),
            poll_groups,
            cpus: cpus.map(|cpus| cpus.into_iter().collect()),
            arena: ByteSize(arena * 4096),
            hugepages,
            dirty_max: dirty_max.map(|pages| ByteSize(pages * 4096)),
            write_back_delay,
            max_io,
            queue_depth_max,
            inline: ByteSize(inline * 512),
            drain_timeout,
            stop_timeout,
            sessions_max,
            lease,
            auth,
            insecure,
            key_file: PathBuf::from("/k"),
            key_file_next: key_file_next.filter(|path| path.as_os_str() != "/k"),
            http: http.then(|| std::net::SocketAddr::from(([127, 0, 0, 1], 9720))),
            slow_io,
            transport: TransportKeys { spin, encrypt, relaxed_ordering, tos, ack_timeout },
            volumes,
            hosts,
        }
    }
}

prop_compose! {
    fn mount()(
        (queues, lanes) in (prop::option::of(1u16..=4), prop::option::of(1u16..=4)),
        queue_depth in 1u16..=512,
        max_io in power(12..=22),
        (read_only, shared) in prop::sample::select(vec![(false, false), (true, false), (false, true)]),
        retain in 0u64..=16 << 20,
        (on_loss, paths) in (
            prop::sample::select(vec![OnLoss::Once, OnLoss::UntilRemount]),
            prop::sample::select(vec![Paths::Failover, Paths::All]),
        ),
        device_id in prop::option::of(0u32..1 << 20),
        reconnect_delay in micros(10_000..=300_000_000),
        fail_after in prop::option::of(micros(0..=2_592_000_000_000)),
        detect in micros(100_000..=300_000_000),
        (connect_timeout, failback, wait) in
            (micros(100_000..=300_000_000), micros(0..=86_400_000_000), micros(0..=86_400_000_000)),
        spin in spin(),
        host_name in prop::option::of("[a-z0-9_]{1,64}"),
        (keys_known, encrypt) in prop::sample::select(vec![
            (0, Encrypt::Auto), (0, Encrypt::Off), (1, Encrypt::Auto), (2, Encrypt::Required),
        ]),
        digest in prop::sample::select(vec![DigestWish::Auto, DigestWish::Crc32c, DigestWish::Off]),
        (relaxed_ordering, tos, ack_timeout, files) in (
            any::<bool>(), prop::option::of(any::<u8>()), prop::option::of(micros(1000..=30_000_000)), 0..=8,
        ),
    ) -> MountConfig {
        let digest = if max_io.0 > 1 << 20 { DigestWish::Auto } else { digest };
        let mut config = MountConfig::new("rdma://[::1]:1", "v");
        config.retain = ByteSize(if shared { 0 } else { retain * 4096 });
        config.target_keys = keys(7, keys_known);
        let files = if digest == DigestWish::Crc32c { 0 } else { files };
        config.shared_memory = (0..files).map(|n| format!("/dev/shm/{n}").into()).collect();
        config.key_file = PathBuf::from(if keys_known == 0 { "/etc/rblk/host.key" } else { "/k" });
        config.queues = queues;
        config.lanes = lanes;
        config.queue_depth = queue_depth;
        config.max_io = max_io;
        config.read_only = read_only;
        config.shared = shared;
        config.on_loss = on_loss;
        config.device_id = device_id;
        config.reconnect_delay = reconnect_delay;
        config.fail_after = fail_after;
        config.detect = detect;
        config.connect_timeout = connect_timeout;
        config.failback = failback;
        config.paths = paths;
        config.wait = wait;
        config.host_name = host_name;
        config.digest = digest;
        config.transport = TransportKeys { spin, encrypt, relaxed_ordering, tos, ack_timeout };
        config
    }
}

proptest! {
    #[test]
    fn target_dumps_to_what_loads_the_same(config in target()) {
        prop_assert!(config.validate().is_ok(), "{}", config.validate().unwrap_err());
        let dirty = config.dirty_limit().0;
        prop_assert!((config.max_io.0..=config.arena.0 / 2).contains(&dirty) && dirty % 4096 == 0);
        let text = config.dump().unwrap();
        prop_assert_eq!(TargetConfig::parse(&text, "dump").unwrap(), config);
    }

    #[test]
    fn mount_dumps_to_what_loads_the_same(config in mount()) {
        prop_assert!(config.validate().is_ok(), "{}", config.validate().unwrap_err());
        let text = config.dump().unwrap();
        prop_assert_eq!(MountConfig::parse(&text, "dump").unwrap(), config);
    }

    /// Whatever the file says, there is a value that validates or an error with a text.
    #[test]
    fn no_text_panics(text in "((listen|arena|cpus|volume|path|size|mount|x) ?= ?(1|-1|0.5|'x'|\\[\\]|\\[1\\]|\\{a=1\\}|true)\n|\\[\\[?(volume|mount|a\\.b)\\]\\]?\n|\\PC{0,9}){0,6}") {
        for error in [
            TargetConfig::parse(&text, "t").map(|config| config.validate().unwrap()).err(),
            MountConfig::parse(&text, "t").map(|config| config.validate().unwrap()).err(),
        ].into_iter().flatten() {
            prop_assert!(!error.to_string().is_empty());
        }
    }
}
