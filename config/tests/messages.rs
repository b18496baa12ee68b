//! The messages that users read when a file is wrong, word for word.

use rblk_config::{
    Auth, ByteSize, ConfigError, Duration, FlagLayer, MountConfig, StoreKind, TargetConfig,
    VolumeConfig,
};

const LISTEN: &str = "listen = ['rdma://192.0.2.1']\n";

/// The message of a target file that starts with a good `listen` line.
fn target(rest: &str) -> String {
    TargetConfig::parse(&format!("{LISTEN}{rest}"), "t.toml").unwrap_err().to_string()
}

/// The message of a mount file that starts with the required keys.
fn mount(rest: &str) -> String {
    let text = format!("target = ['tcp://store1']\nvolume = 'v'\n{rest}");
    MountConfig::parse(&text, "m.toml").unwrap_err().to_string()
}

fn assert_messages(message: fn(&str) -> String, table: &[(&str, &str)]) {
    for (text, expected) in table {
        assert_eq!(message(text), *expected, "for {text:?}");
    }
}

#[test]
#[expect(clippy::too_many_lines, reason = "one case after another")]
fn target_values() {
    assert_messages(
        target,
        &[
            (
                "max_io = '3MiB'",
                "t.toml:2:10: max_io = \"3MiB\": not a power of two; write a power of two from \"4KiB\" to \"4MiB\", \
                 such as \"2MiB\" or \"4MiB\"",
            ),
            (
                "max_io = 8388608",
                "t.toml:2:10: max_io = 8388608: more than 4MiB; write a power of two from \"4KiB\" to \"4MiB\"",
            ),
            (
                "max_io = '1MB'",
                "t.toml:2:10: max_io = \"1MB\": unit \"MB\" could mean 1000 or 1024; write \"MiB\"; \
                 write a power of two from \"4KiB\" to \"4MiB\"",
            ),
            (
                "max_io = 0.5",
                "t.toml:2:10: max_io = 0.5: a fraction; use a smaller unit; \
                 write a power of two from \"4KiB\" to \"4MiB\"",
            ),
            (
                "arena = '2MiB'",
                "t.toml:2:9: arena = \"2MiB\": too small: 4 x max_io = 4 x 1MiB = 4MiB; \
                 raise arena to \"4MiB\" or lower max_io to \"512KiB\"",
            ),
            (
                "arena = 5000000",
                "t.toml:2:9: arena = 5000000: not a multiple of 4KiB; \
                 write a multiple of 4KiB from \"1MiB\" to \"1TiB\"",
            ),
            (
                "inline = '16KiB'\nmax_io = '8KiB'",
                "t.toml:2:10: inline = \"16KiB\": more than max_io = \"8KiB\"; \
                 lower inline to \"8KiB\" or raise max_io",
            ),
            (
                "inline = -1",
                "t.toml:2:10: inline = -1: negative; write a multiple of 512B from \"0B\" to \"16KiB\"",
            ),
            (
                "queue_depth_max = 0",
                "t.toml:2:19: queue_depth_max = 0: less than 1; write a whole number from 1 to 1024",
            ),
            (
                "queue_depth_max = 70000",
                "t.toml:2:19: queue_depth_max = 70000: more than 1024; write a whole number from 1 to 1024",
            ),
            (
                "queue_depth_max = '128'",
                "t.toml:2:19: queue_depth_max = \"128\": a string, not a number; \
                 write a whole number from 1 to 1024",
            ),
            (
                "drain_timeout = 10",
                "t.toml:2:17: drain_timeout = 10: a number without a unit; \
                 write a duration from \"0s\" to \"1h\"",
            ),
            (
                "spin = '1s'",
                "t.toml:2:8: spin = \"1s\": more than 10ms; write \"adaptive\", \"always\" or a duration from \"0s\" to \
                 \"10ms\"",
            ),
            (
                "spin = '5 parsecs'",
                "t.toml:2:8: spin = \"5 parsecs\": unknown unit \"parsecs\"; the common ones are us, ms, s, min, h \
                 and days; write \"adaptive\", \"always\" or a duration from \"0s\" to \"10ms\"",
            ),
            (
                "name = 'a b'",
                "t.toml:2:8: name = \"a b\": ' ' is not allowed in a name; \
                 write 1 to 64 letters, digits, \".\", \"_\" or \"-\", not starting with \".\" or \"-\"",
            ),
            (
                "control_socket = 'run/x.sock'",
                "t.toml:2:18: control_socket = \"run/x.sock\": not absolute; \
                 write an absolute path of at most 107 bytes such as \"/run/rblk/target/control.sock\"",
            ),
            (
                "cpus = [2, 3, 2]",
                "t.toml:2:15: cpus[2] = 2: the same value as cpus[0]; remove one of them",
            ),
            (
                "cpus = []",
                "t.toml:2:8: cpus = []: empty; write a list of one or more, each a whole number from 0 to 8191",
            ),
            (
                "state_dir = 'rblk'",
                "t.toml:2:13: state_dir = \"rblk\": not absolute; \
                 write an absolute path such as \"/var/lib/rblk\"",
            ),
            (
                "hugepages = 'always'",
                "t.toml:2:13: hugepages = \"always\": not one of the choices; \
                 write \"auto\", \"never\" or \"required\"",
            ),
            (
                "write_back_delay = '1ms'",
                "t.toml:2:20: write_back_delay = \"1ms\": less than 10ms; \
                 write a duration from \"10ms\" to \"1h\"",
            ),
            (
                "arena = '1GiB'\ndirty_max = 10000",
                "t.toml:3:13: dirty_max = 10000: not a multiple of 4KiB; \
                 write a multiple of 4KiB from \"4KiB\" to \"512GiB\"",
            ),
            (
                "arena = '1GiB'\ndirty_max = '768MiB'",
                "t.toml:3:13: dirty_max = \"768MiB\": more than half of arena = \"1GiB\"; \
                 lower dirty_max to \"512MiB\" or raise arena to \"1536MiB\"",
            ),
            (
                "max_io = '2MiB'\ndirty_max = '1MiB'",
                "t.toml:3:13: dirty_max = \"1MiB\": less than max_io = \"2MiB\"; \
                 raise dirty_max to \"2MiB\" or lower max_io",
            ),
            (
                "poll_groups = 4\ncpus = [0, 1]",
                "t.toml:2:15: poll_groups = 4: each poll group needs a CPU of its own, and cpus lists 2; \
                 lower poll_groups to 2 or list 4 CPUs in cpus",
            ),
        ],
    );
}

