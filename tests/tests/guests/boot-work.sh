#!/bin/sh
# The work of a host that has booted from an rblk volume: writes and verifies while the test kills
# the target, moves the mount to other programs, and powers off.
say() {
    echo "guest: $*"
}

fail() {
    say "failed: $*"
    systemctl poweroff
    exit 1
}

# server: the process of the disk.
server() {
    for process in /proc/[0-9]*; do
        read -r name <"$process/comm" && [ "$name" = rblk-initiatord ] && echo "${process#/proc/}"
    done 2>/dev/null
}

say "root $(findmnt -no SOURCE,FSTYPE /)"
pid=$(server)
say "server $(tr '\0' ' ' <"/proc/$pid/cmdline")"
# No mount of the root file system, and no file of it.
grep -q " $(findmnt -no MAJ:MIN /) " "/proc/$pid/mountinfo" && fail "it mounts its own disk"
for file in "/proc/$pid/exe" "/proc/$pid/cwd" "/proc/$pid/root" "/proc/$pid"/map_files/* \
    "/proc/$pid"/fd/*; do
    [ "$(stat -Lc %d "$file")" = "$(stat -c %d /)" ] && fail "$file is on its own disk"
done
say "holds nothing of its disk"
rblk-initiator list

cd /var/tmp || fail "no /var/tmp"
fio --name=v --filename=/var/tmp/fio --size=32M --rw=randrw --bs=16k --verify=crc32c --direct=1 \
    --ioengine=libaio --iodepth=8 --time_based --runtime=40 --verify_fatal=1 --output=/run/fio.out &
fio=$!
for file in 1 2 3 4 5 6 7 8; do
    dd if=/dev/urandom of=/var/tmp/f$file bs=64k count=32 conv=fsync status=none || fail "dd"
    sha256sum f$file >>sums
    say "wrote $file"
    sleep 2
done
wait $fio || fail "fio: $(cat /run/fio.out)"
sync
echo 3 >/proc/sys/vm/drop_caches
sha256sum -c --quiet sums || fail "sums"
say "verified"

# A program that is not in the memory of the process is refused, and a copied one takes over.
echo >>/usr/bin/rblk-initiatord
sync
rblk-initiator upgrade root1 && fail "an upgrade to the program that runs already"
/usr/lib/rblk/boot-root /run/rblk/root || fail "boot-root"
rblk-initiator upgrade root1 || fail "upgrade"
case $(tr '\0' ' ' <"/proc/$(server)/cmdline") in
@rblk-initiatord\ recover*) say "upgraded" ;;
*) fail "the process has lost its mark" ;;
esac
dmesg | grep -E 'I/O error|EXT4-fs (error|warning)' && fail "errors of the file system"
say "done"
systemctl poweroff
