//! Queues that left while their mount goes on, as those of a program may.

use super::*;
use crate::queue::FromQueue;

#[test]
fn a_queue_that_left_has_no_memory_and_no_path_any_more() {
    runtime().block_on(async {
        let toy = Toy::new().await;
        let mut config = config(&[&toy]);
        config.queues = Some(2);
        let mut mount = mounted(&config).await;
        mount.set_queues(Queues::without_threads(&[1, 1]));
        let memory = |mount: &Mount, queue: usize| {
            mount.volume.link().setup().buffers[queue].as_ref().map(Arc::downgrade)
        };
        let (kept, left) = (memory(&mount, 0).unwrap(), memory(&mount, 1).unwrap());
        mount.volume.on_queue(FromQueue::Stopped { queue: 1, error: None }).unwrap();
        // The threads of the earlier queues may not have ended yet.
        let given_back = async {
            while left.upgrade().is_some() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let given_back = tokio::time::timeout(Duration::from_secs(30), given_back).await;
        given_back.expect("nobody can use the memory any more");
        assert!(kept.upgrade().is_some());
        // Only the other queue is connected again.
        mount.on_path_end(0, PathEnd::Silent);
        until_status(&mut mount, |status| status.state == "connected").await;
        assert_eq!(mount.status().epoch, 2);
        assert!(memory(&mount, 0).is_some() && memory(&mount, 1).is_none());
        assert!(kept.upgrade().is_some());
    });
}
