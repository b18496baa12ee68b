use super::*;

#[test]
fn cells_are_measured_by_the_queues_they_need() {
    let cell = |depth, jobs, queues| Cell::new("randread", 4096, depth, jobs, queues, 100);
    let shallow = [cell(1, 1, 1), cell(128, 1, 1)];
    let deep = [cell(8, 64, 1), cell(129, 1, 1)];
    let two = [cell(2, 128, 2), cell(1, 1, 2)];
    let groups = by_shape(&[shallow.as_slice(), &deep, &two].concat());
    assert_eq!(groups[&(1, QUEUE_DEPTH)], shallow);
    assert_eq!(groups[&(1, QUEUE_DEPTH_DEEP)], deep);
    assert_eq!(groups[&(2, QUEUE_DEPTH)], two);
    assert_eq!(groups.len(), 3);
}

#[test]
fn reasons_are_one_line() {
    let error = anyhow::anyhow!("b\n\n  c\n").context("a");
    assert_eq!(one_line(&error), "a: b; c");
}
