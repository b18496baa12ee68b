//! Writes a block of a volume, makes it durable, and reads it back: `tour tcp://store1 vol0`.

use std::error::Error;
use std::time::Duration;

use rblk_client::{Completion, Config, Options, Queue, Request};

/// Runs one request to its end, even if the target is away for long.
fn run(queue: &mut Queue, request: Request) -> Result<Completion, Box<dyn Error>> {
    let mut done = Vec::new();
    queue.submit(request)?;
    while queue.wait(&mut done, Duration::from_secs(1))? == 0 {}
    done.pop().ok_or_else(|| "one request has one completion".into())
}

/// Returns the first byte of the volume, which is then 7.
pub(crate) fn tour(target: &str, volume: &str) -> Result<u8, Box<dyn Error>> {
    let mut volume = Options::new(Config::new(target, volume)).open()?;
    // Each thread has a queue of its own.
    let mut queue = volume.queue().ok_or("no queue")?;
    // The target reads and writes the memory of this buffer by RDMA.
    let mut buffer = queue.buffer().ok_or("no buffer")?;
    buffer.write(0, &[7; 4096]);
    // The request owns the buffer until its completion brings it back.
    let written = run(&mut queue, Request::write(buffer, 0, 4096))?;
    assert_eq!(written.result?, 4096);
    run(&mut queue, Request::flush())?.result?;
    let buffer = written.buffer.ok_or("a write has a buffer")?;
    let read = run(&mut queue, Request::read(buffer, 0, 4096))?;
    read.result?;
    let mut byte = [0];
    read.buffer.ok_or("a read has a buffer")?.read(0, &mut byte);
    drop(queue);
    volume.close()?;
    Ok(byte[0])
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [target, volume] = words.as_slice() else { return Err("usage: tour TARGET VOLUME".into()) };
    println!("{}", tour(target, volume)?);
    Ok(())
}
