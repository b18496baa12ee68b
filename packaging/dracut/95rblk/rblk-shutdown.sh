#!/bin/sh
# At shutdown, when the root file system is unmounted: ends the process of its disk, which flushes
# and leaves the target. While a file system is on the disk, its process stays. This file is
# sourced, and again until it returns 0; $1 is `final` at last.

if grep -q ' /oldroot' /proc/mounts; then
    [ "$1" = final ]
    return
fi
rblk_left=
for rblk_process in /proc/[0-9]*; do
    rblk_name=
    read -r rblk_name 2>/dev/null <"$rblk_process/comm" || continue
    [ "$rblk_name" = rblk-initiatord ] && rblk_left="$rblk_left ${rblk_process#/proc/}"
done
for rblk_process in $rblk_left; do
    kill -TERM "$rblk_process"
    rblk_tries=0
    # Longer than it waits for a lost target.
    while [ -e "/proc/$rblk_process" ] && [ $rblk_tries -lt 100 ]; do
        sleep 0.1
        rblk_tries=$((rblk_tries + 1))
    done
    [ -e "/proc/$rblk_process" ] || info "rblk: the disk of the root file system was removed"
done
return 0
