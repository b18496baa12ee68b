#!/bin/bash
# The work of a host that systemd boots, for the test `packages`: what an administrator does with the packages, from the
# installation to their purge, over four boots. `guest: please ...` asks the test for the target on its machine.
#
# On this host are both ends: a target, and the mounts `data` (of docs/install.md) and `scratch` of its volumes. The mount
# `far` has its target outside, which comes late and dies when the test likes.
set -uE
export DEBIAN_FRONTEND=noninteractive
state=/var/lib/packages-work
mkdir -p $state
cd /root || exit 1
exec 3>&1

say() { echo "guest: $*"; }
die() {
    trap - ERR
    exec 1>&3
    say "fault: $*"
    systemctl --no-pager --failed
    journalctl --no-pager -b -n 120 -o short-monotonic
    say "failed: $*"
    sleep 2 # The console is slow.
    systemctl --force --force poweroff
    exit 1
}
trap 'die "line $LINENO: $BASH_COMMAND"' ERR
# show COMMAND...: as it looks.
show() {
    echo "# $*"
    "$@" 2>&1 | cat
}
# must COMMAND...: shown, and it works.
must() {
    echo "# $*"
    "$@" || die "$*: $?"
}
# within SECONDS COMMAND...: the command works in that time.
within() {
    local most=$1 end
    shift
    end=$((SECONDS + most))
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || die "not within $most s: $*"
        sleep 1
    done
}
word() { sed -n "s/.*\<$1=\([^ ]*\).*/\1/p" /proc/cmdline; }

# The words of the documents.
. /usr/local/lib/typed.sh

