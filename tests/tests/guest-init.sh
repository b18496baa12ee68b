#!/bin/busybox sh
# The first process of a guest whose data is on a volume: it mounts the disk, writes files with sums
# again and again, checks them, and says on the console how far it is.

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
say "disk $($bb cat /sys/block/vda/size) sectors, id $($bb cat /sys/block/vda/serial)"
$bb mount -t ext4 /dev/vda /mnt || end "failed: mount"
[ "$($bb cat /mnt/hello)" = "from the host" ] || end "failed: what the host wrote"
number=0
while [ "$number" -lt 12 ]; do
    $bb dd if=/dev/urandom of="/mnt/file$number" bs=64k count=16 2>/dev/null || end "failed: write"
    $bb sync
    say "wrote $number"
    number=$((number + 1))
done
cd /mnt && $bb sha256sum file* >sums || end "failed: sums"
$bb sync
echo 3 >/proc/sys/vm/drop_caches
$bb sha256sum -c sums >/dev/null || end "failed: the files are not what was written"
$bb cp sums /dev/ttyS0
cd / && $bb umount /mnt || end "failed: umount"
end "done"
