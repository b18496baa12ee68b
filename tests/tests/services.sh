# What the test `services` types on a host with systemd. Sourced by the script that the test makes: first those of
# `tests/src/typed.sh` and these functions, then a `step`, `file` or `line` for each thing that docs/install.md says,
# then `see`.
set -u
export PATH=/usr/bin:/usr/sbin:/bin:/sbin
# The address of the guide.
modprobe -q dummy || true
ip link add guide0 type dummy && ip addr add 192.0.2.1/24 dev guide0 && ip link set guide0 up

die() { echo "FAILED: $*"; systemctl --no-pager --full status rblk-target rblk-mount@data data.mount; journalctl --no-pager -n 60; exit 1; }
seconds() { awk -v a="$1" -v b="$(date +%s.%N)" 'BEGIN { printf "%.1f", b - a }'; }
# within SECONDS WHAT COMMAND...: the command works in that time, however often it has to be tried.
within() {
  local most=$1 what=$2 begun; begun=$(date +%s.%N); shift 2
  until timeout "$most" "$@" >/dev/null 2>&1; do
    [ "$(seconds "$begun" | cut -d. -f1)" -lt "$most" ] || die "$what: not within $most s"
    sleep 0.1
  done
  echo "$what: $(seconds "$begun") s"
}
# took SECONDS WHAT COMMAND...: the command works, once, in that time.
took() {
  local most=$1 what=$2 begun; begun=$(date +%s.%N); shift 2
  timeout "$most" "$@" || die "$what: $?, not within $most s"
  echo "$what: $(seconds "$begun") s"
}
server() { systemctl show -P MainPID rblk-mount@data; }
has() { grep -qx "$1" "/data/$1"; }
write() { echo "$1" >"/data/$1"; }

# named WHEN: both names of the volume lead to its disk, and the disk has a serial and a model.
named() {
  local id model name
  udevadm settle
  read -r id model < <(lsblk -ndo SERIAL,MODEL /dev/ublkb0)
  [ "$model" = vol0 ] || die "$1: the model of the disk is '$model'"
  for name in "/dev/disk/by-id/rblk-$id" /dev/rblk/*/vol0; do
    [ "$(readlink -f "$name")" = /dev/ublkb0 ] || die "$1: $name does not lead to the disk"
  done
  echo "names $1: rblk-$id, $(echo /dev/rblk/*/vol0)"
}
restarts() { systemctl show -P NRestarts "$1"; }
has_restarted() { [ "$(restarts "$1")" = "$2" ]; }
# watched UNIT: its process gives signs of life, and systemd replaces a process that stands still.
watched() {
  local unit=$1
  mkdir -p "/run/systemd/system/$unit.service.d"
  printf '[Service]\nWatchdogSec=3\n' >"/run/systemd/system/$unit.service.d/watchdog.conf"
  systemctl daemon-reload
  systemctl restart "$unit"
  sleep 9
  has_restarted "$unit" 0 || die "$unit: replaced although it gives signs of life"
}
stands_still() {
  kill -STOP "$(systemctl show -P MainPID "$1")"
  within 30 "$1 stands still, and is replaced" sh -c "systemctl show -P NRestarts $1 | grep -qx 1"
}

