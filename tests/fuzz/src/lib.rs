//! Coverage-guided fuzzing of everything that a peer can send or a file can contain.
//!
//! Each target is a function from bytes to "accepted or not". It panics when the code breaks a
//! promise. The bytes are either the parser's input, or a list of a peer's acts ([`Input`]).
//!
//! | target | input |
//! | --- | --- |
//! | [`hello`] | requests, accepts and rejects of connections, and the answers of a target |
//! | [`admin_body`] | the bodies of LOGIN, LIST, OPEN and their replies |
//! | [`handshake`] | keys, the handshake, sealed commands and replies, proofs of I/O connections |
//! | [`capsule`] | commands and responses, alone and in lists |
//! | [`control_core`] | decisions of control: connections, commands, time, a failing disk |
//! | [`target_engine`] | a poll group of the target, from a hostile initiator |
//! | [`initiator_engine`] | the engine of the initiator, from a hostile target |
//! | [`tcp_frame`] | the frames of `tcp://`: the header, and a QP that gets them |
//! | [`tcp_handshake`] | the handshake of `tcp://` |
//! | [`target_config`], [`mount_config`] | configuration files |
//! | [`note`], [`record`] | files that a mount and a target leave to the next run |
//! | [`guest_note`] | the file that the program of a guest leaves to the next one |
//! | [`vhost_front_end`] | the disk of a guest, from a hostile front end: bursts, pauses |
//! | [`holders`], [`lineage`] | files of the version before, which become records |
//!
//! `corpus/NAME.inputs` is an archive ([`corpus`]) of inputs that together reach all the code
//! reached so far. The tests replay them on every run of `cargo xtask test`. `cargo xtask test
//! --long` looks for new ones.

#![forbid(unsafe_code)]

pub mod admin_body;
pub mod capsule;
pub mod control_core;
pub mod corpus;
pub mod guest_note;
pub mod handshake;
pub mod hello;
pub mod holders;
pub mod initiator_engine;
mod input;
pub mod lineage;
pub mod mount_config;
pub mod note;
pub mod record;
pub mod target_config;
pub mod target_engine;
pub mod tcp_frame;
pub mod tcp_handshake;
pub mod vhost_front_end;

pub use input::Input;

/// A target by name.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The name of its program and of its corpus.
    pub name: &'static str,
    /// Runs it. Returns whether the bytes were accepted, or reached the code behind the parser.
    pub run: fn(&[u8]) -> bool,
    /// Accepted inputs with which fuzzing begins.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

macro_rules! targets {
    ($($name:ident),*) => {
        [$(Target { name: stringify!($name), run: $name::run, seeds: $name::seeds }),*]
    };
}

/// All targets.
pub const ALL: [Target; 17] = targets!(
    hello,
    admin_body,
    handshake,
    capsule,
    control_core,
    target_engine,
    initiator_engine,
    tcp_frame,
    tcp_handshake,
    target_config,
    mount_config,
    note,
    guest_note,
    record,
    holders,
    lineage,
    vhost_front_end
);
