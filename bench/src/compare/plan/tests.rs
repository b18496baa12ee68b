use super::*;

fn keys(cells: &[Cell]) -> Vec<&str> {
    cells.iter().map(|cell| cell.key.as_str()).collect()
}

#[test]
fn every_key_of_a_set_is_a_key() {
    for name in ["smoke", "gate", "full", "jobs"] {
        for queues in [1, 4] {
            for cell in set(name, queues).unwrap() {
                assert_eq!(parse(&cell.key).as_ref(), Some(&cell));
            }
        }
    }
    assert_eq!(set("gate", 1).unwrap().len(), 6);
    assert_eq!(set("full", 1).unwrap().len(), 13);
}

#[test]
fn keys_that_are_none_are_refused() {
    for key in [
        "",
        "gates",
        "randread",
        "randread-4k",
        "randread-4k-qd0-j1-q1",
        "randread-4g-qd1-j1-q1",
        "randread-100-qd1-j1-q1",
        "randread-4k-qd1-j1-q1-x1",
        "randrw101-4k-qd1-j1-q1",
        "trim-4k-qd1-j1-q1",
        "read-99999999999999999999m-qd1-j1-q1",
    ] {
        assert!(cell(key).is_err(), "{key}");
    }
}

#[test]
fn sets_and_keys_make_a_list_without_doubles() {
    let all = cells("gate,randread-4k-qd1-j1-q1,randrw50-4k-qd4-j2-q1", &[1, 2]).unwrap();
    assert_eq!(all.len(), 13);
    assert_eq!(keys(&all)[6], "randread-4k-qd1-j1-q2");
    assert_eq!(keys(&all)[12], "randrw50-4k-qd4-j2-q1");
    assert_eq!(cells("full", &[1, 2, 4]).unwrap().len(), 13 + 6 + 6);
    assert!(cells(" , ", &[1]).is_err() && cells("gate", &[1, 0]).is_err());
}

#[test]
fn systems_are_told_by_keys() {
    let all = systems(&[], &[], &[], &[]).unwrap();
    assert_eq!(all.len(), system::DISKS.len() - 2);
    let mut with_file = systems(&["rblk-tcp".to_owned()], &[], &[], &[]).unwrap();
    add_local_file(&mut with_file);
    add_local_file(&mut with_file);
    let keys: Vec<_> = with_file.iter().map(|one| one.info.key.as_str()).collect();
    assert_eq!(keys, ["rblk-tcp", "local-file"]);
    let direct = keys_for(CompareEngine::Direct, &[]);
    assert_eq!(systems(&direct, &[], &[], &[]).unwrap().len(), system::ENGINES.len());
    assert!(keys_for(CompareEngine::Disk, &[]).is_empty());
    assert_eq!(keys_for(CompareEngine::Direct, &["nbd".to_owned()]), ["nbd"]);
    let one = |text: &str| [text.to_owned()];
    let given = systems(&[], &[], &one("/dev/ublkb0"), &one("nvme-rdma=/dev/nvme1n1")).unwrap();
    assert_eq!(given.len(), 2);
    assert_eq!(given[0].info.key, "rblk-verbs");
    assert_eq!((given[1].info.key.as_str(), given[1].info.family), ("nvme-rdma", Family::Kernel));
    let variants = systems(&one("local"), &one("one=tcp A=1"), &[], &[]).unwrap();
    assert_eq!(
        (variants[1].info.key.as_str(), variants[1].info.transport.as_str()),
        ("one", "tcp")
    );
    assert_eq!(systems(&one("none"), &one("one="), &[], &[]).unwrap().len(), 1);
    assert!(systems(&one("nvme"), &[], &[], &[]).is_err());
    assert!(systems(&one("local"), &one("local=tcp"), &[], &[]).is_err());
    assert!(systems(&[], &one("a/b=tcp"), &[], &[]).is_err());
}

#[test]
fn each_round_begins_with_another_system() {
    assert_eq!(order(3, 1), [0, 1, 2]);
    assert_eq!(order(3, 2), [1, 2, 0]);
    assert_eq!(order(3, 3), [2, 0, 1]);
    assert_eq!(order(3, 4), [2, 1, 0]);
    assert_eq!(order(0, 5), [0; 0]);
    assert_eq!(order(1, 2), [0]);
}
