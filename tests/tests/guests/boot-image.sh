#!/bin/bash
# boot-image.sh CHECKOUT PROGRAMS, in an empty directory: makes a Debian 13 that boots from an rblk
# volume. Leaves vmlinuz, and for both kinds of initramfs KIND.initrd and KIND.img, an ext4.
# Runs in a mount namespace of its own.
set -euxo pipefail
checkout=$1 programs=$2
packaging=$checkout/packaging
mirror=$(awk '/^URIs:/ { print $2; exit }' /etc/apt/sources.list.d/debian.sources)

nice -n 10 mmdebstrap --quiet --variant=minbase --mode=root \
    --aptopt='APT::Install-Recommends "false"' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --include=systemd-sysv,udev,kmod,iproute2,e2fsprogs,fio,initramfs-tools,busybox,zstd,cpio \
    --include=dracut-core,dracut-network,linux-image-amd64,libibverbs1,librdmacm1 \
    trixie root "$mirror"

# The programs without their symbols: they are in two images.
for program in rblk-initiator rblk-initiatord; do
    strip -o "root/usr/bin/$program" "$programs/$program"
    chmod 755 "root/usr/bin/$program"
done
install -D -m 755 -t root/usr/lib/rblk "$packaging"/boot/boot-*
cp -r "$packaging"/initramfs-tools/. root/usr/share/initramfs-tools
cp -r "$packaging"/dracut/95rblk root/usr/lib/dracut/modules.d
install -m 644 -t root/usr/lib/udev/rules.d "$packaging"/udev/60-rblk.rules

echo guest1 >root/etc/hostname
: >root/etc/machine-id
echo 'LABEL=rblkroot / ext4 rw 0 1' >root/etc/fstab
mkdir -p root/etc/rblk
"$programs/rblk-initiator" key new --file root/etc/rblk/host.key >host.pub
# As docs/boot.md says: the address of the initramfs stays when networkd stops.
cat >root/etc/systemd/network/10-boot.network <<'NETWORK'
[Match]
Type=ether
[Network]
DHCP=yes
KeepConfiguration=yes
NETWORK
install -m 755 "$checkout/tests/tests/guests/boot-work.sh" root/usr/local/sbin/boot-work
cat >root/etc/systemd/system/boot-work.service <<'UNIT'
[Unit]
After=multi-user.target
[Service]
ExecStart=/usr/local/sbin/boot-work
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
UNIT
wants=root/etc/systemd/system/multi-user.target.wants
mkdir -p "$wants"
ln -s ../boot-work.service "$wants"
ln -s /usr/lib/systemd/system/systemd-networkd.service "$wants"
for unit in serial-getty@ttyS0.service getty@tty1.service systemd-networkd-wait-online.service; do
    ln -sf /dev/null "root/etc/systemd/system/$unit"
done

for dir in dev proc sys; do
    mount --bind "/$dir" "root/$dir"
done
kernel=$(ls root/lib/modules)
cp "root/boot/vmlinuz-$kernel" vmlinuz
# The directories of this environment are not there inside.
unset TMPDIR
nice -n 10 chroot root update-initramfs -u
cp "root/boot/initrd.img-$kernel" initramfs-tools.initrd
nice -n 10 chroot root dracut --quiet --force --no-hostonly --add "rblk systemd-networkd" \
    --omit "crypt lvm mdraid multipath dmraid btrfs plymouth drm nvdimm iscsi nbd bluetooth" \
    /boot/dracut.initrd "$kernel"
mv root/boot/dracut.initrd .
umount root/dev root/proc root/sys

# dracut finds its image in /boot again at shutdown.
for kind in initramfs-tools dracut; do
    cp "$kind.initrd" "root/boot/initrd.img-$kernel"
    truncate -s 2G "$kind.img"
    nice -n 10 mkfs.ext4 -q -F -L rblkroot -d root "$kind.img"
done
rm -rf root
