//! [`Order`]: the orders to the keeper of an image.

use std::sync::mpsc::SyncSender;

use super::error::ImageError;

/// An order to a keeper.
#[derive(Debug)]
pub(super) enum Order {
    /// The image has changed: measure it.
    Changed,
    /// Give the image this size.
    Resize(u64, SyncSender<Result<(), ImageError>>),
    /// Find out whether this client may fence others.
    MayFence(SyncSender<Result<(), ImageError>>),
    /// Close the image.
    Close,
}
