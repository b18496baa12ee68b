//! [`Witness`]: how long this machine stood still.
//!
//! The host of a virtual machine may give it no CPU for seconds. Measured times then get longer,
//! and a healthy path without service in that time is given up. So a test that judges a time also
//! asks the witness.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// How long a sleep is. Short ones would take a tenth of an emulated CPU.
const STEP: Duration = Duration::from_millis(25);
/// A sleeper that wakes up later than this had no CPU from the machine. Other load on the machine
/// causes shorter delays.
const STOP: Duration = Duration::from_millis(100);
/// The limit of repetitions while the machine stands still.
const TRIES: usize = 8;

/// Sleeps on every CPU until it is dropped, and measures how late it wakes up.
#[derive(Debug)]
pub struct Witness {
    stop: Arc<AtomicBool>,
    sleepers: Vec<Sleeper>,
}

/// A moment in the life of a [`Witness`].
#[derive(Clone, Debug)]
pub struct Moment(Vec<Duration>);

#[derive(Debug)]
struct Sleeper {
    stops: Arc<Mutex<Stops>>,
    thread: Option<JoinHandle<()>>,
}

/// The stops of one CPU.
#[derive(Debug)]
struct Stops {
    // The beginning of the present sleep.
    since: Instant,
    lost: Duration,
}

impl Stops {
    /// All stops until now, with a stop in progress.
    fn until(&mut self, now: Instant) -> Duration {
        let late = now.saturating_duration_since(self.since + STEP);
        if late >= STOP {
            self.lost += late;
            self.since = now - STEP;
        }
        self.lost
    }

    fn wake(&mut self, now: Instant) {
        self.until(now);
        self.since = now;
    }
}

impl Sleeper {
    fn start(cpu: usize, stop: Arc<AtomicBool>) -> Self {
        let stops = Stops { since: Instant::now(), lost: Duration::ZERO };
        let stops = Arc::new(Mutex::new(stops));
        let seen = Arc::clone(&stops);
        let thread = std::thread::spawn(move || {
            let mut set = CpuSet::new();
            // On another CPU the sleeper sees fewer stops, but no false ones.
            let _ = set.set(cpu).and_then(|()| sched_setaffinity(Pid::from_raw(0), &set));
            while !stop.load(Ordering::Relaxed) {
                std::thread::sleep(STEP);
                seen.lock().unwrap_or_else(PoisonError::into_inner).wake(Instant::now());
            }
        });
        Self { stops, thread: Some(thread) }
    }
}

impl Witness {
    /// Starts to watch.
    ///
    /// # Panics
    /// The system does not list the CPUs.
    #[must_use]
    pub fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let cpus = sched_getaffinity(Pid::from_raw(0)).expect("the CPUs of this process");
        let cpus = (0..CpuSet::count()).filter(|cpu| cpus.is_set(*cpu).unwrap_or(false));
        let sleepers = cpus.map(|cpu| Sleeper::start(cpu, Arc::clone(&stop))).collect();
        Self { stop, sleepers }
    }

    /// This moment, for [`lost_since`](Self::lost_since).
    #[must_use]
    pub fn now(&self) -> Moment {
        let now = Instant::now();
        let until = |sleeper: &Sleeper| {
            sleeper.stops.lock().unwrap_or_else(PoisonError::into_inner).until(now)
        };
        Moment(self.sleepers.iter().map(until).collect())
    }

    /// The time that the worst CPU stood still since `moment`, in stops of 0.1 s and more.
    #[must_use]
    pub fn lost_since(&self, moment: &Moment) -> Duration {
        let now = self.now();
        now.0.iter().zip(&moment.0).map(|(now, then)| *now - *then).max().unwrap_or_default()
    }

    /// Runs `window` and returns its result. If it fails and the machine stood still meanwhile, the
    /// failure proves nothing: prints a line and runs `window` again.
    ///
    /// # Panics
    /// `window` fails while the machine runs, or fails [`TRIES`] times while the machine stands
    /// still.
    pub fn judge<T>(&self, what: &str, mut window: impl FnMut() -> Result<T, String>) -> T {
        for _ in 0..TRIES {
            let begun = self.now();
            let why = match window() {
                Ok(found) => return found,
                Err(why) => why,
            };
            let lost = self.lost_since(&begun);
            assert!(!lost.is_zero(), "{what}: {why}");
            println!("{what}: {why}; the machine stood still for {lost:.2?}, so once more");
        }
        panic!("{what}: the machine is too busy, it stood still each of {TRIES} times");
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.sleepers.iter_mut().filter_map(|sleeper| sleeper.thread.take()) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stops_are_counted_once() {
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let mut stops = Stops { since: begin, lost: Duration::ZERO };
        stops.wake(at(26));
        stops.wake(at(101));
        assert_eq!(stops.until(at(105)), Duration::ZERO, "that is no stop");
        // A stop that is asked about before the sleeper wakes up.
        assert_eq!(stops.until(at(1126)), Duration::from_millis(1000));
        assert_eq!(stops.until(at(1127)), Duration::from_millis(1000));
        stops.wake(at(1135));
        stops.wake(at(1160));
        assert_eq!(stops.until(at(1165)), Duration::from_millis(1000));
        stops.wake(at(1385));
        assert_eq!(stops.until(at(1386)), Duration::from_millis(1200));
    }

    #[test]
    fn only_windows_with_a_stop_are_repeated() {
        let witness = Witness::start();
        let mut calls = 0;
        let mut window = |fails: usize| {
            calls += 1;
            // Pretends a stop of the machine.
            for sleeper in &witness.sleepers {
                sleeper.stops.lock().unwrap().lost += Duration::from_secs(1);
            }
            if calls <= fails { Err("late".to_owned()) } else { Ok(calls) }
        };
        assert_eq!(witness.judge("it", || window(2)), 3);
    }
}
