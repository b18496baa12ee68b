//! The command `top` of both programs: shows figures at an interval, or once.

use std::time::{Duration, SystemTime};

use rblk_config::Exit;
use rblk_operate::Output;
use rblk_operate::screen::Screen;
use serde::Serialize;

/// Time for a daemon to measure its rates.
pub(crate) const RATES_TIME: Duration = Duration::from_millis(1100);

/// The figures at one moment.
pub(crate) trait TopView {
    /// For programs.
    fn look(&self) -> impl Serialize;
    /// For people.
    fn frame(&self) -> String;
}

/// Shows the figures at an interval, or once. `see` returns `None` while no rates are measured yet.
pub(crate) fn top<S: TopView>(
    interval: Duration,
    once: bool,
    output: Output,
    mut see: impl FnMut() -> anyhow::Result<Option<S>>,
) -> anyhow::Result<Exit> {
    let screen = match output {
        Output::Table if !once => Screen::open(),
        _ => Screen::lines(),
    };
    loop {
        let Some(seen) = see()? else {
            if screen.wants_to_quit(RATES_TIME)? {
                return Ok(Exit::Ok);
            }
            continue;
        };
        match output {
            Output::Json => output.item(&seen.look(), String::new)?,
            Output::Table => screen.draw(&seen.frame())?,
        }
        if once || screen.wants_to_quit(interval)? {
            return Ok(Exit::Ok);
        }
    }
}

/// The time in milliseconds since 1970.
pub(crate) fn unix_ms() -> u128 {
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since_1970.map_or(0, |time| time.as_millis())
}
