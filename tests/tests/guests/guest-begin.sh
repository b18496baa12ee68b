#!/bin/busybox sh
# How the first process of a guest begins, whatever it does then: guest-files.sh or guest-rounds.sh
# follows in the same file. It waits for its disk.

bb=/bin/busybox
say() { echo "guest: $*" >/dev/ttyS0; }
end() { say "$*"; $bb poweroff -f; while :; do $bb sleep 1; done; }

$bb mount -t proc proc /proc
$bb mount -t sysfs sysfs /sys
$bb mount -t devtmpfs devtmpfs /dev
while read -r module; do
    $bb insmod "/modules/$module" || end "failed: module $module"
done </modules/order
$bb mdev -s 2>/dev/null
tries=0
while [ ! -b /dev/vda ]; do
    tries=$((tries + 1))
    [ "$tries" -lt 100 ] || end "failed: there is no disk"
    $bb sleep 0.1
done
