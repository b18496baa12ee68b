//! [`write()`]: the .deb and the .rpm of a tree, by cargo-deb and cargo-generate-rpm.
//!
//! Both read the manifest of a crate. The manifest here is made of the table and the tree, so that
//! both packages have the same files, and the workspace's manifests know nothing of packages.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use toml::{Table, Value};

use super::checkout::Checkout;
use super::machine;
use super::table::{Layout, Package};
use super::tools::Tools;
use super::tree::{MAINTAINER, REVISION, Tree};
use crate::process;

/// Limit on the making of one package.
const LIMIT: Duration = Duration::from_secs(20 * 60);

/// Makes one package of a tree, in a directory.
pub(crate) fn write(
    package: &Package,
    layout: Layout,
    tree: &Tree,
    checkout: &Checkout,
    (tools, out): (&Tools, &Path),
) -> Result<()> {
    let directory = tree.root().with_extension("crate");
    super::remake(&directory.join("src"))?;
    fs::write(directory.join("src/lib.rs"), "")?;
    let (metadata, file) = match layout {
        Layout::Rpm => (rpm(package, tree, checkout)?, rpm_name(package, checkout)?),
        _ => (deb(package, tree, checkout)?, deb_name(package, checkout)?),
    };
    let manifest = directory.join("Cargo.toml");
    fs::write(&manifest, manifest_of(package, checkout, metadata))?;
    let to = out.join(&file);
    let mut command = match layout {
        Layout::Rpm => {
            let mut command = checkout.command(tools.program("cargo-generate-rpm"));
            // `find-requires` gives other words where rpm is installed.
            command.args(["--auto-req", "builtin", "--payload-compress", "zstd"]);
            command.arg("-o").arg(&to);
            command
        }
        _ => {
            let mut command = checkout.command(tools.program("cargo-deb"));
            command.args(["--no-build", "--no-strip", "--no-dbgsym", "-q", "--manifest-path"]);
            command.arg(&manifest).arg("-o").arg(&to);
            command
        }
    };
    process::output(command.current_dir(&directory), LIMIT).map(drop).with_context(|| file)
}

/// The name of a package's file on Debian.
fn deb_name(package: &Package, checkout: &Checkout) -> Result<String> {
    Ok(format!("{}_{}-{REVISION}_{}.deb", package.name, checkout.version, machine()?.1))
}

/// The name of a package's file for rpm.
fn rpm_name(package: &Package, checkout: &Checkout) -> Result<String> {
    Ok(format!("{}-{}-{REVISION}.{}.rpm", package.name, checkout.version, machine()?.0))
}

/// The manifest of a crate of that name.
fn manifest_of(package: &Package, checkout: &Checkout, metadata: Table) -> String {
    let text = |text: &str| Value::from(text);
    let about = Table::from_iter([
        ("name".to_owned(), text(&package.name)),
        ("version".to_owned(), text(&checkout.version)),
        ("edition".to_owned(), text("2024")),
        ("license".to_owned(), text("MIT OR Apache-2.0")),
        ("description".to_owned(), text(&package.summary)),
        ("homepage".to_owned(), text("https://github.com/rblk/rblk")),
        ("repository".to_owned(), text("https://github.com/rblk/rblk")),
        ("metadata".to_owned(), Value::from(metadata)),
    ]);
    let manifest = Table::from_iter([
        ("package".to_owned(), Value::from(about)),
        // The directory lies below another workspace.
        ("workspace".to_owned(), Value::from(Table::new())),
    ]);
    manifest.to_string()
}

/// What cargo-deb reads.
fn deb(package: &Package, tree: &Tree, checkout: &Checkout) -> Result<Table> {
    let mut deb = Table::new();
    let mut set = |key: &str, value: Value| drop(deb.insert(key.to_owned(), value));
    let own =
        |relation: &str| relation.replace("{version}", &format!("{}-{REVISION}", checkout.version));
    let joined =
        |relations: &[String]| relations.iter().map(|one| own(one)).collect::<Vec<_>>().join(", ");
    let depends = joined(&[&["$auto".to_owned()], package.requires.deb.as_slice()].concat());
    set("maintainer", MAINTAINER.into());
    set("section", package.section.as_str().into());
    set("priority", "optional".into());
    set("revision", REVISION.into());
    set("extended-description", package.description.trim_end().into());
    set("depends", depends.into());
    if !package.recommends.deb.is_empty() {
        set("recommends", joined(&package.recommends.deb).into());
    }
    if !package.suggests.deb.is_empty() {
        set("suggests", joined(&package.suggests.deb).into());
    }
    if let Some(scripts) = &package.scripts {
        set("maintainer-scripts", path(&checkout.root.join(scripts))?);
    }
    if let Some(triggers) = &package.triggers {
        set("triggers-file", path(&checkout.root.join(triggers))?);
    }
    let mut assets = Vec::new();
    for file in tree.files() {
        let mode = format!("{:o}", tree.mode(file)?);
        let asset = [path(&tree.root().join(file))?, path(file)?, mode.into()];
        assets.push(Value::Array(asset.to_vec()));
    }
    set("assets", Value::Array(assets));
    Ok(Table::from_iter([("deb".to_owned(), Value::from(deb))]))
}

/// What cargo-generate-rpm reads.
fn rpm(package: &Package, tree: &Tree, checkout: &Checkout) -> Result<Table> {
    let mut rpm = Table::new();
    let mut set = |key: &str, value: Value| drop(rpm.insert(key.to_owned(), value));
    let (first, rest) = package.summary.split_at(1);
    set("summary", format!("{}{rest}", first.to_uppercase()).into());
    set("description", package.description.trim_end().into());
    set("release", REVISION.into());
    set("vendor", "rblk".into());
    let names = |names: &[String]| {
        Value::from(Table::from_iter(names.iter().map(|name| (name.clone(), Value::from("*")))))
    };
    set("requires", names(&package.requires.rpm));
    set("recommends", names(&package.recommends.rpm));
    set("suggests", names(&package.suggests.rpm));
    let scripts = [
        ("post_install_script", "postinst"),
        ("pre_uninstall_script", "prerm"),
        ("post_uninstall_script", "postrm"),
    ];
    for (key, name) in scripts.iter().filter(|_| package.scripts.is_some()) {
        let scripts = package.scripts.as_deref().unwrap_or_default();
        set(key, fs::read_to_string(checkout.root.join(scripts).join(name))?.into());
    }
    if let Some(script) = &package.after_transaction {
        set("post_trans_script", fs::read_to_string(checkout.root.join(script))?.into());
    }
    let mut assets = Vec::new();
    for file in tree.files() {
        let mut asset = Table::new();
        asset.insert("source".to_owned(), path(&tree.root().join(file))?);
        asset.insert("dest".to_owned(), path(&Path::new("/").join(file))?);
        asset.insert("mode".to_owned(), format!("{:o}", tree.mode(file)?).into());
        let is_doc = file.starts_with("usr/share/doc") || file.starts_with("usr/share/man");
        asset.insert("doc".to_owned(), is_doc.into());
        assets.push(Value::from(asset));
    }
    set("assets", Value::Array(assets));
    Ok(Table::from_iter([("generate-rpm".to_owned(), Value::from(rpm))]))
}

fn path(path: &Path) -> Result<Value> {
    let text = PathBuf::from(path).into_os_string().into_string();
    text.map(Value::from).ok().context("a path that is no text")
}