#[test]
fn target_keys() {
    let known = "the known keys are listen, devices, name, member, control_socket, state_dir, poll_groups, cpus, arena, hugepages, \
                 dirty_max, write_back_delay, max_io, queue_depth_max, inline, drain_timeout, stop_timeout, sessions_max, lease, \
                 auth, insecure, key_file, key_file_next, http, slow_io, spin, encrypt, relaxed_ordering, tos, ack_timeout, volume, host";
    assert_eq!(target("max-io = 1"), "t.toml:2:1: max-io: unknown key; did you mean max_io?");
    assert_eq!(target("  colour = 'red'"), format!("t.toml:2:3: colour: unknown key; {known}"));
    assert_eq!(
        target("[[volumes]]\nname = 'a'"),
        "t.toml:2:3: volumes: unknown key; did you mean volume?"
    );
    assert_eq!(
        target("[volume]\nname = 'a'"),
        "t.toml:2:1: volume: a table, not tables; write [[volume]] above the keys of each"
    );
    assert_eq!(target("\"a\\nb\" = 1"), format!("t.toml:2:1: a\\nb: unknown key; {known}"));
    assert_eq!(
        target(&format!("cpus = '{}'", "x".repeat(99))),
        format!(
            "t.toml:2:8: cpus = \"{}...: a string, not a list; \
             write a list of one or more, each a whole number from 0 to 8191",
            "x".repeat(79)
        )
    );
    let message = |text: &str| TargetConfig::parse(text, "t.toml").unwrap_err().to_string();
    assert_eq!(
        message("listen = []"),
        "t.toml:1:10: listen = []: empty; write a list of one or more, each an address such as \"rdma://192.0.2.1:7720\" \
         or \"tcp://[2001:db8::1]:7721\""
    );
    assert_eq!(
        message("listen = 'rdma://x'"),
        "t.toml:1:10: listen = \"rdma://x\": a string, not a list; write a list of one or more, each an address such \
         as \"rdma://192.0.2.1:7720\" or \"tcp://[2001:db8::1]:7721\""
    );
    assert_eq!(
        message("listen = ['rdma://x', 'http://x']"),
        "t.toml:1:23: listen[1] = \"http://x\": unknown scheme \"http\", the schemes are rdma and tcp; \
         write an address such as \"rdma://192.0.2.1:7720\" or \"tcp://[2001:db8::1]:7721\""
    );
}

