//! README and docs/: the programs accept and print every sample, every key and flag is described,
//! and every link has a target.
//!
//! A check returns its faults, so that the tests at the end of each file can prove that it finds a
//! wrong sample.

mod commands;
mod json;
mod kernels;
mod limits;
mod links;
mod literals;
mod markdown;
mod output;
mod reference;
mod shape;
mod sources;
mod toml;

use markdown::Document;

/// Size limits of documents that are read from the first line to the last.
const BYTES_MAX: [(&str, usize); 2] = [("README.md", 10_000), ("ARCHITECTURE.md", 25_000)];

#[track_caller]
fn assert_none(faults: &[String]) {
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn configurations_are_valid() {
    assert_none(&toml::faults(&Document::guides()));
}

#[test]
fn command_lines_are_accepted() {
    assert_none(&commands::faults(&Document::with_commands()));
}

// The test lists this host's mounts, which needs root.
#[test]
#[ignore = "needs root: `cargo xtask test` runs it"]
fn as_root_output_is_what_the_programs_print() {
    let mut documents = Document::guides();
    // The lab runs this session and compares every line.
    documents.retain(|document| document.path != "docs/session.md");
    assert_none(&output::faults(&documents, &output::Real::collect()));
}

#[test]
fn json_has_the_keys_that_the_programs_print() {
    assert_none(&json::faults(&Document::guides()));
}

#[test]
fn messages_are_those_of_the_programs() {
    assert_none(&output::message_faults(&Document::guides(), &literals::Literals::collect()));
}

#[test]
fn every_key_flag_and_exit_code_is_described() {
    assert_none(&reference::faults(&Document::guides()));
}

#[test]
fn links_lead_somewhere() {
    assert_none(&links::faults(&Document::all()));
}

#[test]
fn limits_are_those_of_the_programs() {
    assert_none(&limits::faults(&Document::read("docs/limits.md")));
}

#[test]
fn faults_of_kernels_are_those_that_the_programs_know() {
    assert_none(&kernels::faults(&Document::read("docs/install.md")));
}

#[test]
fn contents_and_tables_are_whole() {
    let mut documents = Document::guides();
    // The README is one page to be read from the first line to the last.
    documents.retain(|document| document.path != "README.md");
    assert_none(&shape::faults(&documents));
}

#[test]
fn source_files_that_are_named_exist() {
    assert_none(&sources::faults(&Document::all()));
}

#[test]
fn source_files_that_comments_name_exist() {
    assert_none(&sources::comment_faults());
}

#[test]
fn the_main_documents_are_short() {
    for (name, most) in BYTES_MAX {
        let bytes = Document::read(name).text.len();
        assert!(bytes <= most, "{name} has {bytes} bytes, at most {most}");
    }
}
