//! Hides the volumes of silent stores from new commands, and begins the kept commands when a store
//! speaks again. [`silence`](super::silence) says why.

use rblk_protocol::width::wide;

use super::PollGroup;
use super::command::block;
use crate::store::Store;
use crate::volume::ids::VolumeIndex;

impl<S: Store> PollGroup<S> {
    /// Looks which stores are silent: before the commands of a turn begin.
    #[inline(never)]
    pub(super) fn look_at_silence(&mut self) {
        while let Some((volume, is_silent)) = self.state.shard.store_mut().next_silence() {
            self.state.access.set_silent(volume, is_silent);
            match is_silent {
                true => tracing::warn!(volume = volume.0, "its image is silent: commands wait"),
                false => {
                    tracing::warn!(volume = volume.0, "its image speaks again");
                    self.end_silence(volume);
                }
            }
        }
    }

    /// Begins the commands that waited for the store of a volume.
    fn end_silence(&mut self, volume: VolumeIndex) {
        for held in self.state.later.silence.take(volume) {
            if self.connections.has(held.connection) {
                self.serve(wide(held.connection.index), |connection, group| {
                    block::start_held(connection, group, held)
                });
            }
        }
        self.expect_rare_work();
    }
}
