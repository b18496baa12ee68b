//! Checks for hands: a list with commands.

use rblk_operate::doctor::Finding;

use super::Out;
use super::site::Site;

pub(super) fn list(site: &Site, out: &Out) {
    let device = &site.device.caps().name;
    let before = "with `rblk-initiator mount` and fio at work on the disk:";
    for (what, how) in [
        ("cable", "pull it for 3 s, for 30 s and for 300 s, at each end; put it back".to_owned()),
        (
            "port",
            "shut the port at the switch; ip link set IFACE down; ip link set IFACE up".into(),
        ),
        (
            "power of the peer",
            "switch the target's power off; echo b > /proc/sysrq-trigger at the initiator".into(),
        ),
        ("bond", "ip link set SLAVE down, of the active one, then of the other".into()),
        ("reload", "devlink dev reload pci/DOMAIN:BUS:DEV.FN, at each end".into()),
        ("reset", "echo 1 > /sys/class/infiniband/DEVICE/device/reset, at each end".into()),
        ("unplug", "echo 1 > .../device/remove; echo 1 > /sys/bus/pci/rescan".into()),
        ("VF", "echo 0 > /sys/class/net/IFACE/device/sriov_numvfs, below a running VM".into()),
        ("subnet manager", "systemctl restart opensm; stop it for 300 s (InfiniBand)".into()),
        ("switch", "reboot it; fill a link beside it with ib_write_bw of two other hosts".into()),
        ("driver", "modprobe -r DRIVER; modprobe DRIVER, at each end".into()),
        (
            "two hosts",
            "ib_write_bw -d DEVICE there, ib_write_bw -d DEVICE HOST here; ib_read_bw".into(),
        ),
    ] {
        let how = how.replace("DEVICE", device);
        out.add(Finding::skip(what, "not run").fix(how));
    }
    let words = format!(
        "{before} no error of fio, data that verifies, and `rblk-initiator status` says how long it \
         stood still"
    );
    out.add(Finding::skip("what to expect", words));
}
