use super::*;

const LATENCY: &str = "\
---------------------------------------------------------------------------------------
                    Send Latency Test
 Dual-port       : OFF\t\tDevice         : rxe0
 Mtu             : 4096[B]
 local address: LID 0000 QPN 0x0011 PSN 0xaa3cd8
---------------------------------------------------------------------------------------
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] 
 64      1000          40.12          1033.10      47.71      \t       49.23       \t33.31\t\t80.05   \t\t1033.10
---------------------------------------------------------------------------------------
";

const BANDWIDTH: &str = "\
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 131072     2829             0.00               117.42\t\t   0.000939
---------------------------------------------------------------------------------------
";

fn get(columns: &BTreeMap<String, f64>, name: &str) -> Option<f64> {
    columns.get(name).copied()
}

#[test]
fn columns_go_by_their_names() {
    let latency = columns(LATENCY).unwrap();
    assert_eq!(get(&latency, "t_avg[usec]"), Some(49.23));
    assert_eq!(get(&latency, "99% percentile[usec]"), Some(80.05));
    assert_eq!(get(&latency, "99.9% percentile[usec]"), Some(1033.10));
    assert_eq!(get(&latency, "BW average[MB/sec]"), None);
    let bandwidth = columns(BANDWIDTH).unwrap();
    assert_eq!(get(&bandwidth, "BW average[MB/sec]"), Some(117.42));
    assert_eq!(get(&bandwidth, "#bytes"), Some(131_072.0));
}

#[test]
fn what_has_no_numbers_has_no_columns() {
    assert_eq!(columns("Couldn't connect to 10.9.0.1:18515\n"), None);
    assert_eq!(columns("1 2 3\n"), None);
    let head = BANDWIDTH.lines().next().unwrap();
    assert_eq!(columns(head), None);
}

#[test]
fn listeners_are_told_from_connections() {
    let table = "\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid
   0: 0100007F:4853 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0
   1: 0100007F:1F90 0100007F:4854 01 00000000:00000000 00:00000000 00000000     0
";
    assert!(has_listener(table, 0x4853));
    assert!(!has_listener(table, 0x1F90));
    assert!(!has_listener(table, 0x4854));
    assert!(!has_listener("", 1));
}
