//! The header matches the library: functions, structures and numbers of the sources are translated
//! to C, and the compiler compares them with the header.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::process::Command;

use rblk_tests::program::run;

use super::{STRICT, command, library, pkg_config, root};

/// A function or structure of the library: its name, and names and types in it.
struct Item {
    name: String,
    parts: Vec<(String, String)>,
    result: String,
}

/// The sources of the library, without their tests.
fn sources() -> String {
    let directory = root().join("initiator/capi/src");
    let mut text = String::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let file = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        text.push_str(file.split("#[cfg(test)]").next().unwrap());
    }
    text
}

/// `name: type` of each part of a list.
fn parts(list: &str) -> Vec<(String, String)> {
    let lines = list.lines().map(str::trim).filter(|line| !line.starts_with("//"));
    let list: String = lines.collect();
    // No type has a comma inside.
    let parts = list.split(',').filter_map(|part| part.split_once(':'));
    parts
        .map(|(name, kind)| {
            let name = name.trim().trim_start_matches("pub(crate) ");
            (name.to_owned(), kind.trim().to_owned())
        })
        .collect()
}

fn functions(text: &str) -> Vec<Item> {
    let items = text.split("extern \"C\" fn ").skip(1);
    items
        .map(|item| {
            let (name, rest) = item.split_once('(').unwrap();
            let (list, rest) = rest.split_once(')').unwrap();
            let result = rest.split('{').next().unwrap().trim().trim_start_matches("-> ");
            Item { name: name.to_owned(), parts: parts(list), result: c_type(result.trim()) }
        })
        .collect()
}

fn structures(text: &str) -> Vec<Item> {
    let items = text.split("#[repr(C)]\n").skip(1);
    items
        .map(|item| {
            let (head, list) = item.split_once("struct ").unwrap().1.split_once(" {\n").unwrap();
            let list = list.split_once("\n}").unwrap().0;
            Item { name: head.to_owned(), parts: parts(list), result: String::new() }
        })
        .collect()
}

/// The type in C.
fn c_type(rust: &str) -> String {
    if let Some(of) = rust.strip_prefix("*mut ") {
        return format!("{} *", c_type(of));
    }
    if let Some(of) = rust.strip_prefix("*const ") {
        return format!("const {} *", c_type(of));
    }
    let name = match rust {
        "usize" => "size_t",
        "u64" => "uint64_t",
        "i64" => "int64_t",
        "u32" => "uint32_t",
        "u16" => "uint16_t",
        "u8" => "uint8_t",
        "c_int" => "int",
        "c_char" => "char",
        "c_void" => "void",
        "QueueHandle" => "struct rblk_queue",
        "VolumeHandle" => "struct rblk_volume",
        other if other.starts_with("rblk_") => return format!("struct {other}"),
        other => panic!("the type {other} has no name in C here"),
    };
    name.to_owned()
}

/// A declaration of a field.
fn field(name: &str, rust: &str) -> String {
    let array = rust.strip_prefix('[').and_then(|array| array.strip_suffix(']'));
    match array.and_then(|array| array.split_once("; ")) {
        Some((of, count)) => format!("{} {name}[{count}]", c_type(of)),
        None => format!("{} {name}", c_type(rust)),
    }
}

/// A program that compiles only if the header matches the sources.
fn program(functions: &[Item], structures: &[Item], text: &str) -> String {
    let mut c = String::from("#include <rblk.h>\n");
    for Item { name, parts, .. } in structures {
        let fields = parts.iter().map(|(name, kind)| format!("\t{};\n", field(name, kind)));
        let fields: String = fields.collect();
        writeln!(c, "struct own_{name} {{\n{fields}}};").unwrap();
        let mut same = |what: &str| {
            writeln!(c, "_Static_assert({what}, \"{name}\");").unwrap();
        };
        same(&format!("sizeof(struct own_{name}) == sizeof(struct {name})"));
        for (part, _) in parts {
            same(&format!(
                "offsetof(struct own_{name}, {part}) == offsetof(struct {name}, {part})"
            ));
            let size = |of: &str| format!("sizeof(((struct {of} *)0)->{part})");
            same(&format!("{} == {}", size(&format!("own_{name}")), size(name)));
        }
    }
    for (name, number) in numbers(text) {
        writeln!(c, "_Static_assert(RBLK_{name} == {number}, \"{name}\");").unwrap();
    }
    let mut calls = String::new();
    for Item { name, parts, result } in functions {
        let kinds: Vec<String> = parts.iter().map(|(_, kind)| c_type(kind)).collect();
        let list = if kinds.is_empty() { "void".to_owned() } else { kinds.join(", ") };
        writeln!(c, "static {result} (*const own_{name})({list}) = {name};").unwrap();
        writeln!(calls, "\tfound += own_{name} != 0;").unwrap();
    }
    let count = functions.len();
    write!(c, "int main(void)\n{{\n\tint found = 0;\n{calls}\treturn found != {count};\n}}\n")
        .unwrap();
    c
}

