use super::*;

#[test]
fn the_histogram_is_read() {
    let text = "# event histogram\n#\n# trigger info: hist:keys=common_pid,id:vals=hitcount\n\n\
                { common_pid:        123, id:          1 } hitcount:         10\n\
                { common_pid:        123, id:        426 } hitcount:          5\n\
                { common_pid:       2437, id:         24 } hitcount:          7\n\n\
                Totals:\n    Hits: 22\n    Entries: 3\n    Dropped: 0\n";
    assert_eq!(parse(text), [(123, 10), (123, 5), (2437, 7)]);
}
