//! The Debian packages that building and testing the workspace needs, and why. The lab's are in
//! `lab/host.rs`.

use crate::lab::host::Package;

/// What cargo needs of the system.
pub(crate) const BUILD: &[Package] = &[
    Package { name: "gcc", why: "links every program" },
    Package { name: "libc6-dev", why: "the C library to link with" },
    Package { name: "make", why: "builds rdma-core for the crate ibverbs-sys, under cmake" },
    Package { name: "cmake", why: "configures rdma-core for the crate ibverbs-sys" },
    Package { name: "python3", why: "rdma-core's cmake files ask for it" },
    Package { name: "pkg-config", why: "rdma-core's cmake files find libnl by it" },
    Package { name: "libnl-3-dev", why: "rdma-core uses netlink" },
    Package { name: "libnl-route-3-dev", why: "rdma-core uses netlink's routes" },
    Package { name: "libclang-dev", why: "bindgen reads the verbs headers for ibverbs-sys" },
    Package { name: "libibverbs-dev", why: "the verbs library to link with" },
    Package { name: "librdmacm-dev", why: "the connection manager's library to link with" },
];

/// What tests with a Ceph cluster start.
pub(crate) const CEPH: &[Package] = &[
    Package { name: "ceph-mon", why: "the monitor of a cluster for tests" },
    Package { name: "ceph-osd", why: "its OSDs" },
    Package { name: "ceph-common", why: "ceph and rbd make users and images" },
    Package { name: "librbd1", why: "the target opens images by it" },
];

/// What tests on this machine start.
pub(crate) const TEST: &[Package] = &[
    Package { name: "strace", why: "kills a program at a system call of its start" },
    Package { name: "valgrind", why: "counts the instructions of a request" },
    Package { name: "systemd", why: "systemd-analyze judges the sandbox of the units" },
    Package { name: "prometheus", why: "promtool judges metrics and alerts" },
    Package { name: "chromium-headless-shell", why: "shows the live page" },
    Package {
        name: "g++",
        why: "compiles libFuzzer, for `cargo xtask test --long`, and the header of librblk",
    },
    Package { name: "fio", why: "verifies a volume through the engine of fio" },
    Package { name: "groff-base", why: "shows the man pages, and says what is wrong with them" },
    Package { name: "binutils", why: "nm and readelf show what librblk exports" },
    Package { name: "mmdebstrap", why: "a host that boots from a volume, for --long" },
];
