//! A mount by several ways: DROPs that the target holds, because a store hangs, or refuses, while
//! the living way goes on, the return of dead ways, and the status of each.

use rblk_config::Paths;
use rblk_operate::mount::path_status::PathStatus;

use super::impostors::{config_with_keys, honest};
use super::*;

const MS: Duration = Duration::from_millis(1);

/// A mount by several ways of one target. The first way lives all the time.
struct Ways {
    toys: Vec<Toy>,
    mount: Mount,
    _keys: tempfile::TempDir,
}

impl Ways {
    async fn new(count: usize, with_keys: bool) -> Self {
        let keys = tempfile::tempdir().unwrap();
        let mut toys = Vec::new();
        for _ in 0..count {
            toys.push(Toy::new().await);
        }
        toys.iter().for_each(|toy| toy.is(|manners| manners.knows_ways = true));
        let mut config = config(&toys.iter().collect::<Vec<_>>());
        if with_keys {
            let target = rblk_protocol::auth::SecretKey::generate().unwrap();
            toys.iter().for_each(|toy| toy.is(|manners| manners.proofs = Some(honest(&target))));
            let with_keys = config_with_keys(&toys[0], vec![target.public()], keys.path());
            (config.target_keys, config.key_file) = (with_keys.target_keys, with_keys.key_file);
        }
        config.paths = Paths::All;
        let mut both = Self { mount: mounted(&config).await, toys, _keys: keys };
        for way in 1..count {
            both.joined(way).await;
        }
        assert_eq!(both.toys[0].heard(), [login(false, 1), open(0)]);
        both
    }

    async fn until(&mut self, what: &str, mut is_so: impl FnMut(&[Toy]) -> bool) {
        let begun = Instant::now();
        while !is_so(&self.toys) {
            assert!(begun.elapsed() < TIME_LIMIT, "{what}: {:?}", self.mount.status());
            attend(&mut self.mount).await;
        }
    }

    /// A way has joined. Its probes are sessions of their own.
    async fn joined(&mut self, way: usize) {
        let is_join = |heard: &Heard| matches!(heard, Heard::Login { resumed: true, .. });
        self.until("a join", |toys| toys[way].heard().iter().any(is_join)).await;
        // Its answer.
        attend(&mut self.mount).await;
    }

    /// The second way dies, and the first is asked to drop its epoch.
    async fn second_dies(&mut self, answer: Option<Status>) {
        let known = self.drops();
        self.toys[0].is(|manners| manners.drop_answer = answer);
        self.toys[1].is(|manners| manners.is_dead = true);
        self.until("a DROP", |toys| toys[0].manners.lock().unwrap().drops.len() > known).await;
    }

    async fn second_is_back(&mut self) {
        self.toys[1].is(|manners| manners.is_dead = false);
        self.joined(1).await;
    }

    fn drops(&self) -> usize {
        self.toys[0].manners.lock().unwrap().drops.len()
    }
}

#[test]
fn a_held_drop_delays_no_news_and_no_end() {
    runtime().block_on(async {
        for with_keys in [false, true] {
            let mut both = Ways::new(2, with_keys).await;
            both.second_dies(None).await;
            for blocks in [512, 1024] {
                both.toys[0].is(|manners| {
                    (manners.volume, manners.has_news) = (Some((blocks, false)), true);
                });
                until_status(&mut both.mount, |status| status.size_bytes / 4096 == blocks).await;
            }
            let held = both.toys[0].manners.lock().unwrap().drops.clone();
            assert_eq!(held, [DropRequest::new(&[Epoch(2)]).unwrap()], "asked once");
            assert_eq!(both.toys[0].heard(), [], "no reconnect");
            // The answer counts, and the way comes back in an epoch of its own.
            both.toys[0].is(|manners| manners.drop_answer = Some(Status::Ok));
            both.second_is_back().await;
            both.second_dies(None).await;
            let last = both.toys[0].manners.lock().unwrap().drops.last().copied();
            assert!(last.is_some_and(|last| last.highest() > Epoch(2)), "{last:?}");
            both.mount.volume.end_session(Some(LOGOUT)).await;
            assert_eq!(both.toys[0].heard(), [Heard::Logout], "the DROP is held all the time");
        }
    });
}

#[test]
fn a_drop_that_takes_too_long_or_is_refused_is_asked_again_and_the_way_lives() {
    runtime().block_on(async {
        for answer in [Status::TimedOut, Status::LimitReached, Status::InvalidField] {
            let mut both = Ways::new(2, answer == Status::LimitReached).await;
            both.second_dies(Some(answer)).await;
            both.until("three DROPs", |toys| toys[0].manners.lock().unwrap().drops.len() > 2).await;
            assert_eq!(both.mount.status().state, "connected", "{answer:?}");
            both.toys[0].is(|manners| manners.drop_answer = Some(Status::Ok));
            both.second_is_back().await;
            assert_eq!(both.toys[0].heard(), [], "no reconnect after {answer:?}");
        }
    });
}