#[test]
fn target_syntax() {
    assert_messages(
        target,
        &[
            (
                "arena = 64MiB",
                "t.toml:2:9: not TOML: string values must be quoted, expected literal string",
            ),
            ("arena = '1GiB'\narena = '2GiB'", "t.toml:3:1: not TOML: duplicate key"),
            ("[[volume]\n", "t.toml:2:10: not TOML: unclosed array table, expected `]`"),
        ],
    );
}

#[test]
#[expect(clippy::too_many_lines, reason = "one case after another")]
fn volumes() {
    assert_messages(
        target,
        &[
            (
                "[[volume]]\nname = 'a'",
                "t.toml:2:1: volume[0].store: missing; write \"file\", \"rbd\", \"memory\" or \"null\"",
            ),
            (
                "[[volume]]\nname = 'a'\nstore = 'flie'",
                "t.toml:4:9: volume[0].store = \"flie\": not one of the choices; \
                 write \"file\", \"rbd\", \"memory\" or \"null\"; did you mean \"file\"?",
            ),
            (
                "[[volume]]\nname = 'a'\nstore = 'file'",
                "t.toml:2:1: volume[0].path: missing, and store = \"file\" needs it; \
                 write the path of a file or a block device such as path = \"/srv/rblk/a.img\"",
            ),
            (
                "[[volume]]\nname = 'a'\nstore = 'memory'",
                "t.toml:2:1: volume[0].size: missing, and store = \"memory\" needs it; \
                 write a size such as size = \"1GiB\"",
            ),
            (
                "[[volume]]\nname = 'a'\nstore = 'null'\nsize = '1GiB'\npath = '/a'",
                "t.toml:6:8: volume[0].path = \"/a\": store = \"null\" has no path; \
                 remove path or write store = \"file\"",
            ),
            (
                "[[volume]]\nname = 'a'\nstore = 'memory'\nsize = 10752",
                "t.toml:5:8: volume[0].size = \"10752B\": not a multiple of block_size: 10752 = 2 x 4096 + 2560; \
                 write \"8KiB\" or \"12KiB\", or block_size = 512",
            ),
            (
                "[[volume]]\nname = 'a'\nstore = 'memory'\nsize = 0",
                "t.toml:5:8: volume[0].size = 0: less than 512B; \
                 write a multiple of 512B from \"512B\" to \"7EiB\"",
            ),
            (
                "[[volume]]\nname = 'a'\nstore = 'memory'\nsize = '1GiB'\nblock_size = 1024",
                "t.toml:6:14: volume[0].block_size = 1024: not one of the choices; write 512 or 4096",
            ),
            (
                "[[volume]]\nname = 'a'\nstore = 'file'\npath = '/a'\nread_only = 'yes'",
                "t.toml:6:13: volume[0].read_only = \"yes\": a string, not true or false; write true or false",
            ),
            (
                "[[volume]]\nname = 'a'\nstore = 'file'\npath = '/a'\nblocksize = 512",
                "t.toml:6:1: volume[0].blocksize: unknown key; did you mean block_size?",
            ),
            (
                "[[volume]]\nname = 'a'\nstore = 'file'\npath = '/a'\ncache = 'writeback'",
                "t.toml:6:9: volume[0].cache = \"writeback\": not one of the choices; \
                 write \"none\", \"write-through\" or \"write-back\"; did you mean \"write-back\"?",
            ),
            (
                "[[volume]]\nname = 'a'\nstore = 'memory'\nsize = '1GiB'\ncache = 'write-through'",
                "t.toml:6:9: volume[0].cache = \"write-through\": store = \"memory\" is in memory already and \
                 needs no cache; remove cache or write cache = \"none\"",
            ),
            (
                "[[volume]]\nname = 'a'\nstore = 'file'\npath = '/a'\nread_only = true\ncache = 'write-back'",
                "t.toml:7:9: volume[0].cache = \"write-back\": the volume is read-only (at t.toml:6:13); \
                 write cache = \"write-through\" or read_only = false",
            ),
            (
                "[[volume]]\nname = 'a'\nstore = 'file'\npath = '/a'\nread_ahead = '8MiB'",
                "t.toml:6:14: volume[0].read_ahead = \"8MiB\": more than 4MiB; \
                 write a multiple of 4KiB from \"0B\" to \"4MiB\"",
            ),
            (
                "[[volume]]\nname = 'a'\nstore = 'file'\npath = '/a'\n\
                 [[volume]]\nname = 'a'\nstore = 'file'\npath = '//./a'",
                "t.toml:7:8: volume[1].name = \"a\": volume[0] has the same name (at t.toml:3:8); rename one of them\n\
                 t.toml:9:8: volume[1].path = \"//./a\": volume[0] has the same path (at t.toml:5:8); \
                 give each volume its own file or device",
            ),
            (
                "[[volume]]\nname = 'a'\nstore = 'rbd'",
                "t.toml:2:1: volume[0].image: missing, and store = \"rbd\" needs it; \
                 write the pool and the name of an image such as image = \"rbd/vol0\"",
            ),
            (
                "[[volume]]\nname = 'a'\nstore = 'rbd'\nimage = 'vol0'",
                "t.toml:5:9: volume[0].image = \"vol0\": no pool; \
                 write pool[/namespace]/image[@snap], such as \"rbd/vol0\" or \"ssd/tenant1/vol0@monday\"",
            ),
            (
                "[[volume]]\nname = 'a'\nstore = 'file'\npath = '/a'\nimage = 'rbd/a'",
                "t.toml:6:9: volume[0].image = \"rbd/a\": store = \"file\" has no image; \
                 remove image or write store = \"rbd\"",
            ),
            (
                "[[volume]]\nname = 'a'\nstore = 'rbd'\nimage = 'rbd/a@s'\ncache = 'write-back'",
                "t.toml:6:9: volume[0].cache = \"write-back\": a snapshot is read-only (at t.toml:5:9); \
                 write cache = \"write-through\"",
            ),
            (
                "[[volume]]\nname = 'a'\nstore = 'rbd'\nimage = 'rbd/a@s'\n\
                 [[volume]]\nname = 'b'\nstore = 'rbd'\nimage = 'rbd/a@s'",
                "t.toml:9:9: volume[1].image = \"rbd/a@s\": volume[0] has the same image (at t.toml:5:9); \
                 give each volume its own image",
            ),
            (
                "[[volume]]\nname = 'a'\nstore = 'rbd'\nimage = 'rbd/a'\n\
                 [[volume]]\nname = 'b'\nstore = 'rbd'\nimage = 'rbd/a'",
                "t.toml:9:9: volume[1].image = \"rbd/a\": volume[0] has the same image (at t.toml:5:9); \
                 give each volume its own image",
            ),
        ],
    );
}

