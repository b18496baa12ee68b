//! [`WaySession`]: the session of one living way, in a task of its own: it keeps the way alive,
//! takes the news of the target, and drops the epochs of other ways beside that.

use std::time::Instant;

use rblk_protocol::{DropRequest, Epoch, VolumeHandle};
use tokio::sync::{mpsc, oneshot};

use crate::engine::pulse::Pulse;
use crate::engine::ways::WayIndex;
use crate::volume::admin::TargetNews;
use crate::volume::error::SessionError;
use crate::volume::session::Session;
use crate::volume::setup::Endpoint;

/// I/Os of the disk so far.
pub(super) type IoCount = Box<dyn Fn() -> u64 + Send + Sync>;

/// What control asks of the task.
#[derive(Debug)]
enum WayOrder {
    Drop(DropRequest),
    GiveBack(oneshot::Sender<Session>),
}

/// What a way tells.
#[derive(Debug)]
pub(super) enum WayNews {
    /// The target told something, or has answered a DROP.
    Target(TargetNews),
    /// The admin connection is dead, or its target is silent.
    Lost(SessionError),
}

/// News, with the way and its epoch.
pub(super) type News = (WayIndex, Epoch, WayNews);

/// The fixed facts of a task.
pub(super) struct WayTask {
    pub(super) way: WayIndex,
    pub(super) pulse: Pulse,
    pub(super) volume: VolumeHandle,
    pub(super) ios: IoCount,
    pub(super) news: mpsc::UnboundedSender<News>,
}

/// A living way. Its admin connection ends with this.
#[derive(Debug)]
pub(super) struct WaySession {
    orders: mpsc::UnboundedSender<WayOrder>,
    /// The connection, for people.
    pub(super) endpoint: Endpoint,
    /// Since when it lives.
    pub(super) since: Instant,
}

impl WaySession {
    /// Starts the task.
    pub(super) fn start(session: Session, terms: WayTask) -> Self {
        let (orders, from_link) = mpsc::unbounded_channel();
        let endpoint = Endpoint::of(&session, []);
        tokio::spawn(attend(session, terms, from_link));
        Self { orders, endpoint, since: Instant::now() }
    }

    /// Asks the target to end these epochs. [`TargetNews::Dropped`] is the answer.
    pub(super) fn drop_epochs(&self, epochs: DropRequest) {
        // A task that has ended told why.
        let _ = self.orders.send(WayOrder::Drop(epochs));
    }

    /// Ends the task, and returns the session. `None` if it is lost.
    pub(super) async fn give_back(self) -> Option<Session> {
        let (reply, session) = oneshot::channel();
        self.orders.send(WayOrder::GiveBack(reply)).ok()?;
        session.await.ok()
    }
}

async fn attend(
    mut session: Session,
    terms: WayTask,
    mut orders: mpsc::UnboundedReceiver<WayOrder>,
) {
    let WayTask { way, pulse, volume, ios, news } = terms;
    let epoch = session.login().epoch;
    let tell = |what| {
        // The link may be gone.
        let _ = news.send((way, epoch, what));
    };
    loop {
        let heard = tokio::select! {
            heard = session.admin.news_of_disk(pulse, volume, &ios) => heard.map(WayNews::Target),
            order = orders.recv() => match order {
                None => break,
                Some(WayOrder::GiveBack(reply)) => {
                    let _ = reply.send(session);
                    return;
                }
                Some(WayOrder::Drop(epochs)) => match session.admin.drop_epochs(epochs) {
                    Ok(()) => continue,
                    Err(error) => Err(error),
                },
            },
        };
        match heard {
            Ok(heard) => tell(heard),
            Err(error) => {
                tell(WayNews::Lost(error));
                break;
            }
        }
    }
    session.admin.close();
}
