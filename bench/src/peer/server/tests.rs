use super::*;

#[test]
fn both_programs_are_told_where_to_listen() {
    let tcp = NbdSocket::Tcp("127.0.0.1:10810".parse().unwrap());
    let unix = NbdSocket::Unix("/x/s".into());
    let words = |qemu, at| child::words(&nbd_command(qemu, at, 4096).0);
    assert!(words(None, &tcp).ends_with("-i 127.0.0.1 -p 10810 memory 4096"));
    assert!(words(None, &unix).ends_with("-U /x/s memory 4096"));
    let qemu = Some(Path::new("/x/f"));
    assert!(words(qemu, &tcp).ends_with("-b 127.0.0.1 -p 10810 /x/f"));
    assert!(words(qemu, &unix).ends_with("-k /x/s /x/f"));
    let url = "iscsi://127.0.0.1:10830/iqn.2026-11.rblk-bench:target/1";
    assert_eq!(iscsi_url("127.0.0.1:10830".parse().unwrap()), url);
}

#[test]
fn a_place_that_is_in_use_is_refused() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = NbdSocket::Tcp(listener.local_addr().unwrap());
    let refused = Server::nbd(None, &at, 4096, "no-such-tag").unwrap_err();
    let text = refused.to_string();
    assert!(text.contains("listens at") || text.contains("install it"), "{text}");
}
