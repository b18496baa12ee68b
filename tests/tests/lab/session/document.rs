//! [`Session`]: the document, as files to write, commands to type and samples of their output.

use std::path::PathBuf;

/// The document, from the root of the repository.
pub(super) const PATH: &str = "docs/session.md";

/// One part of the document.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Item {
    /// A line of text, or the fence of a block.
    Text(String),
    /// A block of TOML that begins with its path.
    File { path: String, text: String },
    /// A command after the prompt of a host, and its output.
    Command { host: String, command: String, sample: Vec<String> },
}

/// The document.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) items: Vec<Item>,
}

fn path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").join(PATH)
}

impl Session {
    pub(super) fn read() -> Self {
        let text = std::fs::read_to_string(path()).unwrap_or_else(|e| panic!("{PATH}: {e}"));
        Self::parse(&text)
    }

    pub(super) fn write(&self) {
        std::fs::write(path(), self.text()).unwrap_or_else(|e| panic!("writing {PATH}: {e}"));
    }

    fn parse(text: &str) -> Self {
        let mut items = Vec::new();
        let mut language = None;
        for line in text.lines() {
            if let Some(word) = line.strip_prefix("```") {
                language = if language.is_some() { None } else { Some(word) };
                items.push(Item::Text(line.to_owned()));
                continue;
            }
            match (language, items.last_mut()) {
                (Some("console"), last) => match (typed(line), last) {
                    (Some((host, command)), _) => items.push(Item::Command {
                        host: host.to_owned(),
                        command: command.to_owned(),
                        sample: Vec::new(),
                    }),
                    (None, Some(Item::Command { sample, .. })) => sample.push(line.to_owned()),
                    _ => panic!("{PATH}: `{line}` follows no command"),
                },
                (Some("toml"), Some(Item::File { text, .. })) => {
                    text.push('\n');
                    text.push_str(line);
                }
                (Some("toml"), _) => {
                    let path = line.strip_prefix("# /").unwrap_or_else(|| {
                        panic!("{PATH}: a file begins with its path, not with `{line}`")
                    });
                    let path = format!("/{path}");
                    items.push(Item::File { path, text: line.to_owned() });
                }
                _ => items.push(Item::Text(line.to_owned())),
            }
        }
        Self { items }
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for item in &self.items {
            match item {
                Item::Text(line) | Item::File { text: line, .. } => text.push_str(line),
                Item::Command { host, command, sample } => {
                    text.push_str(&format!("{host}# {command}"));
                    sample.iter().for_each(|line| text.push_str(&format!("\n{line}")));
                }
            }
            text.push('\n');
        }
        text
    }
}

/// The host and the command of a line with a prompt.
fn typed(line: &str) -> Option<(&str, &str)> {
    let (host, command) = line.split_once("# ")?;
    let is_host = !host.is_empty() && host.chars().all(|c| c.is_ascii_alphanumeric());
    is_host.then_some((host, command))
}

#[test]
fn a_document_comes_back_as_it_was() {
    let text = "\
# A heading

```toml
# /etc/a.toml
x = 1

[y]
```

```console
store1# one two
said

# not typed
client1# three
```
";
    let session = Session::parse(text);
    assert_eq!(session.text(), text);
    let file = Item::File {
        path: "/etc/a.toml".to_owned(),
        text: "# /etc/a.toml\nx = 1\n\n[y]".to_owned(),
    };
    assert!(session.items.contains(&file), "{session:?}");
    let commands = session.items.iter().filter_map(|item| match item {
        Item::Command { host, command, sample } => Some((&**host, &**command, sample.len())),
        _ => None,
    });
    let commands: Vec<_> = commands.collect();
    assert_eq!(commands, [("store1", "one two", 3), ("client1", "three", 0)]);
}

#[test]
fn the_document_is_one_session() {
    let session = Session::read();
    assert_eq!(session.text(), std::fs::read_to_string(path()).expect("the document"));
}
