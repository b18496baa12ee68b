use super::*;

#[test]
fn the_target_gets_the_first_processor() {
    let set = |cpus: &[usize]| {
        let mut set = CpuSet::new();
        cpus.iter().for_each(|cpu| set.set(*cpu).unwrap());
        set
    };
    assert_eq!(split(&set(&[2, 5, 7])), Some((set(&[2]), set(&[5, 7]))));
    assert_eq!(split(&set(&[3])), None);
    assert_eq!(split(&set(&[])), None);
}

#[test]
fn a_process_tells_its_threads() {
    assert!(threads_of(std::process::id()).unwrap().contains(&gettid()));
    assert!(threads_of(u32::MAX).is_err());
}