/// Flags and states, by their names in C.
fn numbers(text: &str) -> Vec<(String, String)> {
    let lines = text.lines().map(str::trim);
    let flags = lines.clone().filter_map(|line| {
        let line = line.strip_prefix("const ")?.strip_suffix(';')?;
        let (name, number) = line.split_once(": u32 = ")?;
        Some((name.to_owned(), number.to_owned()))
    });
    let states = lines.filter_map(|line| {
        let (name, number) = line.strip_prefix("State::")?.strip_suffix(',')?.split_once(" => ")?;
        Some((name.to_uppercase(), number.to_owned()))
    });
    flags.chain(states).collect()
}

#[test]
fn the_header_matches_the_library() {
    let text = sources();
    let (functions, structures) = (functions(&text), structures(&text));
    assert!(functions.len() > 20 && structures.len() == 4, "the sources are read wrong");
    assert!(numbers(&text).len() == 8, "{:?}", numbers(&text));
    let dir = tempfile::tempdir().unwrap();
    let (source, program_file) = (dir.path().join("abi.c"), dir.path().join("abi"));
    std::fs::write(&source, program(&functions, &structures, &text)).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(STRICT.iter().filter(|word| **word != "-Wpedantic")).arg("-Wno-address");
    compiler.arg(&source).arg("-o").arg(&program_file).args(pkg_config(&["--cflags", "--libs"]));
    let ended = run(&mut compiler);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(run(&mut command(&program_file)).code, Some(0));

    // The header declares nothing that the library lacks.
    let header = std::fs::read_to_string(root().join("initiator/capi/include/rblk.h")).unwrap();
    let is_declaration = |line: &&str| !line.starts_with([' ', '\t', '*', '/', '#', '}']);
    let declared: BTreeSet<&str> = header
        .lines()
        .filter(is_declaration)
        .filter_map(|line| line.split_once('(')?.0.rsplit([' ', '*']).next())
        .filter(|name| name.starts_with("rblk_"))
        .collect();
    let written: BTreeSet<&str> = functions.iter().map(|item| item.name.as_str()).collect();
    assert_eq!(declared, written);
}

/// The symbols for programs: the functions, all with a version, and nothing else.
#[test]
fn the_library_has_the_symbols_of_the_header_with_their_version() {
    let path = library().join("lib/librblk.so.1");
    let ended = run(Command::new("nm").args(["-D", "--defined-only"]).arg(&path));
    let found: BTreeSet<&str> =
        ended.stdout.lines().filter_map(|line| line.rsplit(' ').next()).collect();
    let text = sources();
    let names: Vec<String> =
        functions(&text).iter().map(|item| format!("{}@@RBLK_1", item.name)).collect();
    let mut expected: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    expected.insert("RBLK_1");
    assert_eq!(found, expected);
    let ended = run(Command::new("readelf").arg("-d").arg(&path));
    assert!(ended.stdout.contains("soname: [librblk.so.1]"), "{}", ended.stdout);
    assert!(ended.stdout.contains("NODELETE"), "its threads run on after dlclose");
}

/// C++ programs can include the header.
#[test]
fn the_header_compiles_as_c_plus_plus() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("header.cc");
    std::fs::write(&source, "#include <rblk.h>\nint x = RBLK_DURABLE;\n").unwrap();
    let mut compiler = Command::new("g++");
    compiler.args(["-std=c++11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]).arg(&source);
    let ended = run(compiler.arg("-I").arg(root().join("initiator/capi/include")));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}
