//! [`Plug`]: a second Soft-RoCE device of this host, which a test can pull out.
//!
//! Soft-RoCE cannot destroy objects that are in use: `rdma link del` waits until the last program
//! has closed the device. `cards.c` simulates a card whose objects are dead at once.

use super::Lab;
use super::process::start;
use super::wait::DEADLINE;

/// The device, on an interface of its own. Drop removes both.
#[derive(Debug)]
pub struct Plug(());

impl Plug {
    /// Name of the device.
    pub const NAME: &str = "rxeplug";
    /// Its interface.
    pub const LINK: &str = "rblkplug";
    /// Address of its interface.
    pub const HOST: &str = "10.92.0.1";

    /// Makes the interface, with or without the address, and the device. `lab` is proof that this
    /// machine may be changed.
    ///
    /// # Panics
    /// A command fails.
    #[must_use]
    pub fn new(_lab: &Lab, has_address: bool) -> Self {
        take_down();
        let link = Self::LINK;
        run(&format!("ip link add {link} mtu 4500 type dummy"));
        if has_address {
            run(&format!("ip addr add {}/24 dev {link}", Self::HOST));
        }
        run(&format!("ip link set {link} up"));
        let plug = Self(());
        plug.put_back();
        plug
    }

    /// Removes the device. Returns after the last program has closed it.
    ///
    /// # Panics
    /// A program keeps the device open.
    pub fn pull_out(&self) {
        run(&format!("rdma link del {}", Self::NAME));
    }

    /// Makes the device again.
    ///
    /// # Panics
    /// The command fails.
    pub fn put_back(&self) {
        run(&format!("rdma link add {} type rxe netdev {}", Self::NAME, Self::LINK));
    }
}

fn run(words: &str) {
    let words: Vec<&str> = words.split(' ').collect();
    let _ = start(&words).finish(DEADLINE).ok();
}

fn take_down() {
    for words in [&["rdma", "link", "del", Plug::NAME][..], &["ip", "link", "del", Plug::LINK]] {
        let _ = start(words).finish(DEADLINE);
    }
}

impl Drop for Plug {
    fn drop(&mut self) {
        take_down();
    }
}