const KEY: &str = "rblk1:n4ja2ifhmaemcmpyur5k7rpesrcxf2h5xwdzd6wpggvre7d3kyu752zoua";

const SET_UP: &str = "`rblk-target key new`, `rblk-initiator key new` on each host, \
                      `rblk-target host add NAME --key KEY --volume VOLUME:rw`";

#[test]
fn protection() {
    assert_eq!(
        target("auth = 'none'"),
        format!(
            "t.toml:2:8: auth = \"none\": everybody who reaches rdma://192.0.2.1 could read and write every volume; \
             write auth = \"required\" and set keys up: {SET_UP}; or write insecure = true as well"
        )
    );
    assert_messages(
        target,
        &[
            (
                "auth = 'required'\ninsecure = true",
                "t.toml:3:12: insecure = true: auth = \"required\" lets in only hosts that prove their keys \
                 (at t.toml:2:8); remove insecure or auth",
            ),
            (
                "insecure = true\nencrypt = 'required'",
                "t.toml:3:11: encrypt = \"required\": the keys of encryption come from authentication, and there is \
                 none; write auth = \"required\", or encrypt = \"auto\"",
            ),
            (
                "encrypt = 'on'",
                "t.toml:2:11: encrypt = \"on\": not one of the choices; write \"auto\", \"required\" or \"off\"",
            ),
            (
                "key_file = 'target.key'",
                "t.toml:2:12: key_file = \"target.key\": not absolute; write an absolute path such as \
                 \"/etc/rblk/target.key\", or \"credential:NAME\" for a credential of systemd",
            ),
            (
                "key_file = 'credential:../a'",
                "t.toml:2:12: key_file = \"credential:../a\": '/' is not allowed in a name; write an absolute path \
                 such as \"/etc/rblk/target.key\", or \"credential:NAME\" for a credential of systemd",
            ),
            (
                "key_file_next = '/etc/rblk/target.key'",
                "t.toml:2:17: key_file_next = \"/etc/rblk/target.key\": the same file as key_file; \
                 name the file of another key, or remove key_file_next",
            ),
        ],
    );
}

