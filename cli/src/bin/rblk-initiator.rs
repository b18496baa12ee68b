//! `rblk-initiator`: the commands of the initiator. Links no RDMA library: `rblk-initiatord`, in
//! the same directory, does `mount` and `discover`.

use std::process::ExitCode;

fn main() -> ExitCode {
    rblk_cli::initiator::main()
}