#[test]
fn the_status_has_each_way() {
    runtime().block_on(async {
        let mut both = Ways::new(2, false).await;
        let in_use =
            |status: &MountStatus| status.paths_in_use().is_some_and(|in_use| in_use == "2 of 2");
        until_status(&mut both.mount, in_use).await;
        let status = both.mount.status();
        assert_eq!(status.path_lines(), [] as [&str; 0]);
        for (path, toy) in status.paths.iter().zip(&both.toys) {
            assert_eq!((&path.address, path.lost), (&toy.address.to_string(), 0));
            assert_eq!((&*path.rdma_device, &*path.transport), ("soft", "soft/TCP"));
        }
        // The first way dies: the address in use is that of the other.
        both.toys[0].is(|manners| manners.is_dead = true);
        until_status(&mut both.mount, |status| !status.paths[0].is_in_use()).await;
        let status = both.mount.status();
        assert_eq!((&*status.state, &status.address), ("connected", &status.paths[1].address));
        assert_eq!((status.paths[0].lost, status.paths[1].lost), (1, 0));
        assert_eq!(status.fallback, None);
        let lines = status.path_lines();
        let line = format!("its path to {} is not in use (for ", both.toys[0].address);
        assert!(lines.len() == 1 && lines[0].starts_with(&line), "{lines:?}");
        both.toys[0].is(|manners| manners.is_dead = false);
        until_status(&mut both.mount, in_use).await;
        let back = &both.mount.status().paths[0];
        assert_eq!((back.lost, &back.reason), (1, &None));
    });
}

#[test]
fn a_target_that_knows_one_path_is_used_by_one_at_a_time() {
    runtime().block_on(async {
        let toys = [Toy::new().await, Toy::new().await];
        let mut config = config(&[&toys[0], &toys[1]]);
        config.paths = Paths::All;
        let mut mount = mounted(&config).await;
        let uses = |status: &MountStatus, toy: &Toy| {
            status.state == "connected" && status.address == toy.address.to_string()
        };
        until_status(&mut mount, |status| uses(status, &toys[0]) && status.one_path).await;
        assert_eq!((mount.status().paths.len(), mount.status().path_lines().len()), (0, 1));
        toys[0].is(|manners| manners.is_dead = true);
        until_status(&mut mount, |status| uses(status, &toys[1]) && status.fallback.is_some())
            .await;
        assert!(mount.status().one_path);
        // The next version of the target knows more.
        toys[0].is(|manners| (manners.is_dead, manners.knows_ways) = (false, true));
        toys[1].is(|manners| (manners.is_dead, manners.knows_ways) = (true, true));
        until_status(&mut mount, |status| uses(status, &toys[0]) && !status.one_path).await;
        toys[1].is(|manners| manners.is_dead = false);
        until_status(&mut mount, |status| status.paths.iter().all(PathStatus::is_in_use)).await;
        let status = mount.status();
        assert_eq!((status.paths.len(), status.fallback), (2, None));
    });
}

/// The probes of two ways are under way together.
#[test]
fn ways_that_died_together_all_come_back() {
    runtime().block_on(async {
        let mut all = Ways::new(3, false).await;
        for _ in 0..2 {
            let known = all.drops();
            for toy in &all.toys[1..] {
                toy.is(|manners| (manners.is_dead, manners.pause) = (true, 20 * MS));
            }
            let dropped = |toys: &[Toy]| {
                let manners = toys[0].manners.lock().unwrap();
                let epochs = manners.drops[known..].iter().map(|drop| drop.epochs().len());
                epochs.sum::<usize>() > 1
            };
            all.until("the end of two ways", dropped).await;
            all.toys[1..].iter().for_each(|toy| toy.is(|manners| manners.is_dead = false));
            for way in 1..3 {
                all.joined(way).await;
            }
        }
        assert_eq!(all.toys[0].heard(), [], "no reconnect");
    });
}

#[test]
fn a_drop_that_says_that_the_session_is_over_is_a_loss() {
    runtime().block_on(async {
        let mut both = Ways::new(2, true).await;
        both.second_dies(Some(Status::Fenced)).await;
        let back = |toys: &[Toy]| toys[0].heard().iter().any(|heard| *heard == open(5));
        both.until("a reconnect", back).await;
    });
}
