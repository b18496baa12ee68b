//! Samples of output: headers of tables match the programs' here; any other line is one of the
//! texts in their sources.

use std::fs::{self, File};
use std::process::Command;

use rblk_protocol::auth::PublicKey;
use rblk_tests::guest::Served;
use rblk_tests::program::{Client, Target, program, run};

use crate::commands::typed;
use crate::literals::Literals;
use crate::markdown::{Block, Document, cells, code_spans};

/// Names of columns that have two words.
const TWO_WORDS: [&str; 12] = [
    "p99 R",
    "p99 W",
    "IN USE",
    "HELD BY",
    "USED BY",
    "CACHE OF",
    "BACKING OF",
    "LATENCY OF",
    "STORE ERRORS",
    "STORE P99",
    "IN FLIGHT",
    "SENT AGAIN",
];
/// Names of columns with small letters.
const MIXED: [&str; 11] =
    ["R/s", "W/s", "MiB/s", "rMiB/s", "wMiB/s", "p99", "rP50", "rP99", "wP50", "wP99", "IN"];

/// The output of the programs.
pub(crate) struct Real {
    headers: Vec<String>,
    status: Vec<String>,
    details: Vec<String>,
    literals: Literals,
}

impl Real {
    /// Asks the programs: a target with a volume in use, and this host's mounts.
    pub(crate) fn collect() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("vol0.img");
        File::create(&path).and_then(|file| file.set_len(1 << 20)).expect("a file");
        let target = Target::start(dir.path(), &["--file", &format!("vol0={}", path.display())]);
        let client = Client::connect(&target.address, "vol0", 1).expect("a session");
        let address = target.address.to_string();
        let socket = target.socket.display().to_string();
        let status = output("rblk-target", &["status", "--control-socket", &socket]);
        let discover = output("rblk-initiator", &["discover", &address]);
        let list = output("rblk-initiator", &["list"]);
        let details = output("rblk-target", &["status", "-v", "--control-socket", &socket]);
        let top = output("rblk-target", &["top", "--once", "--control-socket", &socket]);
        client.logout();
        let config = dir.path().join("target.toml");
        fs::write(&config, "listen = ['tcp://[::]']\n").expect("a file");
        let hosts = ["host", "list", "--config", &config.display().to_string()];
        let hosts = output("rblk-target", &hosts);
        // Nobody listens at the second address. The mount has two paths all the same.
        let paths = ["--path", "tcp://127.0.0.1:1", "--paths", "all"];
        let served = Served::start(dir.path(), &address, "vol0", &paths);
        let paths = [
            output("rblk-initiator", &["list"]),
            output("rblk-initiator", &["status", served.name()]),
        ];
        let lines = [&status, &discover, &list, &hosts, &details, &top];
        let lines = lines.into_iter().chain(&paths).flatten();
        let headers = lines.filter(|line| is_header(line)).map(|line| columns(line));
        let headers: Vec<String> = headers.collect();
        assert!(headers.len() >= 12, "{headers:?}");
        let [status, details] = [&status, &details].map(|lines| skeleton(lines));
        Self { headers, status, details, literals: Literals::collect() }
    }
}

fn output(name: &str, args: &[&str]) -> Vec<String> {
    let ended = run(Command::new(program(name)).args(args));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    ended.stdout.lines().map(str::to_owned).collect()
}

pub(crate) fn faults(documents: &[Document], real: &Real) -> Vec<String> {
    let blocks: Vec<Block> = documents.iter().flat_map(|d| d.blocks(&["console"])).collect();
    assert!(blocks.len() >= 8, "only {} samples were found", blocks.len());
    let headers = blocks.iter().flat_map(|block| &block.lines).filter(|line| is_header(line));
    assert!(headers.count() >= 5, "too few tables were found");
    blocks.iter().flat_map(|block| in_block(block, real)).collect()
}

fn in_block(block: &Block, real: &Real) -> Vec<String> {
    let mut faults = Vec::new();
    let mut command = "";
    let mut columns = None;
    let mut said = Vec::new();
    for line in &block.lines {
        if let Some(next) = typed(line) {
            (command, columns) = (next, None);
            continue;
        }
        if command.starts_with("rblk-target status") {
            said.push(line.clone());
        }
        let fault = if line.is_empty() {
            columns = None;
            None
        } else if is_header(line) {
            columns = Some(columns_of(line));
            header_fault(line, &real.headers)
        } else if let Some(columns) = columns.filter(|_| !line.contains(": ")) {
            // The last cell may be empty.
            let fields = line.split_whitespace().count();
            (fields + 1 < columns).then(|| format!("{fields} fields for {columns} columns"))
        } else {
            (!is_told(line, command, &real.literals)).then(|| "no program prints this".to_owned())
        };
        faults.extend(fault.map(|why| format!("{}: `{line}`: {why}", block.place)));
    }
    let found = skeleton(&said);
    // A sample may have further tables, and may show a fault.
    let is_of = |real: &Vec<String>| real.iter().all(|word| found.contains(word));
    if !said.is_empty() && !is_of(&real.status) && !is_of(&real.details) {
        let real = &real.status;
        faults.push(format!("{}: lines {found:?}, status has {real:?}", block.place));
    }
    faults
}

fn header_fault(line: &str, real: &[String]) -> Option<String> {
    // Columns are as wide as their cells.
    let line = columns(line);
    let is_real = real.contains(&line);
    let first = line.split(' ').next();
    let alike = real.iter().find(|header| header.split(' ').next() == first);
    (!is_real).then(|| format!("the programs print `{}`", alike.map_or("nothing", |h| h.as_str())))
}

