//! Images of a Ceph cluster (RBD) as stores of volumes.
//!
//! - [`open_image`]: [`Image`](open_image::Image), an open image: its size, its loss. Control has
//!   it, and the stores of all poll groups share it.
//! - [`image_keeper`]: the thread of an image. It makes the calls that may block. [`looker`]: the
//!   thread that looks after the lock, [`header_lock`]; [`lock_look`]: the verdict of a look.
//! - [`image_ops`]: the ops of one poll group at its images, and [`ended_ops`], the queue by which
//!   threads of librbd end them; [`place_shares`] bounds the ops of each image.
//! - [`cluster`]: the client of a cluster; [`library`]: the functions of Ceph's libraries;
//!   [`needed_setting`]: the settings without which an image is refused.
//! - Of a group of targets: [`state_object`], the object beside an image with its owner and the
//!   record of its volume, and [`state_keeper`], its thread; [`group_member`]; [`image_claim`]: how
//!   a member becomes the owner, [`claiming`]: its acts; [`image_watchers`]; [`owner_question`]:
//!   the questions of members to each other; [`calls`]: the calls to a member that need not own
//!   the image, and the watches; [`group_look`] reads all of it for people.
//!   [`fencing`]: the users that may fence, and the clients that are fenced.
//! - [`ownership`]: decisions of these that need no call to a cluster; [`state_record`]: the record
//!   in the object beside an image.
//!
//! A cache in front of an image is right only while one target owns the image. So the target holds
//! the exclusive lock as long as it serves a volume on an image, and every image has its own client
//! of the cluster: Ceph fences clients. An image is lost when the cluster has fenced the client,
//! when another client has the lock, or when the image has become smaller than its volume. From
//! that moment no op of the image ends until the poll group has ended the connections of the
//! volume: nothing more is answered. While the cluster has not said for 10 s that the target still
//! has the image, no command of its volume begins ([`Shared::is_silent`](open_image::Shared)).
//!
//! librbd does not cache here (`rbd_cache = false`, which the configuration of an image cannot
//! change unnoticed). So a write that is done is durable, FUA needs nothing more, and a flush only
//! waits for the writes before it.

#![allow(unsafe_code)]

pub(crate) mod calls;
pub(crate) mod claiming;
mod cluster;
mod ended_ops;
pub(crate) mod error;
pub(crate) mod fencing;
pub(crate) mod group_look;
pub(crate) mod group_member;
pub mod header_lock;
pub mod image_claim;
mod image_keeper;
pub(super) mod image_ops;
mod image_watchers;
mod keeper_order;
mod library;
pub mod lock_look;
mod look_order;
mod looker;
mod needed_setting;
pub(crate) mod open_image;
pub mod owner_question;
pub mod ownership;
mod place_shares;
pub(crate) mod state_keeper;
mod state_object;
pub mod state_record;

pub(crate) use cluster::ClusterPlace;
pub(crate) use error::ImageError;
pub(crate) use image_keeper::{CLOSE_WAIT, Opening, begin_open, wait_until_closed};
pub(crate) use open_image::ImageOptions;
