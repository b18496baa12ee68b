#!/bin/sh
# At shutdown, when the root file system is unmounted: ends the process of its disk, which flushes
# and leaves the target. This file is sourced, and again until it returns 0; $1 is `final` at last.

rblk_processes() {
    for process in /proc/[0-9]*; do
        name=$(tr '\0' ' ' <"$process/cmdline" 2>/dev/null) || continue
        case $name in
        @rblk-initiatord*) echo "${process#/proc/}" ;;
        esac
    done
}

if grep -q ' /oldroot' /proc/mounts && [ "$1" != final ]; then
    return 1
fi
rblk_left=$(rblk_processes)
# While a file system is on the disk, its process stays.
if [ -n "$rblk_left" ] && ! grep -q ' /oldroot' /proc/mounts; then
    kill -TERM $rblk_left
    rblk_tries=0
    while [ -n "$(rblk_processes)" ] && [ $rblk_tries -lt 100 ]; do
        sleep 0.1
        rblk_tries=$((rblk_tries + 1))
    done
    [ -z "$(rblk_processes)" ] && info "rblk: the disk of the root file system was removed"
fi
return 0
