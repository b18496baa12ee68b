//! The frames of `tcp://`: the header, and QPs that get frames from anywhere. No frame may change
//! memory that was not lent, and the QP completes all its WRs or none.

use rblk_fabric::soft::fuzzing::frame_header;
use rblk_fabric::soft::network::{Conditions, End, FaultyWire, Network};
use rblk_fabric::{
    Access, Completion, Connection, Device, PageKind, QpLimits, RecvWr, Region, SendOp, SendWr,
    SgeList, WcStatus, WrId,
};
use rblk_rig::inprocess::soft_handle;

use crate::Input;

const HEADER: usize = 32;
const REGION: usize = 4096;
const RECVS: u16 = 4;
/// Fills memory that is not lent.
const SECRET: u8 = 0x5a;

/// Byte 0 is 0 for the header alone. Otherwise a QP gets the rest.
pub fn run(data: &[u8]) -> bool {
    let Some((kind, bytes)) = data.split_first() else { return false };
    if *kind == 0 { frame_header(bytes) } else { queue_pair(*kind, Input::new(bytes)) }
}

const LIMITS: QpLimits = QpLimits {
    send_wrs: 8,
    recv_wrs: RECVS as u32,
    send_sges: 1,
    recv_sges: 1,
    inline_bytes: 0,
    reads_out: 2,
    reads_in: 2,
};

fn queue_pair(kind: u8, mut input: Input<'_>) -> bool {
    let network = Network::new(kind.into());
    network.set_conditions(Conditions { fragment: kind & 2 != 0, ..Conditions::default() });
    let [near, far] = [(); 2].map(|()| Device::Soft(network.device()).alloc_pd().expect("a PD"));
    let (mut poller, near_handle) = near.poller(64).expect("a CQ");
    let (_far_poller, far_handle) = far.poller(64).expect("a CQ");
    let (a, _b, wire) = network
        .pair(
            (soft_handle(&near_handle).expect("soft"), LIMITS),
            (soft_handle(&far_handle).expect("soft"), LIMITS),
        )
        .expect("a pair");
    let qp = poller.attach(Connection::Soft(a)).expect("a QP");
    let region = || Region::allocate(REGION, PageKind::Normal).expect("memory");
    let (own, lent, secret) = (region(), region(), region());
    secret.write(0, &[SECRET; REGION]);
    let own = near.register(&own, Access::LOCAL_WRITE).expect("an MR");
    let lent = near.register(&lent, Access::REMOTE).expect("an MR");
    let _secret = near.register(&secret, Access::LOCAL_WRITE).expect("an MR");
    for slot in 0..RECVS {
        let sge = own.sge(usize::from(slot) * 256, 256).expect("inside");
        let _ = poller.post_recv(qp, &[RecvWr::one(WrId(slot.into()), sge)]);
    }
    let (address, rkey) = (lent.remote(0).addr, lent.remote(0).rkey.0);
    let (mut ends, mut heard, mut sent) = (0, 0, 0u16);
    while !input.is_empty() && ends == 0 {
        match input.below(8) {
            // Raw bytes.
            0 => wire.inject(End::B, input.bytes(64)),
            // A WR posted here, which the peer's frames may answer.
            1 | 2 if sent < 8 => {
                let sge = own.sge(2048, 64 + u32::from(input.u8())).expect("inside");
                let to = far_buffer(&mut input);
                let op = [SendOp::Send, SendOp::Write(to), SendOp::Read(to)];
                let op = op[usize::from(input.below(3))];
                let (id, sges) = (WrId(64 + u64::from(sent)), SgeList::one(sge));
                let signaled = input.flag();
                sent += u16::from(
                    poller
                        .post_send(qp, &[SendWr { id, op, sges, signaled, inline: false }])
                        .is_ok(),
                );
            }
            // A well-formed header with random fields, and a payload.
            _ => inject_frame(&wire, &mut input, (address, rkey)),
        }
        network.advance(1);
        let mut completions = [Completion::default(); 16];
        let count = poller.poll(&mut completions).expect("a CQ");
        for completion in &completions[..count] {
            heard += 1;
            ends += usize::from(completion.status != WcStatus::Success);
        }
    }
    wire.cut();
    for _ in 0..32 {
        network.advance(1);
        let mut completions = [Completion::default(); 16];
        heard += poller.poll(&mut completions).expect("a CQ");
    }
    // Each RECV completes. An unsignaled send that succeeded has no completion.
    assert!(heard >= usize::from(RECVS), "RECVs of a dead QP did not end: {heard}");
    assert!(heard <= usize::from(RECVS + sent), "more ends than WRs");
    let mut bytes = [0; REGION];
    secret.read(0, &mut bytes);
    assert_eq!(bytes, [SECRET; REGION], "memory that was not lent changed");
    true
}

/// A frame that names memory at `to`, or near it.
fn inject_frame(wire: &FaultyWire, input: &mut Input<'_>, to: (u64, u32)) {
    let (address, rkey) = to;
    let kind = 1 + input.below(8);
    let (flags, len) = (input.below(2), u32::from(input.u16() & 0x1fff));
    let mut header = [0; HEADER];
    (header[0], header[1]) = (kind, flags);
    header[4..8].copy_from_slice(&len.to_le_bytes());
    header[8..12].copy_from_slice(&u32::from(input.u8()).to_le_bytes());
    header[12..16].copy_from_slice(&u32::from(input.u8()).to_le_bytes());
    let key = rkey ^ u32::from(input.u8() & 0x1f);
    header[16..20].copy_from_slice(&key.to_le_bytes());
    header[20..24].copy_from_slice(&u32::from(input.u8()).to_le_bytes());
    let to = address.wrapping_add(u64::from(input.u16()) & 0x1fff);
    header[24..32].copy_from_slice(&to.to_le_bytes());
    wire.inject(End::B, &header);
    if matches!(kind, 1..=3 | 5) {
        let least = len.min(256) as usize;
        let mut payload = input.bytes(least).to_vec();
        if input.flag() {
            payload.resize(len as usize, 0xee);
        }
        wire.inject(End::B, &payload);
    }
}

fn far_buffer(input: &mut Input<'_>) -> rblk_fabric::RemoteBuffer {
    rblk_fabric::RemoteBuffer { addr: 0, rkey: rblk_fabric::Rkey(u32::from(input.u8())) }
}

/// A header, and frames of each kind.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let mut header = [0; HEADER];
    (header[0], header[4]) = (1, 64);
    let mut seeds = vec![[&[0], &header[..]].concat()];
    for kind in 0..8 {
        seeds.push([&[1, 1, 0, 0, 0, 1, 7, kind, 0, 64, 0, 0, 0, 0, 0, 0][..], &[1; 80]].concat());
    }
    seeds
}
