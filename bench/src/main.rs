//! `rblk-bench`: measures rblk.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use rblk_bench::args::Cli;
use rblk_config::Exit;
use rblk_rig::allocations::CountingAllocator;

// `cost` counts the allocations of the data path.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    match rblk_bench::run(Cli::parse().command) {
        Ok(()) => Exit::Ok.into(),
        Err(error) => {
            eprintln!("rblk-bench: {error:#}");
            Exit::Failure.into()
        }
    }
}
