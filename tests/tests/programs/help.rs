//! The help of every command fits the terminal, and no paragraph of it is broken twice: by hand and
//! by the terminal.

use std::process::Command;

use rblk_tests::program::{program, run};

fn help(name: &str, command: &[&str], columns: usize) -> String {
    let mut process = Command::new(program(name));
    process.args(command).arg("--help").env("COLUMNS", columns.to_string());
    let ended = run(&mut process);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    ended.stdout
}

/// The words under `Commands:`.
fn commands(help: &str) -> Vec<String> {
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let lines = lines.take_while(|line| !line.is_empty());
    let names = lines.filter(|line| !line.starts_with("    "));
    names.filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect()
}

/// Lines that end too early: the first word of the next line would fit. Lists begin their lines
/// with a space.
fn broken_early(help: &str, columns: usize) -> Vec<String> {
    let lines: Vec<&str> = help.lines().collect();
    let pairs = lines.windows(2).filter(|pair| {
        let [line, next] = pair else { return false };
        let is_text = |line: &str| !line.is_empty() && !line.starts_with(' ');
        let word = next.split(' ').next().unwrap_or_default().len();
        is_text(line) && is_text(next) && line.len() + 1 + word <= columns
    });
    pairs.map(|pair| pair.join(" | ")).collect()
}

#[test]
fn help_fits_the_terminal() {
    for name in ["rblk-target", "rblk-initiator"] {
        let known = commands(&help(name, &[], 100));
        assert!(known.len() >= 6, "{name}: {known:?}");
        let all = std::iter::once(Vec::new()).chain(known.iter().map(|command| vec![&**command]));
        for command in all.filter(|command| command != &["help"]) {
            for columns in [80, 100, 200] {
                let text = help(name, &command, columns);
                let columns = columns.min(100);
                let long: Vec<&str> = text.lines().filter(|line| line.len() > columns).collect();
                assert_eq!(long, Vec::<&str>::new(), "{name} {command:?} at {columns} columns");
                let broken = broken_early(&text, columns);
                assert_eq!(broken, Vec::<String>::new(), "{name} {command:?} at {columns} columns");
            }
        }
    }
}
