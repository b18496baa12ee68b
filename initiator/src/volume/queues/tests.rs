use rblk_fabric::soft::network::Network;
use rblk_fabric::{PageKind, Region};
use rblk_protocol::Epoch;
use tokio::sync::oneshot;

use super::*;
use crate::engine::path::sample;

fn path(network: &Network, buffers: &Arc<Region>, epoch: u32) -> Path {
    Path { epoch: Epoch(epoch), ..sample::path(network, buffers, false).0 }
}

/// The target may come and go often while the program does not drive the queue.
#[test]
fn a_queue_that_is_not_driven_keeps_one_path_in_its_box() {
    let network = Network::new(1);
    let buffers = Region::allocate(64 << 10, PageKind::Normal).unwrap();
    let unused = Arc::strong_count(&buffers);
    let (mail, mut receiver) = crate::queue::mail().unwrap();
    let handle = QueueHandle::without_thread(mail.clone(), Arc::new(QueueStats::default()));
    let thread = Thread { handle: Some(handle), ..Thread::default() };
    let mut queues = Queues { threads: vec![thread], ..Queues::default() };
    let of_one_path = {
        let _one = path(&network, &buffers, 0);
        Arc::strong_count(&buffers) - unused
    };
    let mut last = None;
    for epoch in 1..=3000 {
        let (reply, answer) = oneshot::channel();
        assert!(ToQueue::TakeStock(reply).post(&mail).is_taken, "epoch {epoch}");
        // Only the running try waits for an answer.
        last = Some(answer);
        queues.connect(vec![(0, path(&network, &buffers, epoch))]);
        assert_eq!(queues.threads[0].paths[0], 1, "epoch {epoch}");
        assert_eq!(Arc::strong_count(&buffers) - unused, of_one_path, "epoch {epoch}");
        if epoch % 2 == 0 {
            queues.fail(Some(5));
            queues.disconnect();
            assert_eq!(queues.threads[0].paths[0], 0, "the next one makes it pointless");
            assert_eq!(Arc::strong_count(&buffers), unused, "epoch {epoch}");
            queues.release();
            queues.connect(vec![(0, path(&network, &buffers, epoch))]);
            queues.fail(None);
        }
    }
    let mut found = Vec::new();
    while let Some(message) = receiver.receive() {
        found.push(match message {
            ToQueue::TakeStock(reply) => {
                assert!(!reply.is_closed());
                "stock"
            }
            ToQueue::Hold(false) => "go on",
            ToQueue::Connect(path) => {
                assert_eq!(path.epoch, Epoch(3000));
                "connect"
            }
            ToQueue::Fail(None) => "wait",
            other => panic!("{other:?}"),
        });
    }
    assert_eq!(found, ["stock", "go on", "connect", "wait"]);
    drop(last);
    // A queue that left takes no path: the path is destroyed.
    drop(receiver);
    queues.connect(vec![(0, path(&network, &buffers, 3001))]);
    assert_eq!((queues.threads[0].paths[0], Arc::strong_count(&buffers)), (1, unused));
}

/// A way may come and go often while the program does not drive the queue.
#[test]
fn a_way_that_comes_and_goes_leaves_its_last_life_in_the_box() {
    let network = Network::new(1);
    let buffers = Region::allocate(64 << 10, PageKind::Normal).unwrap();
    let unused = Arc::strong_count(&buffers);
    let (mail, mut receiver) = crate::queue::mail().unwrap();
    let handle = QueueHandle::without_thread(mail, Arc::new(QueueStats::default()));
    let thread = Thread { handle: Some(handle), ..Thread::default() };
    let mut queues = Queues { threads: vec![thread], ..Queues::default() };
    let [one, other] = [1, 2].map(|place| WayIndex::new(place).unwrap());
    let of_way = |way, epoch| Path { way, ..path(&network, &buffers, epoch) };
    let of_one_path = {
        let _one = path(&network, &buffers, 0);
        Arc::strong_count(&buffers) - unused
    };
    queues.add_way(vec![(0, of_way(other, 1))]);
    for epoch in 2..=1000 {
        queues.end_way(one);
        queues.way_dropped(one);
        queues.add_way(vec![(0, of_way(one, epoch))]);
        assert_eq!(queues.threads[0].paths[1..3], [1, 1], "epoch {epoch}");
        assert_eq!(Arc::strong_count(&buffers) - unused, 2 * of_one_path, "epoch {epoch}");
    }
    let mut found = Vec::new();
    while let Some(message) = receiver.receive() {
        found.push(match message {
            ToQueue::EndWay(way) => format!("end {}", way.get()),
            ToQueue::WayDropped(way) => format!("dropped {}", way.get()),
            ToQueue::Join(path) => format!("join {} in {}", path.way.get(), path.epoch.0),
            other => panic!("{other:?}"),
        });
    }
    assert_eq!(found, ["join 2 in 1", "end 1", "dropped 1", "join 1 in 1000"]);
    // A path in the place of all others needs none of that mail.
    queues.add_way(vec![(0, of_way(one, 1001))]);
    queues.end_way(other);
    queues.way_dropped(other);
    queues.connect(vec![(0, path(&network, &buffers, 1002))]);
    assert!(matches!(receiver.receive(), Some(ToQueue::Connect(_))));
    assert!(receiver.receive().is_none());
}