/// Nothing cuts a member off from a disk that another member has, too.
#[test]
fn a_group_has_images_only() {
    let volume =
        |name: &str, store: &str| format!("[[volume]]\nname = '{name}'\nstore = {store}\n");
    let disk = volume("vol0", "'file'\npath = '/dev/mapper/san'");
    let image = volume("vol1", "'rbd'\nimage = 'rbd/vol1'");
    let memory = volume("vol2", "'memory'\nsize = '1MiB'");
    let [group, instead] = [
        "a group serves images of Ceph only",
        "write store = \"rbd\", or remove member and start one target at a time (a standby target)",
    ];
    assert_eq!(
        target(&format!("member = 'a'\n{disk}{image}{memory}")),
        format!(
            "t.toml:5:9: volume[0].store = \"file\": {group}. Ceph cuts a dead member off from its image; nothing cuts \
             one off from a file or a disk, as rblk makes no reservations (SCSI-3, NVMe): two members could write to \
             it at once (at t.toml:2:10); {instead}\n\
             t.toml:12:9: volume[2].store = \"memory\": {group}: each member would have data of its own under this \
             name (at t.toml:2:10); {instead}"
        )
    );
    for good in [format!("member = 'a'\n{image}"), format!("{disk}{image}{memory}")] {
        TargetConfig::parse(&format!("{LISTEN}{good}"), "t.toml").unwrap();
    }
}

/// What is not written is as strict as the addresses need.
#[test]
fn who_may_connect_by_default() {
    let of = |listen: &str, rest: &str| {
        let text = format!("listen = [{listen}]\n{rest}");
        TargetConfig::parse(&text, "t.toml").unwrap().authentication()
    };
    assert_eq!(of("'tcp://127.0.0.1', 'rdma://[::1]:1'", ""), Auth::None);
    assert_eq!(of("'tcp://127.0.0.1'", "auth = 'none'"), Auth::None);
    assert_eq!(of("'tcp://127.0.0.1'", "auth = 'required'"), Auth::Required);
    assert_eq!(of("'tcp://127.0.0.1', 'tcp://[::]'", ""), Auth::Required);
    assert_eq!(of("'store1'", ""), Auth::Required);
    assert_eq!(of("'store1'", "insecure = true"), Auth::None);
    assert_eq!(of("'store1'", "auth = 'none'\ninsecure = true"), Auth::None);
}

