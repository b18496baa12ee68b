//! The examples below `rblk-initiator --help`.

/// Examples and addresses. The paragraphs are broken by the terminal.
pub(super) const EXAMPLES: &str = "\
Examples:
  The key that proves who this host is:
    rblk-initiator key new
  What a target serves:
    rblk-initiator discover 10.0.0.1
  Make a disk of a volume; prints the device, such as /dev/ublkb0:
    rblk-initiator mount 10.0.0.1 vol0
  Over TCP, read-only:
    rblk-initiator mount tcp://store1 vol0 --ro
  Two paths to one target, which may not be up yet:
    rblk-initiator mount 10.0.0.1 vol0 --path 10.1.0.1 --wait
  From a host that is dead or cut off:
    rblk-initiator mount 10.0.0.1 vol0 --take-over
  What is mounted, for programs:
    rblk-initiator list -o json
  Take it away, by name or by device:
    rblk-initiator umount vol0
  After a crash of its processes:
    rblk-initiator recover --all
  After an update of rblk:
    rblk-initiator upgrade --all

An address is rdma://HOST[:PORT] (InfiniBand, RoCE, iWARP; port 7720), tcp://HOST[:PORT] (port 7721), or HOST \
alone, which means rdma://HOST.";
