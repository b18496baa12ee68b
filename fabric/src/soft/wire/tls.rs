//! Kernel TLS (kTLS): the kernel encrypts the stream of a socket, as TLS 1.3 records with
//! ChaCha20-Poly1305.
//!
//! There is no TLS handshake. The keys come from outside ([`CipherKeys`](crate::CipherKeys)), and
//! both ends switch at the same place of the stream: behind the reply of the acceptor. Sources: the
//! kernel's `Documentation/networking/tls.rst` and `include/uapi/linux/tls.h`; RFC 8446, section 5.
//!
//! # Contract
//!
//! - [`attach`], then [`encrypt_receive`] and [`encrypt_send`], each once, in any order. There is
//!   no way back to plain bytes.
//! - Bytes that were sent before [`encrypt_send`] are plain, and bytes that are in the socket and
//!   not read at [`encrypt_receive`] are taken for records.
//! - The calls that move bytes stay the same: `send`, `sendmsg`, `recv`, `recvmsg`, epoll. A record
//!   has at most 16 KiB. The kernel keeps the rest of a record that was read in part, and then the
//!   socket is readable.
//! - The kernel returns no byte of a record that does not prove itself. It may have written such
//!   bytes into the buffers of the call. So a buffer counts for as much as the call returns, and no
//!   call may touch the buffer later.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::OnceLock;
use std::time::Duration;

use rblk_protocol::width::narrow;
use zeroize::Zeroizing;

use crate::connect::cipher_keys::CipherKey;

/// Bytes of `struct tls12_crypto_info_chacha20_poly1305`.
const CRYPTO_INFO: usize = size_of::<libc::tls12_crypto_info_chacha20_poly1305>();

/// How long the connection to this host may take that tries TLS.
const TRIAL: Duration = Duration::from_secs(1);

/// The failed call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum TlsStep {
    /// A connection to this host, to try TLS on.
    Trial,
    /// The socket takes the protocol `tls`.
    Attach,
    /// The keys of a direction.
    Keys,
    /// The connection has no socket.
    Socket,
}

/// Why a connection cannot be encrypted. The text names the fix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoTls {
    step: TlsStep,
    errno: i32,
}

impl NoTls {
    /// The connection is not over TCP.
    pub(super) fn no_socket() -> Self {
        Self { step: TlsStep::Socket, errno: libc::EOPNOTSUPP }
    }

    fn new(step: TlsStep, error: &io::Error) -> Self {
        Self { step, errno: error.raw_os_error().unwrap_or(libc::EIO) }
    }
}

impl fmt::Display for NoTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let error = io::Error::from_raw_os_error(self.errno);
        match (self.step, self.errno) {
            (TlsStep::Trial, _) => {
                write!(f, "no loopback connection to try TLS of the kernel on ({error}): is `lo` up?")
            }
            (TlsStep::Attach, libc::ENOENT | libc::ENOPROTOOPT) => f.write_str(
                "this kernel has no TLS: run `modprobe tls`, name `tls` in /etc/modules-load.d/rblk.conf, and start this program again",
            ),
            (TlsStep::Attach, libc::ENOTCONN) => f.write_str("the peer closed the connection"),
            (TlsStep::Attach, _) => write!(f, "setsockopt(TCP_ULP, \"tls\") failed: {error}"),
            (TlsStep::Keys, libc::EINVAL | libc::ENOPROTOOPT) => f.write_str(
                "TLS of this kernel has no ChaCha20-Poly1305: it needs Linux 5.11 or later",
            ),
            (TlsStep::Keys, libc::ENOENT) => f.write_str(
                "this kernel has no ChaCha20-Poly1305 (a kernel in FIPS mode refuses it): run `modprobe chacha20poly1305`, and start this program again",
            ),
            (TlsStep::Keys, _) => write!(f, "setsockopt(TLS_TX or TLS_RX) failed: {error}"),
            (TlsStep::Socket, _) => f.write_str("only tcp:// connections can be encrypted"),
        }
    }
}

impl std::error::Error for NoTls {}

