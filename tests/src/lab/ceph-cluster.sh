#!/bin/bash
# A Ceph cluster on one host for tests: a monitor, OSDs in memory or in files, no manager.
#   ceph-cluster.sh DIR start | stop | osd-kill N | osd-start N | osd-pause N | osd-continue N
# Needs the packages ceph-mon, ceph-osd and ceph-common, and no root.
#   OSDS=1             number of OSDs; each object has as many copies
#   STORE=memstore     or bluestore, which keeps its data when an OSD is killed
#   PORT=13300         first of 64 ports
#   ADDRESS=127.0.0.1  of the monitor and the OSDs
# Authentication is cephx: DIR/keyring has client.admin, and DIR/NAME.keyring the key that `ceph auth` made.
set -euo pipefail
dir=$(realpath -m "$1"); what=$2; number=${3:-0}
osds=${OSDS:-1}; store=${STORE:-memstore}; port=${PORT:-13300}
address=${ADDRESS:-127.0.0.1}
conf=$dir/ceph.conf
ceph() { command ceph -c "$conf" --connect-timeout 20 "$@"; }

# The value of a class directory that Debian 13 has is relative: right only where / is the working directory.
class_dir() { dirname "$(ls /usr/lib*/*/rados-classes/libcls_rbd.so /usr/lib*/rados-classes/libcls_rbd.so 2>/dev/null | head -1)"; }

# An OSD that stood still for longer than its lease on reads holds back requests that it finds before it renews the
# lease, and looks at them again when another OSD of the pool answers. With one copy none does, so they never end: the
# lease of a lonely OSD is longer than every pause of a test, at least a minute where it was 8 s.
lease() { if [ "$osds" = 1 ]; then echo 6; else echo 0.8; fi; }

configure() { # FSID
  cat > "$conf" <<CONF
[global]
fsid = $1
mon host = v2:$address:$port
public addr = $address
cluster addr = $address
ms bind ipv6 = false
ms bind port min = $((port + 1))
ms bind port max = $((port + 63))
ms async op threads = 1
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
run dir = $dir
admin socket =
log file = $dir/\$type.\$id.log
pid file = $dir/\$type.\$id.pid
crash dir = $dir/crash
osd pool default size = $osds
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
mon data avail crit = 1
mon data avail warn = 1
# layering and exclusive-lock
rbd default features = 5
[client]
log file =
keyring = $dir/keyring
[mon]
keyring = $dir/keyring
mon data = $dir/mon
# Quick news of a dead OSD
paxos propose interval = 0.05
mon osd down out interval = 3600
mon osd min down reporters = 1
[osd]
keyring = $dir/osd.\$id/keyring
osd data = $dir/osd.\$id
osd objectstore = $store
memstore device bytes = 1073741824
bluestore block create = true
bluestore block size = 4294967296
bluestore block db create = false
bluestore block wal create = false
bluestore cache autotune = false
bluestore cache size = 67108864
osd memory target = 939524096
osd op num shards = 1
osd op num threads per shard = 1
osd class dir = $(class_dir)
osd class update on start = false
osd numa auto affinity = false
osd mclock skip benchmark = true
osd pool default read lease ratio = $(lease)
osd op queue = wpq
CONF
}

start_osd() { ceph-osd -i "$1" -c "$conf" >> "$dir/osd.$1.out" 2>&1; }

make_osd() {
  local key uuid
  uuid=$(cat /proc/sys/kernel/random/uuid); mkdir -p "$dir/osd.$1"
  key=$(ceph-authtool --gen-print-key)
  printf '[osd.%s]\n\tkey = %s\n' "$1" "$key" > "$dir/osd.$1/keyring"
  echo "{\"cephx_secret\": \"$key\"}" | ceph osd new "$uuid" "$1" -i - > /dev/null
  ceph-osd -c "$conf" -i "$1" --mkfs --osd-uuid "$uuid" --keyring "$dir/osd.$1/keyring" > "$dir/osd.$1.out" 2>&1
  start_osd "$1"
}

start() {
  local fsid admin=(--cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *')
  mkdir -p "$dir/mon" "$dir/crash"
  fsid=$(cat /proc/sys/kernel/random/uuid)
  configure "$fsid"
  ceph-authtool --create-keyring "$dir/keyring" --gen-key -n mon. --cap mon 'allow *' > /dev/null
  ceph-authtool "$dir/keyring" --gen-key -n client.admin "${admin[@]}" > /dev/null
  monmaptool --create --fsid "$fsid" --addv a "[v2:$address:$port]" "$dir/monmap" > /dev/null
  ceph-mon -c "$conf" --mkfs -i a --monmap "$dir/monmap" --keyring "$dir/keyring"
  ceph-mon -c "$conf" -i a
  for n in $(seq 0 $((osds - 1))); do make_osd "$n"; done
  ceph osd pool create rbd 8 8 > /dev/null 2>&1
  # Waits until the pool takes data.
  rbd -c "$conf" create --size 16M rbd/probe
  rbd -c "$conf" rm --no-progress rbd/probe
}

pid() { cat "$dir/osd.$1.pid"; }
gone() { for _ in $(seq 200); do [ -d "/proc/$1" ] || return 0; sleep 0.05; done; return 1; }

stop() {
  local file pid
  for file in "$dir"/osd.*.pid "$dir"/mon.*.pid; do
    [ -f "$file" ] || continue
    pid=$(cat "$file"); kill -CONT "$pid" 2>/dev/null || continue
    kill "$pid"; gone "$pid" || kill -9 "$pid"
  done
}

case $what in
start) start ;;
stop) stop ;;
osd-kill) it=$(pid "$number"); kill -9 "$it"; gone "$it" ;;
osd-start) start_osd "$number" ;;
osd-pause) kill -STOP "$(pid "$number")" ;;
osd-continue) kill -CONT "$(pid "$number")" ;;
*) echo "unknown: $what" >&2; exit 2 ;;
esac
