//! [`pages`]: section 8, a page for each command.

use clap::Command;
use clap_mangen::Man;
use rblk_config::Exit;
use roff::{Roff, bold, italic, roman};

use crate::page::{self, MANUAL};

/// The section of commands of an administrator.
const SECTION: &str = "8";
/// The line above the exit codes in help, which have a section of their own here.
const EXIT_CODES: &str = "Exit codes:";

/// The pages of a program and of each of its commands.
pub(crate) fn pages(program: Command) -> anyhow::Result<Vec<(String, String)>> {
    let mut program = program.disable_help_subcommand(true);
    program.build();
    let mut pages = Vec::new();
    add(&program, None, &mut pages)?;
    // Its daemon has the same command line.
    let name = program.get_name();
    pages.push((format!("{name}d.{SECTION}"), format!(".so man{SECTION}/{name}.{SECTION}\n")));
    Ok(pages)
}

/// Adds the page of a command, and those of the commands below it.
fn add(
    command: &Command,
    above: Option<&str>,
    pages: &mut Vec<(String, String)>,
) -> anyhow::Result<()> {
    let name = name_of(command, above);
    pages.push((format!("{name}.{SECTION}"), text(command, &name, above)?));
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        add(below, Some(&name), pages)?;
    }
    Ok(())
}

/// The name of a page: the words of the command.
fn name_of(command: &Command, above: Option<&str>) -> String {
    match above {
        Some(above) => format!("{above}-{}", command.get_name()),
        None => command.get_name().to_owned(),
    }
}

fn text(command: &Command, name: &str, above: Option<&str>) -> anyhow::Result<String> {
    let man = Man::new(command.clone()).section(SECTION).manual(MANUAL).source(page::source());
    let man = man.title(name);
    let mut bytes = Vec::new();
    man.render_title(&mut bytes)?;
    let mut head = Roff::new();
    head.control("SH", ["NAME"]);
    head.text([roman(format!("{name} - {}", about(command)))]);
    synopsis(&mut head, command);
    head.to_writer(&mut bytes)?;
    man.render_description_section(&mut bytes)?;
    if command.get_arguments().any(|argument| !argument.is_hide_set()) {
        man.render_options_section(&mut bytes)?;
    }
    if command.get_subcommands().any(|below| !below.is_hide_set()) {
        man.render_subcommands_section(&mut bytes)?;
    }
    let mut rest = Roff::new();
    let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let examples = help.split(EXIT_CODES).next().unwrap_or_default().trim();
    if let Some(examples) = examples.strip_prefix("Examples:") {
        rest.control("SH", ["EXAMPLES"]);
        page::verbatim(&mut rest, examples.trim_start_matches('\n').trim_end());
    }
    exit_status(&mut rest);
    page::see_also(&mut rest, &related(command, name, above));
    rest.to_writer(&mut bytes)?;
    Ok(String::from_utf8(bytes)?)
}

/// The words of the command. Its options have a section of their own: some commands have fifty.
fn synopsis(page: &mut Roff, command: &Command) {
    page.control("SH", ["SYNOPSIS"]);
    let mut line = vec![bold(command.get_bin_name().unwrap_or_else(|| command.get_name()))];
    if command.get_opts().any(|option| !option.is_hide_set()) {
        line.push(roman(" [OPTIONS]"));
    }
    for argument in command.get_positionals().filter(|argument| !argument.is_hide_set()) {
        let (left, right) = if argument.is_required_set() { ("", "") } else { ("[", "]") };
        let names = argument.get_value_names().unwrap_or_default();
        let name = names.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        line.extend([roman(format!(" {left}")), italic(name), roman(right)]);
    }
    if command.has_subcommands() {
        line.extend([roman(" "), italic("COMMAND")]);
    }
    page.text(line);
}

/// The first sentence, without its end: it stands behind the name of the page.
fn about(command: &Command) -> String {
    let text = command.get_about().map(ToString::to_string).unwrap_or_default();
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let first = text.split_inclusive(". ").next().unwrap_or_default().trim();
    let first = first.trim_end_matches('.');
    let mut letters = first.chars();
    letters.next().map(|letter| letter.to_lowercase().chain(letters).collect()).unwrap_or_default()
}

fn exit_status(page: &mut Roff) {
    page.control("SH", ["EXIT STATUS"]);
    for exit in Exit::ALL {
        page.control("TP", ["4"]);
        page.text([bold(exit.code().to_string())]);
        page.text([roman(exit.meaning())]);
    }
}

/// The pages that go with a command.
fn related<'s>(command: &Command, name: &str, above: Option<&str>) -> Vec<(String, &'s str)> {
    let below = command.get_subcommands().filter(|below| !below.is_hide_set());
    let mut pages: Vec<(String, &str)> =
        below.map(|below| (name_of(below, Some(name)), SECTION)).collect();
    pages.extend(above.map(|above| (above.to_owned(), SECTION)));
    let (file, other) = match name.starts_with("rblk-target") {
        true => ("rblk-target.toml", "rblk-initiator"),
        false => ("rblk-mount.toml", "rblk-target"),
    };
    if above.is_none() {
        pages.push((other.to_owned(), SECTION));
    }
    pages.extend([(file.to_owned(), "5"), ("rblk".to_owned(), "7")]);
    pages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_the_sections_of_its_command() {
        let pages = pages(rblk_cli::target::command()).unwrap();
        let text = |name: &str| &pages.iter().find(|(file, _)| file == name).unwrap().1;
        let whole = text("rblk-target.8");
        for piece in
            [".SH EXAMPLES", ".SH \"EXIT STATUS\"", "rblk\\-target\\-host", ".SH \"SEE ALSO\""]
        {
            assert!(whole.contains(piece), "{piece}: {whole}");
        }
        assert!(!whole.contains(EXIT_CODES) && !whole.contains("EXTRA"));
        let add = text("rblk-target-host-add.8");
        for piece in [
            "rblk\\-target\\-host\\-add \\- let a host connect",
            "\\-\\-volume",
            "KEYS OF THE CONFIGURATION",
        ] {
            assert!(add.contains(piece), "{piece}: {add}");
        }
    }
}
