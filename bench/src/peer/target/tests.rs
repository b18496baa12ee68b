use super::*;

#[test]
fn addresses_are_urls() {
    let at = |text: &str| text.parse().unwrap();
    assert_eq!(url(Carrier::Verbs, at("10.9.0.1:7730")), "rdma://10.9.0.1:7730");
    assert_eq!(url(Carrier::Tcp, at("[::1]:7731")), "tcp://[::1]:7731");
}