#[test]
#[expect(clippy::too_many_lines, reason = "one case after another")]
fn hosts() {
    let volume = "[[volume]]\nname = 'vol0'\nstore = 'null'\nsize = '1MiB'\n";
    let message = |hosts: &str| target(&format!("{volume}{hosts}"));
    let form = "a public key such as `rblk-target key show` or `rblk-initiator key show` prints, \
                \"rblk1:\" and 58 letters and digits";
    let host = |rest: &str| message(&format!("[[host]]\nname = 'db1'\n{rest}"));
    let with_key = |rest: &str| host(&format!("keys = ['{KEY}']\n{rest}"));
    assert_eq!(
        host(""),
        format!(
            "t.toml:6:1: host[0].keys: missing; write a list of one or more, each {form}\n\
             t.toml:6:1: host[0].volumes: missing; write a list of one or more, each a volume and what the host may \
             do, such as \"vol0:rw\", \"logs:ro\" or \"*:rw\""
        )
    );
    let mistyped = KEY.replace("n4ja", "n4jb");
    assert_eq!(
        host(&format!("keys = ['{mistyped}']\nvolumes = ['vol0:rw']")),
        format!(
            "t.toml:8:9: host[0].keys[0] = \"{mistyped}\": the key is mistyped: its checksum does not fit. \
             Copy it once more; write {form}"
        )
    );
    // A secret key that stands here by mistake must not get into a log.
    for keys in ["['rblk1-secret:abc']", "'rblk1-secret:abc'"] {
        let error = host(&format!("keys = {keys}\nvolumes = ['vol0:rw']"));
        assert!(error.contains("= (a secret key): ") && !error.contains("abc"), "{error}");
    }
    assert_eq!(
        with_key("volumes = ['vol0']"),
        "t.toml:9:12: host[0].volumes[0] = \"vol0\": no \":rw\" or \":ro\" behind the name of the volume; \
         write a volume and what the host may do, such as \"vol0:rw\", \"logs:ro\" or \"*:rw\""
    );
    assert_eq!(
        with_key("volumes = ['*:ro', 'vol1:rw']"),
        "t.toml:9:20: host[0].volumes[1] = \"vol1:rw\": there is no volume \"vol1\"; the volumes are vol0"
    );
    assert_eq!(
        target(&format!("[[host]]\nname = 'a'\nkeys = ['{KEY}']\nvolumes = ['v:rw']")),
        "t.toml:5:12: host[0].volumes[0] = \"v:rw\": there is no volume \"v\"; \
         write its [[volume]], remove this right, or name every volume by \"*\""
    );
    assert_eq!(
        with_key("volumes = ['vol0:rw', 'vol0:ro']"),
        "t.toml:9:23: host[0].volumes[1] = \"vol0:ro\": the host has another right to the same volume \
         (at t.toml:9:12); remove one of them"
    );
    let two = with_key(&format!(
        "volumes = ['vol0:rw']\n[[host]]\nname = 'db1'\nkeys = ['{KEY}']\nvolumes = ['*:ro']"
    ));
    assert_eq!(
        two,
        format!(
            "t.toml:11:8: host[1].name = \"db1\": host[0] has the same name (at t.toml:7:8); \
             rename one of them, or give one of them both keys\n\
             t.toml:12:9: host[1].keys[0] = \"{KEY}\": a key belongs to one host, and host[0] has it \
             (at t.toml:8:9); make a key on each host with `rblk-initiator key new`"
        )
    );
    assert_eq!(
        host(&format!("keys = ['{KEY}', '{KEY}']\nvolumes = ['*:rw']")),
        format!(
            "t.toml:8:77: host[0].keys[1] = \"{KEY}\": the same value as host[0].keys[0]; remove one of them"
        )
    );
    assert_eq!(
        host("keys = ['a', 'b', 'c']\nvolumes = ['*:rw']"),
        "t.toml:8:8: host[0].keys: 3 values, the limit is 2; remove some of them"
    );
    assert_eq!(
        with_key("volumes = ['*:rw']\nconnections_max = 1"),
        "t.toml:10:19: host[0].connections_max = 1: less than 2; write a whole number from 2 to 65536"
    );
}