/// Whether this kernel can encrypt TCP connections. The first call tries it, on a connection of
/// this host to itself; later calls return the first result.
///
/// # Errors
/// The missing part of the kernel, with the fix.
pub fn kernel_has_tls() -> Result<(), NoTls> {
    static FOUND: OnceLock<Result<(), NoTls>> = OnceLock::new();
    *FOUND.get_or_init(try_tls)
}

/// Tries all settings on a spare connection, with a throwaway key.
fn try_tls() -> Result<(), NoTls> {
    let failed = |error: io::Error| NoTls::new(TlsStep::Trial, &error);
    let any_port = [(Ipv4Addr::LOCALHOST, 0).into(), (Ipv6Addr::LOCALHOST, 0).into()];
    let listener = TcpListener::bind(&any_port[..]).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    // The kernel completes the connection; no accept is needed.
    let stream = TcpStream::connect_timeout(&address, TRIAL).map_err(failed)?;
    let key = CipherKey::new(&[0; CipherKey::KEY], &[0; CipherKey::IV]);
    attach(&stream)?;
    encrypt_send(&stream, &key)?;
    encrypt_receive(&stream, &key)
}

/// Gives the socket to TLS. Bytes stay plain until a direction has its key.
pub(super) fn attach(stream: &TcpStream) -> Result<(), NoTls> {
    set(stream, libc::SOL_TCP, libc::TCP_ULP, b"tls")
        .map_err(|error| NoTls::new(TlsStep::Attach, &error))
}

/// All further outgoing bytes go out as records.
pub(super) fn encrypt_send(stream: &TcpStream, key: &CipherKey) -> Result<(), NoTls> {
    set(stream, libc::SOL_TLS, libc::TLS_TX, &*crypto_info(key))
        .map_err(|error| NoTls::new(TlsStep::Keys, &error))
}

/// All further incoming bytes must be records.
pub(super) fn encrypt_receive(stream: &TcpStream, key: &CipherKey) -> Result<(), NoTls> {
    set(stream, libc::SOL_TLS, libc::TLS_RX, &*crypto_info(key))
        .map_err(|error| NoTls::new(TlsStep::Keys, &error))?;
    // Our records are not padded. When the kernel knows that, it decrypts into the buffers of the
    // call (Linux 6.0); else it copies. It copies a padded record in any case, so the promise is
    // for speed alone, and a kernel that does not know the option serves as well.
    let _ = set(stream, libc::SOL_TLS, libc::TLS_RX_EXPECT_NO_PAD, &1_u32.to_ne_bytes());
    Ok(())
}

/// `struct tls12_crypto_info_chacha20_poly1305`, for the first record of a direction: version,
/// cipher, IV, key, no salt, number of the record.
fn crypto_info(key: &CipherKey) -> Zeroizing<[u8; CRYPTO_INFO]> {
    let mut info = Zeroizing::new([0; CRYPTO_INFO]);
    info[..2].copy_from_slice(&libc::TLS_1_3_VERSION.to_ne_bytes());
    info[2..4].copy_from_slice(&libc::TLS_CIPHER_CHACHA20_POLY1305.to_ne_bytes());
    info[4..16].copy_from_slice(key.iv());
    info[16..48].copy_from_slice(key.key());
    info
}

