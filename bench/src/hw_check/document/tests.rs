use super::*;

fn document() -> Document {
    let mut section = Section::new(Part::Device);
    section.findings = vec![
        Finding::ok("port", "active"),
        Finding::warn("MTU", "1024 B of 4096 B".to_owned() + &" and more words".repeat(8))
            .fix("ip link set v0 mtu 4200"),
        Finding::fail("memlock", "64 KiB"),
        Finding::skip("PFC", "no ethtool"),
        Finding::ok("MR", "any size"),
    ];
    section.figures.insert("mtu_bytes".to_owned(), 1024.0);
    Document { schema: SCHEMA, sections: vec![section], ..Document::default() }
}

#[test]
fn lines_are_at_most_as_long_as_a_terminal_is_wide() {
    let text = document().sections[0].to_string();
    assert!(text.lines().all(|line| line.chars().count() <= COLUMNS), "{text}");
    assert!(text.contains("  ok    port     active\n"), "{text}");
    assert!(text.contains("  FAIL  memlock  64 KiB\n"), "{text}");
    let words: Vec<&str> = text.split_whitespace().collect();
    assert!(words.join(" ").contains("Try: ip link set v0 mtu 4200"), "{text}");
}

#[test]
fn programs_get_counts_and_figures() {
    let json = document().to_json();
    assert_eq!(json["failures"], 1);
    assert_eq!(json["warnings"], 1);
    assert_eq!(json["sections"][0]["part"], "device");
    assert_eq!(json["sections"][0]["figures"]["mtu_bytes"], 1024.0);
    assert_eq!(json["sections"][0]["findings"][1]["fix"], "ip link set v0 mtu 4200");
    assert_eq!(document().end(), "1 failure, 1 warning\n");
}
