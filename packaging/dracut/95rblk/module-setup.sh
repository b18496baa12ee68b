#!/bin/bash
# dracut module: the root file system on an rblk disk. What the command line says: parse-rblk.sh.

# called by dracut
check() {
    require_binaries rblk-initiator rblk-initiatord || return 1
    [[ -x /usr/lib/rblk/boot-root ]] || return 1
    # An image for this host alone has the module if the host runs from such a disk.
    [[ $hostonly ]] || [[ $mount_needs ]] && {
        block_is_ublk() { [[ $(readlink "/sys/dev/block/$1") == */ublkb* ]]; }
        for_each_host_dev_and_slaves block_is_ublk || return 255
    }
    return 0
}

# called by dracut
depends() {
    echo network rootfs-block
}

# called by dracut
installkernel() {
    hostonly='' instmods ublk_drv tls chacha20poly1305 crypto-chacha20 crypto-poly1305 rdma_ucm
    hostonly='' instmods "=drivers/infiniband"
}

# called by dracut
install() {
    inst_multiple cat chmod cp grep ip md5sum mkdir modprobe mount sed sort tr
    # The command runs with the files of the initramfs, its process with those of a root of its own.
    inst /usr/bin/rblk-initiator
    /usr/lib/rblk/boot-root "$initdir/usr/lib/rblk/root" || return 1
    inst_script /usr/lib/rblk/boot-mount
    inst_hook cmdline 90 "$moddir/parse-rblk.sh"
    inst_script "$moddir/rblkroot.sh" /sbin/rblkroot
    inst_hook shutdown 90 "$moddir/rblk-shutdown.sh"
    if dracut_module_included "systemd-initrd"; then
        inst_script "$moddir/rblk-generator.sh" \
            "$systemdutildir/system-generators/dracut-rblk-generator"
    fi
    dracut_need_initqueue
}
