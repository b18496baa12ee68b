//! `rblk-target`: the commands of the target. Links no RDMA library: `serve`, `check` and `doctor`
//! become `rblk-targetd`.

use std::process::ExitCode;

fn main() -> ExitCode {
    rblk_cli::target::main()
}
