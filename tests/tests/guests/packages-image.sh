#!/bin/bash
# packages-image.sh CHECKOUT PACKAGES, in a directory with the files `typed`, `walk` and `layers`: makes a Debian 13 with
# systemd and without rblk. Leaves vmlinuz, initrd and root.img, an ext4 with the packages in /packages/1, and the same packages with
# a higher version in /packages/2. Runs in a mount namespace of its own.
set -euxo pipefail
checkout=$1 packages=$2
guests=$checkout/tests/tests/guests
mirror=$(awk '/^URIs:/ { print $2; exit }' /etc/apt/sources.list.d/debian.sources)

# What the packages depend on and recommend is there: the host installs them without a network.
[ -d root ] || nice -n 10 mmdebstrap --quiet --variant=minbase --mode=root --aptopt='APT::Install-Recommends "false"' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --include=systemd-sysv,udev,kmod,dbus,iproute2,e2fsprogs,fio,procps,initramfs-tools,busybox,zstd \
    --include=linux-image-amd64,libibverbs1,librdmacm1,ibverbs-providers,rpm,podman,crun,netavark \
    --include=cryptsetup-bin,systemd-cryptsetup,lvm2,mdadm,bcache-tools,vdo,multipath-tools,udisks2 \
    --include=dracut-core,dracut-network,cpio \
    trixie root "$mirror"
# No file of a package is left out later.
rm -f root/etc/dpkg/dpkg.cfg.d/99mmdebstrap

mkdir -p root/packages/1 root/packages/2 root/var/log/journal
cp "$packages"/*.deb root/packages/1
cp "$packages"/*.rpm root/packages
for deb in "$packages"/*.deb; do
    rm -rf again
    dpkg-deb -R "$deb" again
    version=$(sed -n 's/^Version: //p' again/DEBIAN/control)
    # The packages name each other's version, too.
    sed -i "s/$version/$version+next/g" again/DEBIAN/control
    # A program of its own, so that its processes are told apart.
    for program in again/usr/bin/rblk-*d; do
        [ ! -e "$program" ] || printf next >>"$program"
    done
    dpkg-deb --root-owner-group -Znone -b again root/packages/2 >/dev/null
done
rm -rf again

echo client1 >root/etc/hostname
: >root/etc/machine-id
: >root/etc/fstab
network=root/etc/systemd/network
# The address of store1 in docs/install.md, and the way to this machine.
printf '[NetDev]\nName=guide0\nKind=dummy\n' >$network/20-guide.netdev
printf '[Match]\nName=guide0\n[Network]\nAddress=192.0.2.1/24\n' >$network/20-guide.network
printf '[Match]\nDriver=virtio_net\n[Network]\nDHCP=ipv4\n' >$network/30-card.network
mkdir -p root/etc/systemd/journald.conf.d
printf '[Journal]\nRateLimitBurst=0\n' >root/etc/systemd/journald.conf.d/all.conf
install -m 755 "$guests/packages-work.sh" root/usr/local/sbin/packages-work
install -m 644 typed walk layers "$checkout/tests/src/typed.sh" root/usr/local/lib
# `apt install` asks nobody.
echo 'APT::Get::Assume-Yes "true";' >root/etc/apt/apt.conf.d/99-yes
cat >root/etc/systemd/system/packages-work.service <<'UNIT'
[Unit]
After=multi-user.target
[Service]
Environment=HOME=/root
ExecStart=/usr/local/sbin/packages-work
StandardOutput=tty
StandardError=tty
TTYPath=/dev/console
UNIT
systemctl --root=root --quiet add-wants multi-user.target packages-work.service
systemctl --root=root --quiet enable systemd-networkd.service systemd-networkd-wait-online.service
systemctl --root=root --quiet mask getty@tty1.service serial-getty@ttyS0.service apt-daily.timer \
    apt-daily-upgrade.timer e2scrub_all.timer e2scrub_reap.service dpkg-db-backup.timer systemd-timesyncd.service

kernel=$(ls root/lib/modules)
cp "root/boot/vmlinuz-$kernel" vmlinuz
printf 'virtio_pci\nvirtio_blk\next4\n' >>root/etc/initramfs-tools/modules
sed -i 's/^MODULES=.*/MODULES=list/' root/etc/initramfs-tools/initramfs.conf
for dir in dev proc sys; do
    mount --bind "/$dir" "root/$dir"
done
# The directories of this environment are not there inside.
unset TMPDIR
nice -n 10 chroot root update-initramfs -u
umount root/dev root/proc root/sys
cp "root/boot/initrd.img-$kernel" initrd
truncate -s 4G root.img
nice -n 10 mkfs.ext4 -q -F -L root -d root root.img
