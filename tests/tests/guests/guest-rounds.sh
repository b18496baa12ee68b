# A guest whose disk is served by one program after the other, after guest-begin.sh: it writes files,
# each in a directory of its own, and makes each durable before it says so. It writes another file
# all the time that nobody makes durable. It says when its disk has told a loss: from then on it writes nothing. A line on the
# console ends it.

say "boots"
# Dirty pages go to the disk at once, and a FLUSH comes seldom.
echo 10 >/proc/sys/vm/dirty_writeback_centisecs
echo 10 >/proc/sys/vm/dirty_expire_centisecs
$bb mount -t ext4 /dev/vda /mnt || end "told: mount"
number=0
while [ -e "/mnt/d$number/file" ]; do number=$((number + 1)); done
($bb head -n 1 /dev/ttyS0 >/stop.new && : >/stop) &
(while :; do
    $bb dd if=/dev/urandom of=/mnt/never-durable bs=64k count=8 conv=notrunc 2>/dev/null || exit
    $bb sleep 0.2
done) &
while [ ! -e /stop ]; do
    $bb dd if=/dev/urandom of=/new bs=64k count=4 2>/dev/null
    $bb mkdir -p "/mnt/d$number" 2>/dev/null || end "told: mkdir $number"
    $bb dd if=/new of="/mnt/d$number/file" bs=64k conv=fsync 2>/dev/null || end "told: write $number"
    sum=$($bb sha256sum </new)
    # Time for blocks that are in the journal to go to their places, where no FLUSH covers them.
    $bb sleep 0.5
    say "wrote $number ${sum%% *}"
    number=$((number + 1))
done
$bb kill %2 2>/dev/null
$bb sync
$bb umount /mnt 2>/dev/null || $bb mount -o remount,ro /mnt || end "told: umount"
end "done"
