use super::*;

#[test]
fn what_changed_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let class = dir.path().join("sys/class/infiniband/mlx5_0/ports/1");
    let put = |file: &str, value: &str| {
        let file = class.join(file);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, value).unwrap();
    };
    put("hw_counters/out_of_sequence", "3\n");
    put("hw_counters/lifespan", "10\n");
    put("counters/port_xmit_data", "N/A (no PMA)\n");
    let before = read(dir.path(), "mlx5_0", 1, "");
    assert_eq!(before.len(), 2);
    put("hw_counters/out_of_sequence", "5\n");
    put("hw_counters/lifespan", "12\n");
    put("hw_counters/appeared", "7\n");
    let after = read(dir.path(), "mlx5_0", 1, "");
    assert_eq!(changed(&before, &after), [("out_of_sequence".to_owned(), 2)]);
    // One that was reset meanwhile.
    assert!(changed(&after, &before).is_empty());
}

#[test]
fn ethtool_is_understood() {
    let text = "NIC statistics:\n     rx_prio3_pause: 12\n     [0]: rx_bytes: 7\n  x: y\n";
    let all = of_ethtool(text);
    assert_eq!(all.get("rx_prio3_pause"), Some(&12));
    assert_eq!(all.get("[0]: rx_bytes"), Some(&7));
    assert_eq!(all.len(), 2);
}