see() {
  trap 'die "line $LINENO"' ERR
  set -E
  rblk-target doctor | grep -E 'config|keys|volumes|state_dir|target|FAIL' || true
  rblk-target doctor | grep -E '^ *FAIL +(config|keys|volumes|state_dir|target)' && die "doctor finds a failure on a sound target"
  rblk-target key show >/dev/null
  test "$(stat -c %G /etc/rblk/target.d/host-client1.toml)" = rblk
  test "$(stat -c %U "/proc/$(systemctl show -P MainPID rblk-target)")" = rblk
  within 30 "the first access to the file system" ls /data/.
  mountpoint -q /data && write one && sync -f /data
  rblk-initiator list
  named "at first"

  for file_open in no yes; do
    old=$(server)
    [ "$file_open" = no ] || { exec 8<>/data/one; }
    kill -KILL "$old"
    within 20 "a read of the disk after kill -9 (a file is open: $file_open)" \
      dd if=/dev/ublkb0 of=/dev/null bs=4096 count=1 iflag=direct
    test "$(server)" != "$old"
    has one && write "two-$file_open" && sync -f /data
    mountpoint -q /data
    exec 8<&-
    udevadm trigger --settle /sys/block/ublkb0
    named "in the next process"
  done

  # A disk whose process is dead has its names; a disk of another program with the same number has none. An event in an
  # upgrade of the package, when the program cannot be run, leaves the names.
  kill -KILL "$(server)"
  rblk-initiator udev ublkb0 "$(cat /sys/block/ublkb0/diskseq)" | grep -qx ID_RBLK_VOLUME=vol0 || die "no names without a process"
  [ -z "$(rblk-initiator udev ublkb0 1)" ] || die "the disk of another program has names"
  within 20 "the file system after that" dd if=/dev/ublkb0 of=/dev/null bs=4096 count=1 iflag=direct
  mv /usr/bin/rblk-initiator /usr/bin/rblk-initiator.away && udevadm trigger --settle /sys/block/ublkb0
  named "without the program"
  mv /usr/bin/rblk-initiator.away /usr/bin/rblk-initiator

  write three
  took 30 "restart of the mount below a file system" systemctl restart rblk-mount@data
  within 30 "the file system after the restart" grep -qx three /data/three

  write four
  took 30 "stop of the mount below a file system" systemctl stop rblk-mount@data
  test ! -e /dev/ublkb0 || die "the disk is there after the stop"
  ! findmnt -n -t ext4 /data || die "the file system is mounted after the stop"
  took 60 "start of the mount" systemctl start rblk-mount@data
  within 30 "the file system after the start" grep -qx four /data/four

  # All files of mounts.d by one target unit.
  systemctl list-dependencies --plain rblk-automount.target | grep -q rblk-mount@data || die "the generator has not found the file"
  took 30 "start of every mount, which runs" systemctl start rblk-automount.target
  took 30 "stop of every mount" systemctl stop rblk-automount.target
  # The command does not wait for the mounts: they stop with the unit, not before it.
  within 30 "the end of the disk" test ! -e /dev/ublkb0
  within 10 "the end of its names" test ! -e /dev/rblk
  took 60 "start of every mount" systemctl start rblk-automount.target
  within 30 "the file system of a mount of that unit" grep -qx four /data/four

  watched rblk-mount@data
  watched rblk-target
  systemctl stop rblk-target && sleep 9
  has_restarted rblk-mount@data 0 || die "the mount was replaced because its target is away"
  systemctl start rblk-target
  within 30 "the file system when the target is back" dd if=/dev/ublkb0 of=/dev/null bs=4096 count=1 iflag=direct
  stands_still rblk-mount@data
  within 30 "a read of the disk after that" dd if=/dev/ublkb0 of=/dev/null bs=4096 count=1 iflag=direct
  stands_still rblk-target
  within 30 "a read of the disk after that" dd if=/dev/ublkb0 of=/dev/null bs=4096 count=1 iflag=direct

  # As at the end of the host: systemd stops all of them at once, in its own order.
  ! journalctl --no-pager -o cat -u rblk-mount@data | grep 'ended while in use' || die "a stop took the disk from its file system"
  local since; since=$(date '+%F %T')
  write five
  took 30 "stop of everything at once" systemctl stop data.automount data.mount rblk-mount@data rblk-target
  took 60 "start of everything at once" systemctl start rblk-target rblk-mount@data data.automount
  within 60 "the file system after that" grep -qx five /data/five
  journalctl --no-pager -o cat --since "$since" -u data.mount -u rblk-mount@data | grep -iE 'timed out|killing|failed to unmount' && die "something did not end in good order"
  echo "all is well"
  exit 0
}
