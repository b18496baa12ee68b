//! docs/install.md has the faults of ublk that the programs know, and the verdict of `doctor` for
//! each kernel that the lab has tried (`tests/tests/lab/kernels.rs`).

use rblk_operate::ublk_faults::{Certainty, judge, known};

use crate::markdown::Document;

pub(crate) fn faults(install: &Document) -> Vec<String> {
    let rows = |heading: &str| install.rows(heading).into_iter().skip(1).collect::<Vec<_>>();
    let plain = |cell: &String| cell.trim_matches('`').to_owned();
    let said: Vec<Vec<String>> =
        rows("### Known faults").iter().map(|row| row.iter().map(plain).collect()).collect();
    let mut faults = Vec::new();
    if said != known() {
        faults.push(format!("### Known faults: the programs know {:#?}", known()));
    }
    let tried = rows("### Tried kernels");
    if tried.is_empty() {
        faults.push("### Tried kernels: no row".to_owned());
    }
    for row in tried {
        let expected = doctor(&row[0]);
        if row.last() != Some(&expected) {
            faults.push(format!("### Tried kernels: of {} `doctor` says {expected}", row[0]));
        }
    }
    faults
}

/// The words of `doctor` about a kernel of Debian.
fn doctor(kernel: &str) -> String {
    let release = format!("{kernel}-amd64");
    let found = judge(&release, false);
    let words: Vec<String> = found
        .iter()
        .map(|fault| {
            let verdict = match fault.certainty {
                Certainty::Certain => "fail",
                Certainty::Possible => "warn",
            };
            fault.to_string().replace(&format!("Linux {release}"), verdict)
        })
        .collect();
    if words.is_empty() { "ok".to_owned() } else { words.join("; ") }
}

#[test]
fn a_missing_fault_and_a_wrong_kernel_are_found() {
    let of = |faults_row: &str, kernel_row: &str| {
        let text = format!(
            "### Known faults\n\n| from | what | good |\n| --- | --- | --- |\n{faults_row}\n\n\
             ### Tried kernels\n\n| kernel | says |\n| --- | --- |\n{kernel_row}\n"
        );
        faults(&Document { path: "x.md".to_owned(), text })
    };
    let known: Vec<String> = known().iter().map(|row| format!("| {} |", row.join(" | "))).collect();
    assert_eq!(of(&known.join("\n"), "| 7.2.12+deb13 | ok |"), Vec::<String>::new());
    assert_eq!(of(&known[1..].join("\n"), "| 7.2.12+deb13 | ok |").len(), 1);
    assert_eq!(of(&known.join("\n"), "| 6.18.5+deb13 | ok |").len(), 1);
    assert_eq!(of(&known.join("\n"), "").len(), 1, "an empty table");
}
