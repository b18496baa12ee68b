//! librblk: the header matches the library, and programs in C use volumes of real targets.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use rblk_tests::bed::pattern;
use rblk_tests::built;
use rblk_tests::program::{Target, run};

mod abi;

/// Strict flags for the examples.
const STRICT: [&str; 7] =
    ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-pthread"];
const MIB: usize = 1 << 20;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// A directory with the library, built once. The directory is in the build directory, because a
/// static value is never dropped and could not remove a temporary one.
fn library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("librblk");
        let output = built::xtask("library").arg("--out").arg(&dir).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        dir
    })
}

/// Arguments for the C compiler from pkg-config.
fn pkg_config(words: &[&str]) -> Vec<String> {
    let mut command = Command::new("pkg-config");
    command.args(words).arg("rblk").env("PKG_CONFIG_PATH", library().join("lib/pkgconfig"));
    let ended = run(&mut command);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    ended.stdout.split_whitespace().map(str::to_owned).collect()
}

/// Compiles a program with the shared library, or with the archive.
fn compile(source: &Path, dir: &Path, is_static: bool) -> PathBuf {
    let program = dir.join(if is_static { "with-archive" } else { "with-library" });
    let mut command = Command::new("cc");
    command.args(STRICT).arg(source).arg("-o").arg(&program);
    if is_static {
        command.args(pkg_config(&["--cflags"])).arg(library().join("lib/librblk.a"));
        let libraries = pkg_config(&["--libs", "--static"]);
        command.args(libraries.iter().filter(|word| *word != "-lrblk"));
    } else {
        command.args(pkg_config(&["--cflags", "--libs"]));
    }
    let ended = run(&mut command);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    program
}

/// A command that finds the shared library.
fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", library().join("lib"));
    command
}

/// A target with a volume `v` of 4 MiB.
fn target(dir: &Path) -> Target {
    let (image, file) = (dir.join("v.img"), dir.join("target.toml"));
    std::fs::write(&image, vec![0; 4 * MIB]).unwrap();
    let mut text = String::from("[[volume]]\nname = 'v'\nstore = 'file'\n");
    writeln!(text, "path = '{}'", image.display()).unwrap();
    std::fs::write(&file, text).unwrap();
    Target::start(dir, &["--config", file.to_str().unwrap()])
}

#[test]
fn the_example_copies_a_file_to_a_volume_and_back() {
    let dir = tempfile::tempdir().unwrap();
    let target = target(dir.path());
    let uri = format!("{}/v", target.address);
    let (input, output) = (dir.path().join("in"), dir.path().join("out"));
    // The file does not end with a whole block.
    let data = pattern(5, 3 * MIB + 100);
    std::fs::write(&input, &data).unwrap();
    let source = root().join("initiator/capi/examples/copy.c");
    for is_static in [false, true] {
        let program = compile(&source, dir.path(), is_static);
        let ended = run(command(&program).args([input.as_os_str(), uri.as_ref()]));
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let ended = run(command(&program).args([uri.as_ref(), output.as_os_str()]));
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let found = std::fs::read(&output).unwrap();
        assert_eq!(found.len(), 4 * MIB);
        assert!(found[..data.len()] == data && found[data.len()..].iter().all(|byte| *byte == 0));
    }
    let program = compile(&source, dir.path(), false);
    let ended = run(command(&program).arg(&input).arg(format!("{}/w", target.address)));
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("no volume") || ended.stderr.contains("w"), "{ended:?}");
}

#[test]
fn misuse_is_an_error_and_nothing_worse() {
    let dir = tempfile::tempdir().unwrap();
    let target = target(dir.path());
    let program = compile(&root().join("tests/tests/programs/capi/misuse.c"), dir.path(), false);
    let ended = run(command(&program).arg(format!("{}/v", target.address)));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
}
