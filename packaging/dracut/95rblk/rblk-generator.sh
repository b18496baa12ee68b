#!/bin/sh
# Generator of systemd: the root file system of root=rblk:SPEC. Any other root= has dracut's.

command -v getarg >/dev/null || . /lib/dracut-lib.sh

root=$(getarg root=)
[ "${root%%:*}" = rblk ] || exit 0
[ -n "${2-}" ] || exit 1
flags=$(getarg rootflags=)
getarg ro >/dev/null && flags=${flags:+$flags,}ro
type=$(getarg rootfstype=)
mkdir -p "$2"
{
    echo "[Unit]"
    echo "Before=initrd-root-fs.target"
    echo "[Mount]"
    echo "Where=/sysroot"
    echo "What=/dev/ublkb0"
    [ -n "$type" ] && echo "Type=$type"
    [ -n "$flags" ] && echo "Options=$flags"
} >"$2/sysroot.mount"
# The target may be away for longer than systemd waits for a device.
mkdir -p "$2/dev-ublkb0.device.d"
printf '[Unit]\nJobTimeoutSec=0\nJobRunningTimeoutSec=0\n' >"$2/dev-ublkb0.device.d/rblk.conf"
exit 0
