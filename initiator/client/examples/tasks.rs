//! Tasks of one thread write blocks of a volume, and read them back: `tasks tcp://store1 vol0`.

use std::error::Error;

use rblk_client::tokio::{Driver, Failed, Handle};
use rblk_client::{Config, Options};
use tokio::task::{JoinSet, LocalSet};

/// Writes a block and reads it back. Returns its first byte.
async fn write_and_read(queue: Handle, block: u8) -> Result<u8, Failed> {
    // Waits while other tasks have all buffers of the queue.
    let mut buffer = queue.buffer().await?;
    buffer.write(0, &[block; 4096]);
    // The request owns the buffer. If this future is dropped, by a time-out, the buffer stays in
    // the queue until the card is done with it.
    let offset = u64::from(block) * 4096;
    let buffer = queue.write(buffer, offset, 4096).await?;
    let buffer = queue.read(buffer, offset, 4096).await?;
    let mut byte = [0];
    buffer.read(0, &mut byte);
    Ok(byte[0])
}

/// Returns the sum of the first bytes of `blocks` blocks, which is the sum of their numbers.
pub(crate) fn tasks(target: &str, volume: &str, blocks: u8) -> Result<u64, Box<dyn Error>> {
    let mut volume = Options::new(Config::new(target, volume)).open()?;
    let queue = volume.queue().ok_or("no queue")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let sum = LocalSet::new().block_on(&runtime, async move {
        let (queue, driver) = Driver::new(queue)?;
        let driver = tokio::task::spawn_local(driver.run());
        let mut tasks = JoinSet::new();
        for block in 0..blocks {
            tasks.spawn_local(write_and_read(queue.clone(), block));
        }
        let mut sum = 0;
        while let Some(byte) = tasks.join_next().await {
            sum += u64::from(byte??);
        }
        queue.flush().await?;
        // The driver ends, and gives the queue back.
        queue.close();
        drop(driver.await??);
        Ok::<_, Box<dyn Error>>(sum)
    })?;
    volume.close()?;
    Ok(sum)
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [target, volume] = words.as_slice() else {
        return Err("usage: tasks TARGET VOLUME".into());
    };
    println!("{}", tasks(target, volume, 200)?);
    Ok(())
}
