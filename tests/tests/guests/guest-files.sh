# A guest whose data is on a volume, after guest-begin.sh: it mounts the disk, writes files with sums
# again and again, checks them, and says on the console how far it is.

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