pid() { systemctl show -P MainPID "$1"; }
state_of() { rblk-initiator status "$1" --output json | sed -n 's/.*"state": *"\([^"]*\)".*/\1/p' | head -1; }
process_of() { rblk-initiator status "$1" --output json | sed -n 's/.*"pid": *\([0-9]*\).*/\1/p' | head -1; }
is() { [ "$(state_of "$1")" = "$2" ]; }
on() { [ "$(systemctl is-active "$1")" = active ]; }
# disk VOLUME: the disk of a volume. A mount that is ready has a disk; udev names it a moment later.
disk() {
    udevadm settle
    readlink -e "/dev/rblk/"*"/$1"
}
# Everything of this host that a package may have made, but logs, caches and the book of dpkg.
inventory() {
    find / -xdev \( -path /packages -o -path /var/log -o -path /var/cache -o -path /var/lib/dpkg -o -path /var/lib/apt \
        -o -path /var/lib/systemd -o -path /var/lib/containers -o -path $state -o -path /root -o -path /tmp -o -path /var/tmp \) -prune -o -print
    find /run /dev -name '*rblk*' -not -path '/run/systemd/*'
    getent passwd | cut -d: -f1 | sed 's/^/user /'
    getent group | cut -d: -f1 | sed 's/^/group /'
    systemctl list-unit-files --no-legend | awk '{ print "unit", $1, $2 }'
}
# The secrets and records that removing keeps.
kept() { sha256sum /etc/rblk/target.key /etc/rblk/host.key /etc/rblk/target.toml /etc/rblk/target.d/* /etc/rblk/mounts.d/*; }
# The data is what was written and synced.
verify() { (cd "$1" && must sha256sum -c --quiet sums); }
fill() {
    for n in 1 2 3; do
        head -c 2000000 /dev/urandom >"$1/f$n"
    done
    (cd "$1" && sha256sum f? >sums)
    sync -f "$1"
}

# at HOST COMMAND: a command of README.md, at a host that is a namespace of the network.
at() {
    local host=$1 text
    text=$(known "$2")
    # As README.md says of hosts without an RDMA device.
    text=${text/ 192.0.2.1 / tcp:\/\/192.0.2.1 }
    commands=$((commands + 1))
    echo "$host# $text"
    case $text in
    *" serve "*)
        nsenter --net=/run/netns/"$host" bash -c "exec $text" 2>/run/served &
        served=$!
        within 30 rblk-target status
        ;;
    *) nsenter --net=/run/netns/"$host" bash -c "$text" || die "$text: $?" ;;
    esac
}
# walk: the first five minutes of README.md, with two namespaces as the hosts.
walk() {
    local commands=0 served host
    for host in store1 client1; do
        ip netns add $host
        ip -n $host link set lo up
    done
    ip link add to1 netns store1 type veth peer name to1 netns client1
    ip -n store1 addr add 192.0.2.1/24 dev to1
    ip -n client1 addr add 192.0.2.2/24 dev to1
    for host in store1 client1; do ip -n $host link set to1 up; done
    cd /packages/1
    SECONDS=0
    . /usr/local/lib/walk
    say "walk: $commands commands, $SECONDS s"
    cd /root
    df -h /mnt
    findmnt /mnt
    show rblk-initiator list
    fill /mnt
    umount /mnt
    must rblk-initiator umount vol0
    must rblk-target drain
    wait $served
    ip netns del store1
    ip netns del client1
    rm -rf /srv/vol0.img /var/lib/rblk/*
}

install() {
    inventory | sort >$state/before
    walk
    must apt-get install -y -qq /packages/1/*.deb
    show getent passwd rblk
    show stat -c '%A %U:%G %n' /etc/rblk /etc/rblk/target.d /etc/rblk/*.key /run/rblk /run/rblk/mounts
    [ "$(stat -c %U:%a /etc/rblk/target.key)" = rblk:600 ] || die "the key of the target"
    [ "$(stat -c %U:%a /etc/rblk/host.key)" = root:600 ] || die "the key of the host"
    local unit
    for unit in rblk-target.service rblk-mount@data.service rblk-automount.target; do
        [ "$(systemctl is-enabled $unit)" = disabled ] || die "$unit is enabled"
        ! on $unit || die "$unit runs"
    done
    must dpkg --verify rblk-target rblk-initiator rblk-client rblk-initiator-boot
    must systemd-analyze verify --man=no rblk-target.service rblk-mount@data.service rblk-automount.target
    lsinitramfs /boot/initrd.img-* | grep usr/lib/rblk/root/usr/bin/ || die "the initramfs has no rblk"
    sha256sum /etc/rblk/*.key >$state/keys
    must apt-get install -y -qq --reinstall /packages/1/rblk-{target,initiator}_*.deb
    must sha256sum -c --quiet $state/keys
}

# configure: docs/install.md, then two more mounts by the unit for all.
configure() {
    . /usr/local/lib/typed
    # No volume in memory: a target that has one is not upgraded.
    truncate -s 64M /srv/scratch.img
    truncate -s 16M /srv/vm.img
    chown rblk: /srv/*.img
    file /etc/rblk/target.d/scratch.toml '[[volume]]
name = "scratch"
store = "file"
path = "/srv/scratch.img"
[[volume]]
name = "vm"
store = "file"
path = "/srv/vm.img"'
    must rblk-target host add client1 --key "$(rblk-initiator key show)" --volume vol0:rw --volume scratch:rw \
        --volume vm:rw
    must systemctl reload rblk-target
    file /etc/rblk/mounts.d/scratch.toml $'target = ["tcp://192.0.2.1"]\nvolume = "scratch"\ntarget_keys = ["@TARGET_KEY@"]'
    file /etc/rblk/mounts.d/far.toml "target = [\"$(word rblk_far)\"]
volume = \"far\"
target_keys = [\"$(word rblk_far_key)\"]"
    say "please let $(rblk-initiator key show) in"
    must systemctl daemon-reload
    must systemctl enable --now rblk-automount.target
    within 100 is far connected
    must mkfs.ext4 -q -L far "$(disk far)"
    line /etc/fstab "LABEL=far /far ext4 _netdev,nofail,x-systemd.automount,x-systemd.requires=rblk-mount@far.service,x-systemd.mount-timeout=30s 0 0"
    mkdir /far
    must systemctl daemon-reload
    must systemctl start far.automount
    fill /data
    fill /far
}

look() {
    show rblk-initiator list
    show systemctl status --no-pager -l rblk-target rblk-mount@data rblk-automount.target far.mount
    show journalctl --no-pager -u rblk-target -u rblk-mount@data -n 20
    show lsblk -o +SERIAL,MODEL
    show udevadm info /dev/ublkb0
    show ls -l /dev/rblk/client1 /dev/disk/by-id
    show blkid
    # The disks are left alone by multipathd, and are drives for udisks.
    multipath -v3 2>&1 | grep -E "ublkb|$(basename "$(disk vol0)")" | sed 's/^/multipath: /'
    multipath -v3 2>&1 | grep -q "$(basename "$(disk vol0)"): device node name blacklisted" || die "multipath takes a disk"
    show udisksctl status
    udisksctl status | grep -q "vol0 .*$(basename "$(disk vol0)")" || die "udisks does not know the disk"
    show systemctl list-dependencies --no-pager rblk-automount.target
    # The exposure that the units have reached, times ten.
    must systemd-analyze security --no-pager --threshold=16 rblk-target.service
    must systemd-analyze security --no-pager --threshold=41 rblk-mount@data.service
    local unit
    for unit in rblk-target rblk-mount@data rblk-mount@far rblk-mount@scratch; do
        on $unit || die "$unit does not run"
        [ -z "$(journalctl --no-pager -q -o cat -p err -u $unit)" ] || die "$unit logs errors"
    done
    [ "$(lsblk -ndo MODEL /dev/rblk/client1/vol0)" = vol0 ] || die "the model of the disk"
    must rblk-target doctor
    # `doctor` of a mount host judges the host, too.
    show rblk-initiator doctor
}

# verify_all_the_time DIRECTORY: fio writes and verifies, again and again.
verify_all_the_time() {
    until [ -e /run/enough ]; do
        fio --name=v --filename="$1/fio" --size=8M --rw=randrw --bs=16k --verify=crc32c --verify_fatal=1 --direct=1 \
            --ioengine=libaio --iodepth=8 --output="/run/fio-${1#/}" || return 1
        echo "$1" >>/run/rounds
    done
}
rounds() { grep -c "^$1\$" /run/rounds; }

# upgrade: the packages of a higher version, while both ends are in use.
upgrade() {
    must rblk-initiator vhost --socket /run/vm1.sock --name vm1 --target-key "$(rblk-target key show)" tcp://192.0.2.1 vm
    local unit vm data far
    vm=$(process_of vm1)
    : >/run/rounds
    verify_all_the_time /data &
    data=$!
    verify_all_the_time /far &
    far=$!
    within 60 grep -q /data /run/rounds
    apt-get install -y -qq /packages/2/*.deb >/run/upgrade 2>&1 || die "$(cat /run/upgrade)"
    cat /run/upgrade
    local at=$((SECONDS + 60)) so_far
    so_far=$(rounds /data)
    until [ "$(rounds /data)" -gt $((so_far + 1)) ]; do
        [ $SECONDS -lt $at ] || die "fio makes no progress"
        sleep 1
    done
    : >/run/enough
    wait $data || die "fio: $(cat /run/fio-data)"
    wait $far || die "fio: $(cat /run/fio-far)"
    say "fio verified: $(rounds /data) rounds on /data, $(rounds /far) on /far"
    for unit in rblk-target rblk-mount@data rblk-mount@far rblk-mount@scratch; do
        on $unit || die "$unit does not run after the upgrade"
        cmp -s "/proc/$(pid $unit)/exe" /usr/bin/rblk-targetd || cmp -s "/proc/$(pid $unit)/exe" /usr/bin/rblk-initiatord ||
            die "$unit runs the old program: $(ls -l "/proc/$(pid $unit)/exe")"
        [ "$(systemctl show -P NRestarts $unit)" = 0 ] || die "$unit was restarted"
        [ -z "$(journalctl --no-pager -q -o cat -p err -u $unit)" ] || die "$unit logs errors"
    done
    # The disk of a guest stays with its program, and that is said and is no failure.
    [ "$(process_of vm1)" = "$vm" ] || die "the program of the guest's disk ended"
    grep -q 'WARN vm1: .*cannot be handed over' /run/upgrade || die "no word about vm1"
    ! grep -q 'not every mount was upgraded' /run/upgrade || die "the upgrade claims that it failed"
    must rblk-initiator umount vm1
    verify /data
    verify /far
    [ "$(dpkg-query -W -f '${Version}\n' 'rblk-*' | sort -u | grep -c next)" = 1 ] || die "versions"
    show dpkg-query -W 'rblk-*'
}

# refused: an upgrade of a target that the new program could not serve.
refused() {
    local before
    before=$(pid rblk-target)
    echo 'no_such_key = 1' >>/etc/rblk/target.toml
    must apt-get install -y -qq --reinstall /packages/2/rblk-target_*.deb 2>&1 | tee /run/refused
    sed -i '/no_such_key/d' /etc/rblk/target.toml
    grep -q 'WARNING: the running target was not upgraded' /run/refused || die "no warning"
    [ "$(pid rblk-target)" = "$before" ] && on rblk-target || die "the target"
    verify /data
}

# after_boot: the services came up by themselves, and nothing failed but what may.
after_boot() {
    show systemd-analyze
    must sha256sum -c --quiet $state/kept
    within 100 timeout 60 ls /data/sums
    verify /data
    local unit
    for unit in rblk-target rblk-mount@data rblk-mount@scratch; do
        on $unit || die "$unit does not run"
    done
}

# unsynced DIRECTORY: data that is not on the disk.
unsynced() { head -c 3000000 /dev/urandom >"$1/unsynced"; }

# A file system of a layer: has_data DEVICE [NEW] mounts it, and verifies its data, which NEW writes first.
has_data() {
    must mount "$1" /layer
    if [ "${2-}" = new ]; then
        fill /layer
        umount /layer
        must mount "$1" /layer
    fi
    verify /layer
    umount /layer
}
# used STORE: the blocks of 512 bytes that a file uses, or VDO.
used() {
    case $1 in
    vdo) dmsetup status --target vdo | awk '{ print 8 * $(NF - 1) }' ;;
    *) stat -c %b "$1" ;;
    esac
}
# passes_discards DEVICE STORE: fstrim of a file system makes its store smaller.
passes_discards() {
    local before after
    must mount "$1" /layer
    dd if=/dev/urandom of=/layer/big bs=1M count=16 conv=fsync status=none
    before=$(used "$2")
    rm /layer/big
    sync -f /layer
    must fstrim -v -l 512M /layer
    after=$(used "$2")
    umount /layer
    say "$2: $before blocks, and $after after fstrim"
    [ "$after" -lt $((before - 20000)) ] || die "$1 passes no discards"
}
# volumes NAME...: volumes of this host's target, on files.
volumes() {
    local name
    for name; do
        truncate -s 128M "/srv/$name.img"
        chown rblk: "/srv/$name.img"
        must rblk-target volume add "$name" --file "/srv/$name.img" --persist
    done
}
# mounted VOLUME [FLAG...]: mounts a volume of this host's target, and waits for its names.
mounted() {
    must rblk-initiator mount tcp://192.0.2.1 --target-key "$(rblk-target key show)" "$@"
    udevadm settle
}
# Another target on this host: the other half of a mirror.
other_target() {
    systemctl reset-failed store2 2>/dev/null || true
    must systemd-run -q --unit=store2 rblk-target serve --config /run/store2/target.toml
    within 60 rblk-target status --control-socket /run/store2/sock
}

try_luks() {
    luks_1
    has_data /dev/mapper/secret new
    passes_discards /dev/mapper/secret /srv/luks.img
    ! grep -q -a lost+found /srv/luks.img || die "plain text in the store"
    cryptsetup close secret
    # By /etc/crypttab, as at boot.
    line /etc/crypttab "secret UUID=$(blkid -o value -s UUID /dev/rblk/client1/luks) none _netdev,nofail,discard"
    must systemctl daemon-reload
    must systemctl start systemd-cryptsetup@secret
    systemctl show -P After systemd-cryptsetup@secret | grep -q remote-fs-pre.target || die "closed after the mount stops"
    has_data /dev/mapper/secret
    luks_2
    rm /etc/crypttab
    must systemctl daemon-reload
    must rblk-initiator umount luks
}
try_lvm() {
    lvm_1
    has_data /dev/vg0/home new
    passes_discards /dev/vg0/home /srv/lvm.img
    ! rblk-initiator umount lvm || die "unmounted below an active volume of LVM"
    must vgchange -q -an vg0
    must rblk-initiator umount lvm
    mounted lvm
    within 30 test -e /dev/vg0/home
    has_data /dev/vg0/home
    lvm_2
    must rblk-initiator umount lvm
}
try_raid() {
    mkdir -m 700 /run/store2
    file /run/store2/target.toml "name = \"store2\"
listen = [\"tcp://127.0.0.1:7731\"]
auth = \"required\"
key_file = \"/run/store2/key\"
control_socket = \"/run/store2/sock\"
state_dir = \"/run/store2\"
arena = \"64MiB\"
[[host]]
name = \"client1\"
keys = [\"@HOST_KEY@\"]
volumes = [\"*:rw\"]
[[volume]]
name = \"half2\"
store = \"file\"
path = \"/srv/half2.img\""
    truncate -s 128M /srv/half2.img
    local key
    key=$(rblk-target key new --file /run/store2/key)
    other_target
    must rblk-initiator mount tcp://127.0.0.1:7731 half2 --target-key "$key" --fail-after 5s
    udevadm settle
    raid_1
    within 300 grep -q '\[UU\]' /proc/mdstat
    has_data /dev/md/mirror new
    must systemctl kill -s KILL store2
    must mount /dev/md/mirror /layer
    fill /layer
    within 300 grep -q '\[U_\]' /proc/mdstat
    show cat /proc/mdstat
    verify /layer
    other_target
    within 100 is half2 connected
    raid_2
    within 300 grep -q '\[UU\]' /proc/mdstat
    umount /layer
    # The other half alone has everything, too.
    must mdadm /dev/md/mirror --fail /dev/rblk/client1/half1
    has_data /dev/md/mirror
    raid_3
    must rblk-initiator umount half1
    must rblk-initiator umount half2
    must systemctl stop store2
    rm -rf /run/store2
}
try_cache() {
    cache_1
    show lsblk -t /dev/rblk/client1/slow
    test -e /sys/block/bcache0/bcache/cache || die "the cache has no disk"
    has_data /dev/bcache0 new
    passes_discards /dev/bcache0 /srv/slow.img
    cache_2
    must rblk-initiator umount slow
}
# below RECIPE VOLUME STORE: a layer below the target, whose volume is used as a disk.
below() {
    "$1_1"
    must rblk-target doctor
    mounted "$2"
    must mkfs.ext4 -q -E nodiscard "/dev/rblk/client1/$2"
    has_data "/dev/rblk/client1/$2" new
    passes_discards "/dev/rblk/client1/$2" "$3"
    must rblk-initiator umount "$2"
    "$1_2"
}
# layered: docs/layers.md, with files in the place of the disks.
layered() {
    local disk
    . <(sed -e 's#/dev/rblk/store1/#/dev/rblk/client1/#g' -e 's#/dev/sdb#/dev/loop5#g' -e 's#/dev/sdc#/dev/loop6#g' \
        -e 's#/dev/nvme0n1p3#/dev/loop7#g' /usr/local/lib/layers)
    truncate -s 128M /srv/disk5.img
    truncate -s 6G /srv/disk6.img
    # Less than 1024 buckets are too few for the kernel.
    truncate -s 640M /srv/disk7.img
    for disk in 5 6 7; do must losetup --sector-size 4096 /dev/loop$disk /srv/disk$disk.img; done
    mkdir -p /layer
    must rblk-target host add client1 --key "$(rblk-initiator key show)" --volume '*:rw'
    volumes luks lvm half1 slow
    mounted luks
    mounted lvm
    mounted half1 --fail-after 5s
    mounted slow
    local recipe
    for recipe in luks lvm raid cache; do
        try_$recipe
        say "layer $recipe"
    done
    below crypt crypt /srv/disk5.img
    say "layer crypt"
    below vdo dense vdo
    say "layer vdo"
    for disk in luks lvm half1 slow; do must rblk-target volume remove $disk --persist; done
    for disk in 5 6 7; do losetup -d /dev/loop$disk; done
    rm -rf /layer /srv/{luks,lvm,half1,half2,slow,disk5,disk6,disk7}.img /etc/cryptsetup-keys.d /etc/lvm/{backup,archive}
    kept >$state/kept
}

# contained: the recipe of docs/containers.md, with a root of the programs alone in the place of an image.
contained() {
    local recipe flags char process
    recipe=/usr/share/doc/rblk-initiator/docs/containers.md
    must systemctl stop rblk-mount@scratch
    mkdir -p /packages/box
    must /usr/lib/rblk/boot-root /packages/box
    rm -rf /packages/box/etc/rblk/*
    cd /usr/share/doc/rblk-initiator/examples/container || die "no profiles"
    char=$(awk '$2 == "ublk-char" { print $1 }' /proc/devices)
    show stat -fc %T /sys/fs/cgroup
    show cat /sys/module/apparmor/parameters/enabled
    must podman secret create rblk-host-key /etc/rblk/host.key
    flags=$(sed -n '/^podman run -d --name mount1/,/stop-timeout/p' $recipe | tr -d '\\\n"' | sed "s/.char/$char/")
    flags=${flags#podman run}
    echo "# podman run$flags"
    # A rule of devices has a space; it is a word.
    eval "podman run $(sed -E "s/--device-cgroup-rule ([bc] [0-9*]+:\* rw)/--device-cgroup-rule '\1'/g" <<<"$flags") \
        --rootfs /packages/box /usr/bin/rblk-initiator mount --foreground --target-key $(rblk-target key show) \
        tcp://192.0.2.1 scratch --name boxed" || die "podman: $?"
    within 60 is boxed connected
    show podman logs mount1
    show rblk-initiator list
    must mkfs.ext4 -q "$(disk scratch)"
    must mount "$(disk scratch)" /mnt
    fill /mnt
    # The process dies below the file system, and the same container serves on.
    process=$(process_of boxed)
    grep -E '^(Cap|Seccomp|NoNewPrivs)' "/proc/$process/status"
    kill -KILL "$process"
    within 30 sh -c '! podman inspect -f "{{.State.Running}}" mount1 | grep -q true'
    must podman start mount1
    within 60 is boxed connected
    echo 3 >/proc/sys/vm/drop_caches
    verify /mnt
    umount /mnt
    must podman stop mount1
    udevadm settle
    [ ! -e /dev/rblk/client1/scratch ] || die "the disk of the container stays"
    podman rm mount1
    podman secret rm rblk-host-key
    cd /root
    must systemctl start rblk-mount@scratch
}

removed() {
    ! must_fail=$(apt-get remove -y -qq 'rblk-*' 2>&1) || die "removed under file systems in use"
    echo "$must_fail"
    grep -q 'these mounts are in use' <<<"$must_fail" || die "no word about the mounts in use"
    verify /data
    on rblk-target || die "the target was stopped"
    # As docs/install.md says.
    must systemctl stop data.automount data.mount far.automount far.mount
    must systemctl disable --now rblk-mount@data rblk-automount.target
    sed -i '/ ext4 /d' /etc/fstab
    must systemctl daemon-reload
    within 30 test ! -e /dev/ublkb0
    must systemctl disable --now rblk-target
    must apt-get remove -y -qq 'rblk-*'
    must sha256sum -c --quiet $state/kept
    test -s /srv/vol0.img && test -d /var/lib/rblk && getent passwd rblk
    show systemctl list-unit-files --no-pager 'rblk*'
    must apt-get install -y -qq /packages/2/*.deb
    must sha256sum -c --quiet $state/kept
    must systemctl start rblk-target rblk-mount@data
    mount "$(disk vol0)" /data
    verify /data
    umount /data
    must systemctl stop rblk-mount@data rblk-target
    must apt-get purge -y -qq 'rblk-*'
}

# nothing_left MORE...: no file, user or unit of rblk but the volume, and those.
nothing_left() {
    systemctl daemon-reload
    inventory | sort >$state/after
    comm -13 $state/before $state/after | grep -vxE "/srv/vol0.img|/srv/(scratch|vm).img|/data|/far|/etc/fstab.*|/boot/.*|/etc/(passwd|group|shadow|gshadow|subuid|subgid)-" >$state/more || true
    cat $state/more
    [ ! -s $state/more ] || die "$1 leaves this"
    comm -23 $state/before $state/after >$state/less
    cat $state/less
    ! grep -v '^/run' $state/less || die "$1 takes this"
}

# by_rpm: the scripts of the other kind of package, by the rpm of this Debian.
by_rpm() {
    rm -f /srv/*.img
    must rpm -i --nodeps /packages/rblk-target-*.rpm /packages/rblk-initiator-0*.rpm
    [ "$(stat -c %U:%a /etc/rblk/target.key)" = rblk:600 ] || die "the key of the target"
    [ "$(stat -c %U:%a /etc/rblk/host.key)" = root:600 ] || die "the key of the host"
    truncate -s 64M /srv/r.img && chown rblk: /srv/r.img
    file /etc/rblk/target.toml $'arena = "64MiB"\n[[volume]]\nname = "r"\nstore = "file"\npath = "/srv/r.img"'
    must rblk-target host add client1 --key "$(rblk-initiator key show)" --volume r:rw
    file /etc/rblk/mounts.d/r.toml $'target = ["tcp://192.0.2.1"]\nvolume = "r"\ntarget_keys = ["@TARGET_KEY@"]'
    must systemctl start rblk-target rblk-mount@r
    cp -p /usr/bin/rblk-initiatord /run/before
    # Another program, which the upgrade replaces.
    cp -p /run/before /usr/bin/other
    printf other >>/usr/bin/other
    mv /usr/bin/other /usr/bin/rblk-initiatord
    must systemctl reload rblk-mount@r
    # As in an upgrade: the same scripts with the same arguments.
    must rpm -U --force --nodeps /packages/rblk-target-*.rpm /packages/rblk-initiator-0*.rpm
    on rblk-target && on rblk-mount@r && cmp "/proc/$(pid rblk-mount@r)/exe" /run/before || die "the mount was not upgraded"
    mkfs.ext4 -q "$(disk r)" && mount "$(disk r)" /far
    ! rpm -e --nodeps rblk-initiator || die "removed under a file system in use"
    umount /far
    # The initramfs of dracut has the programs after the installation.
    file /etc/dracut.conf.d/rblk.conf 'add_dracutmodules+=" rblk "'
    must rpm -i --nodeps /packages/rblk-initiator-boot-*.rpm
    lsinitramfs /boot/initrd.img-* | grep usr/lib/rblk/root/usr/bin/ || die "the initramfs of dracut has no rblk"
    must rpm -e --nodeps rblk-initiator-boot
    # A target that hosts use stays.
    must rpm -e --nodeps rblk-initiator
    must rpm -e --nodeps rblk-target
    test -s /etc/rblk/target.key && test -s /etc/rblk/host.key && test -s /srv/r.img
}

first() {
    install
    say "installed"
    configure
    say "configured"
    look
    say "looked"
    upgrade
    refused
    kept >$state/kept
    say "upgraded"
    say "restart"
    systemctl reboot
}

# The target of /far is late: the test starts it only now.
second() {
    after_boot
    ! on rblk-mount@far || die "the mount of an absent target runs"
    show systemctl status --no-pager -l rblk-mount@far
    say "booted without the far target"
    say "please start"
    within 150 is far connected
    within 100 timeout 60 ls /far/sums
    verify /far
    say "the late target serves"
    unsynced /far
    say "please kill"
    within 60 is far reconnecting
    show rblk-initiator list
    say "restart without the far target"
    systemctl reboot
}

# The target of /far dies while this host shuts down.
third() {
    after_boot
    say "what the shutdown without the far target said:"
    journalctl --no-pager -b -1 -o short-monotonic -p warning -u 'rblk-mount@*' -u far.mount -u rblk-target
    journalctl --no-pager -b -1 -q -o cat -u rblk-mount@far.service | grep -q 'not written\|lost\|could not' ||
        die "the log does not say that data was lost"
    within 100 is far connected
    within 100 timeout 60 ls /far/sums
    verify /far
    unsynced /far
    say "restart with a far target that dies"
    systemctl reboot
}

fourth() {
    after_boot
    journalctl --no-pager -b -1 -o short-monotonic -p warning -u 'rblk-mount@*' -u far.mount -u rblk-target
    within 100 timeout 60 ls /far/sums
    verify /far
    contained
    say "contained"
    layered
    say "layered"
    removed
    nothing_left "the purge"
    say "purged"
    by_rpm
    say "done"
    systemctl poweroff
}

boot=$(($(cat $state/boots 2>/dev/null || echo 0) + 1))
echo $boot >$state/boots
say "boot $boot"
case $boot in
1) first ;;
2) second ;;
3) third ;;
*) fourth ;;
esac
