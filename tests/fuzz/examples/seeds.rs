//! Writes the seeds of every target, where a new corpus begins: `seeds DIR`.

use std::path::PathBuf;

use rblk_fuzz::ALL;

fn main() -> std::io::Result<()> {
    let Some(root) = std::env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("seeds DIR");
        std::process::exit(2);
    };
    for target in ALL {
        let dir = root.join(target.name);
        std::fs::create_dir_all(&dir)?;
        for (at, seed) in (target.seeds)().iter().enumerate() {
            std::fs::write(dir.join(format!("seed-{at}")), seed)?;
        }
    }
    Ok(())
}