/// A line of the names of columns.
fn is_header(line: &str) -> bool {
    let is_name = |word: &str| {
        let is_upper = |c: char| c.is_ascii_uppercase() || c == '-' || c.is_ascii_digit();
        MIXED.contains(&word) || word.chars().all(is_upper) && !word.starts_with(is_digit)
    };
    line.len() > 20 && line.split_whitespace().all(is_name) && line.split_whitespace().count() > 2
}

fn is_digit(c: char) -> bool {
    c.is_ascii_digit() || c == '-'
}

/// The names of the columns of a header.
fn columns(header: &str) -> String {
    header.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn columns_of(header: &str) -> usize {
    let pairs = TWO_WORDS.iter().filter(|pair| header.contains(*pair)).count();
    header.split_whitespace().count() - pairs
}

/// Whether the program prints a line outside tables after that command.
fn is_told(line: &str, command: &str, literals: &Literals) -> bool {
    let program = command.split_whitespace().next().unwrap_or_default();
    if command.starts_with("rblk-initiator mount") && line.starts_with("/dev/ublkb") {
        return true;
    }
    let script = script_of(command);
    if script.as_ref().is_some_and(|script| script.contains(line)) {
        return true;
    }
    let shows_key =
        command.contains(" key new") || command.contains(" key show") || script.is_some();
    if shows_key && line.parse::<PublicKey>().is_ok() {
        return true;
    }
    if let Some((time, message)) = line.split_once("  INFO ") {
        return time.ends_with('Z') && literals.can_log(message);
    }
    let text = line.strip_prefix(&format!("{program}: ")).unwrap_or(line);
    program.starts_with("rblk-") && literals.can_print(text)
}

/// The script of the package that the command installs.
fn script_of(command: &str) -> Option<String> {
    let package = command.strip_prefix("apt install ./")?.split('_').next()?;
    let path = format!("../packaging/scripts/{package}/postinst");
    Some(fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}")))
}

/// The first words of lines, without those of rows of tables.
fn skeleton(lines: &[String]) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut in_table = false;
    for line in lines {
        let first = line.split_whitespace().next().unwrap_or_default();
        // The first line begins with the target's name.
        let word = if line.contains("  serving, up ") { "serving" } else { first };
        if !line.is_empty() && !in_table && words.last().is_none_or(|last| last != word) {
            words.push(word.to_owned());
        }
        in_table = !line.is_empty() && (in_table || is_header(line));
    }
    words
}

/// Messages that no program prints, from the first columns of tables that begin with `message`.
pub(crate) fn message_faults(documents: &[Document], literals: &Literals) -> Vec<String> {
    let mut faults = Vec::new();
    let mut checked = 0;
    for document in documents {
        let mut of_messages = false;
        for (number, line) in document.prose() {
            let first = cells(line).first().cloned().unwrap_or_default();
            match line.strip_prefix('|') {
                None => of_messages = false,
                Some(_) if first == "message" || first.ends_with("or message") => {
                    of_messages = true;
                }
                Some(_) => {}
            }
            for message in code_spans(&first).into_iter().filter(|_| of_messages) {
                let pieces = message.split('…').map(str::trim).filter(|piece| piece.contains(' '));
                for piece in pieces {
                    checked += 1;
                    if !literals.contain(piece) {
                        faults
                            .push(format!("{}:{number}: no program says `{piece}`", document.path));
                    }
                }
            }
        }
    }
    assert!(checked > 30, "only {checked} messages were found");
    faults
}

#[test]
fn a_wrong_sample_is_a_fault() {
    let lines = ["NAME                 DEVICE     SIZE", "vol0   /dev/ublkb0   1GiB"];
    let real = Real {
        headers: vec![columns(lines[0])],
        status: vec!["serving".to_owned()],
        details: vec!["serving".to_owned()],
        literals: Literals::collect(),
    };
    let faults = |text: &str| {
        let lines = text.lines().map(str::to_owned).collect();
        let block = Block { place: "here".to_owned(), language: "console".to_owned(), lines };
        in_block(&block, &real)
    };
    let good = lines.join("\n");
    assert!(faults(&format!("# rblk-initiator list\n{good}")).is_empty());
    let fault = faults(&format!("# rblk-initiator list\n{}", good.replace("DEVICE", "DISK")));
    assert!(fault[0].contains("the programs print `NAME DEVICE SIZE"), "{fault:?}");
    assert_eq!(
        faults("# rblk-initiator list\nNAME                 DEVICE     SIZE\nvol0").len(),
        1
    );
    assert!(faults("# rblk-target drain\ndraining: every initiator has left").is_empty());
    assert_eq!(faults("# rblk-target drain\ndraining: every initiator left").len(), 1);
    assert!(faults("# rblk-initiator mount h v\n/dev/ublkb0").is_empty());
    let key = "rblk1:rmntdxzdp7243knecdmiemm4oyocypa7zz7jqx3pl4dllz3we4n5uqpkpe";
    assert!(faults(&format!("# rblk-target key show\n{key}")).is_empty());
    assert_eq!(
        faults(&format!("# rblk-target key show\n{}", key.replace("rmnt", "rmnu"))).len(),
        1
    );
    assert_eq!(faults(&format!("# rblk-target status\n{key}")).len(), 1);
    let installs = "# apt install ./rblk-target_*.deb\nrblk-target: the public key of this";
    assert!(faults(&format!("{installs} target\n{key}")).is_empty());
    assert_eq!(faults(&format!("{installs} host\n{key}")).len(), 1);
}
