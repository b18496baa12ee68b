#!/bin/sh
# rblkroot INTERFACE rblk:SPEC NEWROOT: the interface is up. Called once for each interface.

command -v getarg >/dev/null || . /lib/dracut-lib.sh

[ "${2%%:*}" = rblk ] || exit 1
[ -b /dev/ublkb0 ] && exit 0
disk=$(/usr/lib/rblk/boot-mount "$2") || exit 1
info "rblk: $2 is $disk"
# The process of the disk ends after the file system, in an initramfs again.
need_shutdown
exit 0
