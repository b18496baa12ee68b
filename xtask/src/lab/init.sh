#!/bin/busybox sh
# The first process of the lab's guest. Stage 1 runs in the initramfs: it loads the modules of the
# boot and builds the root. Stage 2 runs in that root: it makes the RDMA device, mounts the scratch
# disk, runs the command, reports its status and powers off.
#
# The root is a tmpfs into which every top-level directory of the host's (9p) is bound. So the
# guest's own mount points (/scratch, /dev, ...) leave no trace on the host.
#
# Records to the host go over the port named rblk.out; src/lab/record.rs says how.

bb=/bin/busybox
[ "$1" = stage2 ] && bb=/run/lab/busybox

say() { echo "lab-init: $*" >/dev/console; }

record() { printf '\036%s %s\n' "$NONCE" "$*"; }

# The host answers the last record when it has written out all that came before it.
finish() {
    say "$*"
    if [ -n "$port" ]; then
        # Opened once for both ways: what comes to a closed port is dropped.
        exec 3<>"$port"
        record "$@" >&3
        $bb timeout 20 $bb head -n 1 <&3 >/dev/null
    fi
    $bb poweroff -f
    while :; do $bb sleep 1; done
}

fail() { finish fail "$*"; }

find_port() {
    for dir in /sys/class/virtio-ports/*; do
        [ "$($bb cat "$dir/name" 2>/dev/null)" = rblk.out ] && port=/dev/${dir##*/}
    done
    [ -n "$port" ] || say "there is no port rblk.out"
}

load() {
    while read -r module; do
        $bb insmod "/modules/$module" || fail "cannot load the module $module"
    done <"/modules/$1.order"
}

stage1() {
    $bb mount -t proc proc /proc
    $bb mount -t sysfs sysfs /sys
    $bb mount -t devtmpfs devtmpfs /dev
    find_port
    if [ "$MODE" = probe ]; then
        record start >"$port"
        finish exit 0
    fi
    load boot
    [ -z "$RDMA" ] || load rdma

    # msize: fewer round trips. cache=loose: pages stay when a file is closed, else every exec reads
    # its program and libraries again (0.6 s for /bin/true under emulation, 0.09 s so). What the host
    # changes during a run may go unseen.
    $bb mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,cache=loose,posixacl root /host ||
        fail "cannot mount the host's files over 9p"
    $bb mount -t tmpfs -o mode=755 root /newroot
    cd /newroot || fail "no /newroot"
    for path in /host/* /host/.[!.]*; do
        name=${path#/host/}
        case $name in dev | proc | sys | run | tmp | scratch | lost+found) continue ;; esac
        if [ -L "$path" ]; then
            $bb cp -a "$path" "$name"
        elif [ -d "$path" ]; then
            $bb mkdir "$name" && $bb mount -o bind "$path" "$name"
        elif [ -f "$path" ]; then
            : >"$name" && $bb mount -o bind "$path" "$name"
        fi || fail "cannot bring $name of the host into the root"
    done
    $bb mkdir dev proc sys run tmp scratch
    $bb mount -t tmpfs -o mode=755 run run
    $bb mount -t tmpfs -o mode=1777 tmp tmp
    # What the command needs below directories that are the guest's own.
    while read -r path; do
        [ -z "$path" ] || { $bb mkdir -p ".$path" && $bb mount -o bind "/host$path" ".$path"; } ||
            fail "cannot bring $path of the host into the root"
    done <<EOF
$SHARES
EOF
    [ -d usr/lib/modules ] || $bb mkdir -p usr/lib/modules
    $bb mount -t tmpfs modules usr/lib/modules
    release=$($bb uname -r)
    $bb mkdir "usr/lib/modules/$release"
    $bb mount -o bind "/host$MODULES" "usr/lib/modules/$release" ||
        fail "cannot bind the modules from $MODULES"
    $bb mkdir run/lab
    $bb cp /bin/busybox /init /lab/task run/lab/
    [ ! -e /lab/command ] || $bb cp /lab/command run/lab/
    for dir in proc sys dev; do
        $bb mount -o move "/$dir" "$dir"
    done
    exec $bb switch_root /newroot /run/lab/busybox sh /run/lab/init stage2
}

stage2() {
    find_port
    $bb mkdir -p /dev/shm /dev/pts
    $bb mount -t tmpfs -o mode=1777 shm /dev/shm
    $bb mount -t devpts -o mode=620,ptmxmode=666 devpts /dev/pts
    $bb ln -sf /proc/self/fd /dev/fd
    $bb ln -sf fd/0 /dev/stdin
    $bb ln -sf fd/1 /dev/stdout
    $bb ln -sf fd/2 /dev/stderr
    $bb mount -t debugfs debugfs /sys/kernel/debug
    $bb mount -t tracefs tracefs /sys/kernel/tracing
    $bb mount -t configfs configfs /sys/kernel/config
    $bb mount -t cgroup2 cgroup2 /sys/fs/cgroup
    $bb hostname rblk-lab
    ulimit -l unlimited
    ulimit -n 65536
    $bb ifconfig lo 127.0.0.1 up
    # By their paths, as this shell prefers its own applets, and its ip knows little.
    ip=/sbin/ip rdma=/sbin/rdma
    [ -x "$rdma" ] || rdma=/usr/bin/rdma

    if [ -n "$RDMA" ]; then
        # Soft-RoCE on lo does not resolve with rdma_cm. 4500 makes room for a RoCE MTU of 4096.
        { $ip link add v0 mtu 4500 type dummy &&
            $ip addr add "$RDMA/24" dev v0 &&
            $ip link set v0 up &&
            $rdma link add rxe0 type rxe netdev v0; } >/run/lab/rdma.log 2>&1 ||
            fail "cannot make rxe0: $($bb tr '\n' ' ' </run/lab/rdma.log)"
    fi
    if [ -n "$SCRATCH" ]; then
        $bb mount -t ext4 -o noatime /dev/vda "$SCRATCH" || fail "cannot mount the scratch disk"
    fi

    # Through a pipe, as a port has room for one opener and a command may open /dev/stdout again.
    $bb mkfifo /run/lab/out
    record start >"$port"
    $bb cat /run/lab/out >"$port" &
    drain=$!
    /bin/sh /run/lab/command </dev/null >/run/lab/out 2>&1
    status=$?

    # What the command left running holds the pipe open; kernel threads have no exe.
    for proc in /proc/[0-9]*; do
        pid=${proc#/proc/}
        [ "$pid" != 1 ] && [ "$pid" != "$drain" ] && [ -e "$proc/exe" ] && kill -9 "$pid"
    done 2>/dev/null
    tries=0
    while kill -0 "$drain" 2>/dev/null && [ "$tries" -lt 100 ]; do
        $bb usleep 50000
        tries=$((tries + 1))
    done
    kill -9 "$drain" 2>/dev/null
    wait "$drain" 2>/dev/null

    # All binds are of one file system, so this writes out all that the host shall keep.
    $bb sync -f /usr 2>/dev/null || $bb sync
    finish exit "$status"
}

if [ "$1" = stage2 ]; then
    . /run/lab/task
    stage2
else
    . /lab/task
    stage1
fi
