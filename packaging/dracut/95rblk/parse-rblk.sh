#!/bin/sh
# root=rblk:SPEC, or netroot=rblk:SPEC with any root=. SPEC and the keys rblk.*:
# /usr/lib/rblk/boot-mount. This file is sourced.

[ -z "$root" ] && root=$(getarg root=)
[ -z "$netroot" ] && netroot=$(getarg netroot=)

if [ "${root%%:*}" = rblk ]; then
    netroot=$root
    # boot-mount makes this device.
    root=block:/dev/ublkb0
fi
[ "${netroot%%:*}" = rblk ] || return 0

# shellcheck disable=SC2034
rootok=1
echo '[ -b /dev/ublkb0 ]' >"$hookdir/initqueue/finished/rblkroot.sh"