fn set(stream: &TcpStream, level: i32, name: i32, value: &[u8]) -> io::Result<()> {
    let len = narrow(value.len());
    // SAFETY: the descriptor is open while `stream` is borrowed; the kernel reads `len` bytes of
    // `value`, and nothing after the call.
    let result =
        unsafe { libc::setsockopt(stream.as_raw_fd(), level, name, value.as_ptr().cast(), len) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A record that the peer did not make, or that no peer of ours makes. As an
/// [`io::Error`] its kind is `InvalidData`, which no errno has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::soft) struct BadRecord(&'static str);

impl BadRecord {
    /// The fault of the peer's records behind a failed receive of an encrypted socket, if there is
    /// one.
    pub(super) fn of(errno: i32) -> Option<Self> {
        // The errnos are those of net/tls/tls_sw.c and tls_strp.c.
        Some(Self(match errno {
            libc::EBADMSG => {
                "a TLS record does not prove itself: it was changed on its way, or the keys differ"
            }
            libc::EMSGSIZE => "a TLS record is too long",
            libc::EINVAL => "plain bytes came where a TLS record must be",
            libc::EIO => "a TLS alert or handshake came in the place of data",
            libc::EKEYEXPIRED => "the peer asks for new TLS keys",
            _ => return None,
        }))
    }

    /// Whether that error is one.
    pub(in crate::soft) fn is(error: &io::Error) -> bool {
        error.get_ref().is_some_and(|inner| inner.is::<Self>())
    }
}

impl fmt::Display for BadRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for BadRecord {}

impl From<BadRecord> for io::Error {
    fn from(bad: BadRecord) -> Self {
        Self::new(io::ErrorKind::InvalidData, bad)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_laid_out_as_the_kernel_reads_them() {
        let mut key = [0; 32];
        let mut iv = [0; 12];
        for (at, byte) in (0..).zip(&mut key) {
            *byte = 0x80 + at;
        }
        for (at, byte) in (0..).zip(&mut iv) {
            *byte = 0x40 + at;
        }
        let info = crypto_info(&CipherKey::new(&key, &iv));
        assert_eq!(info.len(), 56);
        assert_eq!(u16::from_ne_bytes([info[0], info[1]]), 0x0304, "TLS 1.3");
        assert_eq!(u16::from_ne_bytes([info[2], info[3]]), 54, "ChaCha20-Poly1305");
        assert_eq!(info[4..16], iv);
        assert_eq!(info[16..48], key);
        assert_eq!(info[48..], [0; 8], "the first record has number 0");
        assert_eq!(std::mem::offset_of!(libc::tls12_crypto_info_chacha20_poly1305, iv), 4);
        assert_eq!(std::mem::offset_of!(libc::tls12_crypto_info_chacha20_poly1305, key), 16);
        assert_eq!(std::mem::offset_of!(libc::tls12_crypto_info_chacha20_poly1305, rec_seq), 48);
    }

    #[test]
    fn each_refusal_names_the_fix() {
        for (step, errno, words) in [
            (TlsStep::Trial, libc::EADDRNOTAVAIL, "is `lo` up?"),
            (TlsStep::Attach, libc::ENOENT, "`modprobe tls`"),
            (TlsStep::Attach, libc::ENOPROTOOPT, "`modprobe tls`"),
            (TlsStep::Attach, libc::ENOTCONN, "the peer closed"),
            (TlsStep::Attach, libc::EEXIST, "TCP_ULP"),
            (TlsStep::Keys, libc::EINVAL, "Linux 5.11"),
            (TlsStep::Keys, libc::ENOENT, "`modprobe chacha20poly1305`"),
            (TlsStep::Keys, libc::ENOMEM, "Cannot allocate memory"),
            (TlsStep::Socket, libc::EOPNOTSUPP, "tcp://"),
        ] {
            let text = NoTls { step, errno }.to_string();
            assert!(text.contains(words), "{step:?} {errno}: {text}");
        }
    }

    #[test]
    fn the_kernel_is_asked_once_and_says_what_it_lacks() {
        let found = kernel_has_tls();
        assert_eq!(found, kernel_has_tls());
        // Which of the two depends on the host; each is checked.
        match found {
            Ok(()) => assert_eq!(try_tls(), Ok(())),
            Err(lack) => {
                assert_eq!(try_tls(), Err(lack));
                assert!(!lack.to_string().is_empty());
            }
        }
    }

    #[test]
    fn only_what_records_do_is_a_bad_record() {
        for errno in [libc::EBADMSG, libc::EMSGSIZE, libc::EINVAL, libc::EIO, libc::EKEYEXPIRED] {
            assert!(BadRecord::is(&BadRecord::of(errno).unwrap().into()), "{errno}");
            assert!(
                !BadRecord::is(&io::Error::from_raw_os_error(errno)),
                "a plain socket's {errno}"
            );
        }
        for errno in [libc::EAGAIN, libc::EINTR, libc::ECONNRESET, libc::ETIMEDOUT, libc::EPIPE] {
            assert_eq!(BadRecord::of(errno), None);
        }
    }
}
