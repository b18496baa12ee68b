//! [`FencedClient`]: a client that a cluster has fenced, as its monitors list it.

use std::ffi::c_char;
use std::ptr;
use std::time::{SystemTime, UNIX_EPOCH};

use nix::errno::Errno;
use serde::Deserialize;

use crate::store::rbd::cluster::{Cluster, checked, text};

/// The command that lists fenced clients, for the monitors.
const LIST: &str = r#"{"prefix": "osd blocklist ls", "format": "json"}"#;
/// Seconds of a year.
const YEAR: u64 = 31_556_952;
/// How long a former owner stays fenced: longer than any machine is suspended.
pub(in crate::store::rbd) const FENCE_SECONDS: u32 = 10 * 365 * 24 * 60 * 60;

/// See the module.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Deserialize)]
pub(crate) struct FencedClient {
    /// Its address.
    #[serde(rename = "addr")]
    pub address: String,
    /// When the fence ends, as Ceph writes the time.
    pub until: String,
}

impl FencedClient {
    /// Those of a cluster.
    pub(in crate::store::rbd) fn list(cluster: &Cluster) -> Result<Vec<Self>, Errno> {
        in_answer(&ask_monitors(cluster, LIST)?).ok_or(Errno::EBADMSG)
    }

    /// Whether its fence is of a group. Groups fence for ten years, and others for hours. Ceph
    /// writes the year first.
    pub(crate) fn is_long(&self, now: SystemTime) -> bool {
        let now = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let year = self.until.split('-').next().and_then(|year| year.parse::<u64>().ok());
        year.is_some_and(|year| year > 1970 + now / YEAR + 1)
    }
}

/// Warns of former owners whose fences end too soon. The first fence of a client counts until its
/// end: one that another program made is not made longer.
pub(in crate::store::rbd) fn warn_of_short_fences(cluster: &Cluster, former: &[String]) {
    if former.is_empty() {
        return;
    }
    let listed = FencedClient::list(cluster);
    let listed = listed.inspect_err(|errno| tracing::debug!(%errno, "cannot list fenced clients"));
    for FencedClient { address, until } in short_in(listed.unwrap_or_default(), former) {
        tracing::warn!(
            client = address,
            until,
            "another program fenced a former owner, and not for ten years: if its process still runs then, end the \
             process before, or it may write again"
        );
    }
}

fn short_in(listed: Vec<FencedClient>, former: &[String]) -> Vec<FencedClient> {
    let now = SystemTime::now();
    listed.into_iter().filter(|one| former.contains(&one.address) && !one.is_long(now)).collect()
}

fn ask_monitors(cluster: &Cluster, command: &str) -> Result<Vec<u8>, Errno> {
    let library = cluster.library();
    let command = text(command);
    let mut commands = [command.as_ptr()];
    let (mut answer, mut len) = (ptr::null_mut::<c_char>(), 0_usize);
    // SAFETY: a connected cluster; the command lives as long as the call, which writes an
    // address and a length. Nobody asks for the words beside the answer.
    let asked = checked(unsafe {
        (library.rados_mon_command)(
            cluster.handle(),
            commands.as_mut_ptr(),
            commands.len(),
            ptr::null(),
            0,
            &raw mut answer,
            &raw mut len,
            ptr::null_mut(),
            ptr::null_mut(),
        )
    });
    let bytes = match answer.is_null() {
        true => Vec::new(),
        // SAFETY: the call has made so many bytes there.
        false => unsafe { std::slice::from_raw_parts(answer.cast::<u8>(), len) }.to_vec(),
    };
    if !answer.is_null() {
        // SAFETY: made by the call, and nothing uses it any more.
        unsafe { (library.rados_buffer_free)(answer) };
    }
    asked.map(|_| bytes)
}

/// The fenced clients in an answer of the monitors. A second list, of fenced ranges of addresses,
/// stands behind that of clients.
fn in_answer(answer: &[u8]) -> Option<Vec<FencedClient>> {
    serde_json::Deserializer::from_slice(answer).into_iter().next()?.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fenced_clients_are_the_first_list() {
        let answer = br#"
[{"addr":"127.0.0.1:0/123","until":"2036-11-26T13:23:23.382052+0000"}][]"#;
        let fenced = in_answer(answer).unwrap();
        let [FencedClient { address, until }] = &fenced[..] else { panic!("{fenced:?}") };
        assert_eq!((address.as_str(), &until[..4]), ("127.0.0.1:0/123", "2036"));
        assert_eq!(in_answer(b"[][]"), Some(Vec::new()));
        assert_eq!(in_answer(b"[][{\"range\":\"10.0.0.0/8\"}]"), Some(Vec::new()));
        assert_eq!(in_answer(b""), None);
        assert_eq!(in_answer(b"{}"), None);
    }

    fn client(address: &str, until: &str) -> FencedClient {
        FencedClient { address: address.to_owned(), until: until.to_owned() }
    }

    #[test]
    fn a_fence_of_ten_years_is_of_a_group_and_one_of_an_hour_is_not() {
        let now = UNIX_EPOCH + std::time::Duration::from_secs(1_796_000_000);
        let is_long = |until| client("c", until).is_long(now);
        assert!(is_long("2036-11-26T12:19:25.132226+0000"));
        assert!(!is_long("2026-11-29T13:19:25.132226+0000"));
        assert!(!is_long("2027-01-01T00:00:00.000000+0000"));
        assert!(!is_long(""));
    }

    #[test]
    fn a_former_owner_that_another_program_fenced_for_an_hour_is_named() {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let this_year = 1970 + now / YEAR;
        let until = |year| format!("{year}-06-01T12:00:00.000000+0000");
        let short = client("a:0/1", &until(this_year));
        let listed = vec![
            short.clone(),
            client("a:0/2", &until(this_year + 10)),
            client("a:0/3", &until(this_year)),
        ];
        let former = ["a:0/1".to_owned(), "a:0/2".to_owned(), "a:0/9".to_owned()];
        assert_eq!(short_in(listed.clone(), &former), [short]);
        assert_eq!(short_in(listed, &[]), []);
    }
}
