//! The command `top` of both programs: shows figures at an interval, or once.

use std::time::{Duration, SystemTime};

use rblk_config::Exit;
use rblk_operate::screen::Screen;
use rblk_operate::table::Column;
use rblk_operate::{Output, figures};
use rblk_runtime::rates::Rates;
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

/// The columns of rates per second and of the latencies: R is a read and W a write.
pub(crate) fn rate_columns() -> [Column; 8] {
    ["R/s", "W/s", "rMiB/s", "wMiB/s", "rP50", "rP99", "wP50", "wP99"].map(Column::figure)
}

/// The figures of these columns; `-` for rates that are not measured.
pub(crate) fn rate_figures(rates: Option<&Rates>) -> [String; 8] {
    let Some(rates) = rates else { return [(); 8].map(|()| "-".to_owned()) };
    [
        figures::count(rates.reads),
        figures::count(rates.writes),
        figures::mib_per_second(rates.read_bytes),
        figures::mib_per_second(rates.written_bytes),
        figures::latency(rates.read_p50_us),
        figures::latency(rates.read_p99_us),
        figures::latency(rates.write_p50_us),
        figures::latency(rates.write_p99_us),
    ]
}

/// The time in milliseconds since 1970.
pub(crate) fn unix_ms() -> u128 {
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since_1970.map_or(0, |time| time.as_millis())
}