#[test]
#[expect(clippy::too_many_lines, reason = "one case after another")]
fn mounts() {
    assert_messages(
        mount,
        &[
            (
                "queues = 64",
                "m.toml:3:10: queues = 64: more than 63; write a whole number from 1 to 63",
            ),
            (
                "queues = 4\nqueue_depth = 1024\nmax_io = '4MiB'",
                "m.toml:5:10: max_io = \"4MiB\": queues x queue_depth x max_io = 4 x 1024 x 4MiB = 16GiB of \
                 buffers, the limit is 8GiB; lower max_io to \"2MiB\", or queues or queue_depth",
            ),
            (
                "queues = 32\nlanes = 4",
                "m.toml:4:9: lanes = 4: queues x lanes = 32 x 4 = 128 QPs, the limit of a mount is 63; \
                 lower lanes to 1, or queues to 15",
            ),
            (
                // The last number is reserved.
                "queues = 16\nlanes = 4",
                "m.toml:4:9: lanes = 4: queues x lanes = 16 x 4 = 64 QPs, the limit of a mount is 63; \
                 lower lanes to 3, or queues to 15",
            ),
            (
                "queues = 32\nlanes = 2",
                "m.toml:4:9: lanes = 2: queues x lanes = 32 x 2 = 64 QPs, the limit of a mount is 63; \
                 lower lanes to 1, or queues to 31",
            ),
            (
                "fail_after = 'never'",
                "m.toml:3:14: fail_after = \"never\": not a number with a unit; \
                 write a duration from \"0s\" to \"30days\"",
            ),
            (
                "detect = '1ms'",
                "m.toml:3:10: detect = \"1ms\": less than 100ms; write a duration from \"100ms\" to \"5m\"",
            ),
            (
                "device_id = -1",
                "m.toml:3:13: device_id = -1: less than 0; write a whole number from 0 to 1048575",
            ),
            (
                "retain = '1KiB'",
                "m.toml:3:10: retain = \"1KiB\": not a multiple of 4KiB; \
                 write a multiple of 4KiB from \"0B\" to \"64GiB\"",
            ),
            (
                "on_loss = 'never'",
                "m.toml:3:11: on_loss = \"never\": not one of the choices; write \"once\" or \"until-remount\"",
            ),
            (
                "on_loss = true",
                "m.toml:3:11: on_loss = true: true or false, not a string; write \"once\" or \"until-remount\"",
            ),
            (
                "read_only = 1",
                "m.toml:3:13: read_only = 1: a number, not true or false; write true or false",
            ),
            (
                "digest = 'crc32c'\nmax_io = '2MiB'",
                "m.toml:3:10: digest = \"crc32c\": max_io = \"2MiB\" is more than \"1MiB\"; \
                 lower max_io to \"1MiB\", or set digest to \"auto\"",
            ),
            (
                "digest = 'crc32c'\nshared_memory = ['/dev/shm/a']",
                "m.toml:3:10: digest = \"crc32c\": the digest of a READ travels behind its data, and in shared_memory \
                 there is data of programs behind it; set digest to \"auto\", which is \"off\" here, or remove \
                 shared_memory",
            ),
            (
                "shared_memory = ['memory']",
                "m.toml:3:18: shared_memory[0] = \"memory\": not absolute; write an absolute path of a file of tmpfs or \
                 hugetlbfs, such as \"/dev/shm/database\"",
            ),
            (
                "digest = 'on'",
                "m.toml:3:10: digest = \"on\": not one of the choices; write \"auto\", \"crc32c\" or \"off\"",
            ),
            (
                "shared = true\nread_only = true",
                "m.toml:3:10: shared = true: a read-only mount never excludes other hosts, so shared has no effect; \
                 remove shared or read_only",
            ),
            (
                "retain = '8MiB'\nshared = true",
                "m.toml:3:10: retain = \"8MiB\": after a loss, writing retained data again could overwrite newer \
                 data of another host; remove retain or shared",
            ),
            (
                "failback = '2days'",
                "m.toml:3:12: failback = \"2days\": more than 1day; write a duration from \"0s\" to \"1day\"",
            ),
            (
                "wait = 5",
                "m.toml:3:8: wait = 5: a number without a unit; write a duration from \"0s\" to \"30days\"",
            ),
            (
                "encrypt = 'required'",
                "m.toml:3:11: encrypt = \"required\": the keys of encryption come from authentication, and there are \
                 no target_keys; add target_keys = [\"rblk1:...\"]; `rblk-target key show` prints the key",
            ),
            (
                "key_file = '/root/host.key'",
                "m.toml:3:12: key_file = \"/root/host.key\": without target_keys nobody asks for the key of this \
                 host; add target_keys = [\"rblk1:...\"], or remove key_file; `rblk-target key show` prints the key",
            ),
            (
                "target_keys = []",
                "m.toml:3:15: target_keys = []: empty; write a list of one or more, each a public key such as \
                 `rblk-target key show` or `rblk-initiator key show` prints, \"rblk1:\" and 58 letters and digits",
            ),
            (
                "digest = 'md5'",
                "m.toml:3:10: digest = \"md5\": not one of the choices; write \"auto\", \"crc32c\" or \"off\"",
            ),
            (
                "take_over = true",
                "m.toml:3:1: take_over: unknown key; the known keys are target, volume, queues, lanes, queue_depth, max_io, \
                 digest, shared_memory, read_only, shared, retain, on_loss, device_id, reconnect_delay, fail_after, detect, connect_timeout, \
                 failback, paths, wait, host_name, target_keys, key_file, spin, encrypt, relaxed_ordering, tos, ack_timeout",
            ),
        ],
    );
}

/// All faults at once, in the order of the file.
#[test]
fn several_faults() {
    assert_eq!(
        target("spin = 1\narena = true\ninline = 'x'"),
        "t.toml:2:8: spin = 1: a number without a unit; write \"adaptive\", \"always\" or a duration from \"0s\" to \
         \"10ms\"\n\
         t.toml:3:9: arena = true: true or false, not a size; write a multiple of 4KiB from \"1MiB\" to \"1TiB\"\n\
         t.toml:4:10: inline = \"x\": not a number with a unit; write a multiple of 512B from \"0B\" to \"16KiB\""
    );
}

