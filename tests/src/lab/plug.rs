//! [`Plug`]: a second Soft-RoCE device of this host, which a test can pull out.
//!
//! Soft-RoCE cannot destroy objects that are in use: `rdma link del` waits until the last program
//! has closed the device. `cards.c` simulates a card whose objects are dead at once.
//!
//! The connection manager sends its messages by QP 1 of the device, and repeats them until the peer
//! answers. A message that is sent while the address is away moves QP 1 of Soft-RoCE to the error
//! state, and QP 1 may stay there: no connection comes about until the device is made again. A QP 1
//! of a card recovers. So a test changes the address with [`Plug::lose_address`] and
//! [`Plug::regain_address`].

use super::Lab;
use super::process::start;
use super::wait::{DEADLINE, until};

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
            change_address("add");
        }
        run(&format!("ip link set {link} up"));
        let plug = Self(());
        plug.put_back();
        plug
    }

    /// Removes the address, once no message of the connection manager waits for an answer.
    ///
    /// # Panics
    /// A connection is being made or ended for long, or a command fails.
    pub fn lose_address(&self) {
        // A connection that is being made or ended has a QP in another state.
        let is_quiet = || qps().iter().all(|qp| qp.kind == "GSI" || qp.state == "RTS");
        until("the connections of the device to be made or gone", DEADLINE, || {
            is_quiet().then_some(())
        });
        change_address("del");
    }

    /// Adds the address again. If QP 1 broke while the address was away, the device is made again:
    /// no program can repair QP 1.
    ///
    /// # Panics
    /// A command fails, or `rdma` shows no QP 1.
    pub fn regain_address(&self) {
        change_address("add");
        let qps = qps();
        let first = qps.iter().find(|qp| qp.kind == "GSI").expect("QP 1 of the device");
        if first.state != "RTS" {
            println!(
                "QP 1 of {} is in state {}: the device is made again",
                Self::NAME,
                first.state
            );
            self.pull_out();
            self.put_back();
        }
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

/// A QP of the device, in the words of `rdma resource`.
struct ShownQp {
    kind: String,
    state: String,
}

/// The QPs of the device; QP 1 has the kind GSI.
fn qps() -> Vec<ShownQp> {
    let text = run(&format!("rdma resource show qp link {}", Plug::NAME));
    let word_after = |line: &str, name: &str| {
        let mut words = line.split_whitespace().skip_while(|word| *word != name);
        words.nth(1).unwrap_or_default().to_owned()
    };
    let qp = |line| ShownQp { kind: word_after(line, "type"), state: word_after(line, "state") };
    text.lines().map(qp).collect()
}

fn change_address(what: &str) {
    run(&format!("ip addr {what} {}/24 dev {}", Plug::HOST, Plug::LINK));
}

fn run(words: &str) -> String {
    let words: Vec<&str> = words.split(' ').collect();
    start(&words).finish(DEADLINE).ok()
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