/// A key of a former version changes nothing, and is told.
#[test]
fn retired_keys() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let text = "target = ['tcp://store1']\nvolume = 'v'\n";
    std::fs::write(file.path(), format!("{text}pin_queues = false\n")).unwrap();
    let config = MountConfig::load(file.path()).unwrap();
    assert_eq!(config, MountConfig::parse(text, "m.toml").unwrap());
    assert_eq!(
        MountConfig::warnings(file.path()),
        [format!(
            "{}: pin_queues has no effect since version 0.1.0: the thread of each hardware queue runs on the CPUs \
             whose requests the queue serves; remove the line",
            file.path().display()
        )]
    );
    std::fs::write(file.path(), text).unwrap();
    assert!(MountConfig::warnings(file.path()).is_empty());
}

/// A value of a flag has the rule and the message of its key. The flag is its place.
#[test]
fn flags() {
    let keys = MountConfig::keys();
    let key = |name: &str| keys.key(name).unwrap();
    let mut flags = FlagLayer::default();
    flags.set_argument("target", vec!["tcp://store1"]);
    flags.set_argument("volume", "v");
    flags.set(key("max_io"), "--max-io", ["3MiB"]);
    flags.set(key("queues"), "--queues", ["x"]);
    flags.set(key("shared_memory"), "--shared-memory", ["/dev/shm/a", "/dev/shm/a"]);
    flags.set(key("target_keys"), "--target-key", ["rblk1-secret:abc"]);
    let error = MountConfig::load_with(None, &flags).unwrap_err().to_string();
    let (list, secret) = error.split_once("--target-key").unwrap();
    assert_eq!(
        list,
        "--max-io 3MiB: not a power of two; write a power of two from \"4KiB\" to \"4MiB\", such as \"2MiB\" or \
         \"4MiB\"\n\
         --queues x: a string, not a number; write a whole number from 1 to 63\n\
         --shared-memory /dev/shm/a: the same value as shared_memory[0]; remove one of them\n"
    );
    assert!(secret.starts_with(" (a secret key): ") && !secret.contains("abc"), "{secret}");
}

/// Values of a command line have no place in a file. The same rules apply to them.
#[test]
fn command_line() {
    let mut config = MountConfig::new("tcp://store1", "v");
    config.max_io = ByteSize(3 << 20);
    assert_eq!(
        config.validate().unwrap_err().to_string(),
        "max_io = \"3MiB\": not a power of two; write a power of two from \"4KiB\" to \"4MiB\", \
         such as \"2MiB\" or \"4MiB\""
    );
    assert_eq!(
        MountConfig::default().validate().unwrap_err().to_string(),
        "volume = \"\": empty; write 1 to 64 letters, digits, \".\", \"_\" or \"-\", \
         not starting with \".\" or \"-\"\n\
         target: missing; write a list of one or more, each an address such as \"rdma://192.0.2.1:7720\" \
         or \"tcp://[2001:db8::1]:7721\""
    );
    let mut config = MountConfig::new("store1", "v");
    config.fail_after = Some(Duration::from_secs(0));
    config.validate().unwrap();

    let mut config = TargetConfig {
        listen: vec!["rdma://[::]".to_owned()],
        volumes: vec![VolumeConfig::null("n", ByteSize(1 << 30)), VolumeConfig::file("f", "/f")],
        ..TargetConfig::default()
    };
    config.validate().unwrap();
    config.volumes[0].name = "f".to_owned();
    assert_eq!(
        config.validate().unwrap_err().to_string(),
        "volume[1].name = \"f\": volume[0] has the same name; rename one of them"
    );
    assert_eq!(
        "disk".parse::<StoreKind>().unwrap_err(),
        "write \"file\", \"rbd\", \"memory\" or \"null\""
    );
}

#[test]
fn unreadable() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("target.toml");
    let error = TargetConfig::load(&path).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "{}: cannot read: No such file or directory (os error 2); create the file, or name another one with --config",
            path.display()
        )
    );
    assert_eq!(error.exit().code(), 2);

    std::fs::write(&path, "#".repeat((1 << 20) + 1)).unwrap();
    assert_eq!(
        TargetConfig::load(&path).unwrap_err().to_string(),
        format!("{}: cannot read: larger than 1MiB, so it is not a configuration", path.display())
    );

    std::fs::write(&path, b"name = '\xff'").unwrap();
    assert!(matches!(TargetConfig::load(&path), Err(ConfigError::Read { .. })));
}
