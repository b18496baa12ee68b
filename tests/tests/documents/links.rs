//! Links between documents.

use std::collections::HashMap;

use crate::markdown::{Document, root, without_code};

pub(crate) fn faults(documents: &[Document]) -> Vec<String> {
    let anchors: HashMap<&str, Vec<String>> =
        documents.iter().map(|document| (document.path.as_str(), anchors(document))).collect();
    let mut faults = Vec::new();
    let mut checked = 0;
    for document in documents {
        for (number, line) in document.prose() {
            for link in links(&without_code(line)) {
                checked += 1;
                let fault = fault(&document.path, &link, &anchors);
                faults.extend(fault.map(|why| format!("{}:{number}: {why}", document.path)));
            }
        }
    }
    assert!(checked > 50, "only {checked} links were found");
    faults
}

/// The targets of the links of a line, without links to other sites.
fn links(line: &str) -> Vec<String> {
    let targets = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    targets.filter(|link| !link.contains("://")).map(str::to_owned).collect()
}

fn fault(from: &str, link: &str, anchors: &HashMap<&str, Vec<String>>) -> Option<String> {
    let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
    let path = if path.is_empty() { from.to_owned() } else { resolve(from, path) };
    if !root().join(&path).exists() {
        return Some(format!("{link}: there is no {path}"));
    }
    let known = anchors.get(path.as_str());
    let leads = anchor.is_empty() || known.is_some_and(|known| known.iter().any(|a| a == anchor));
    (!leads).then(|| format!("{link}: {path} has no heading for #{anchor}"))
}

/// A path in the repository from one that is relative to a document.
fn resolve(from: &str, path: &str) -> String {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in path.trim_end_matches('/').split('/') {
        match part {
            "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// The anchors of a document's headings, as GitHub and others make them.
fn anchors(document: &Document) -> Vec<String> {
    let mut seen: HashMap<String, usize> = HashMap::new();
    let headings = document.prose().into_iter().filter(|(_, line)| line.starts_with('#'));
    let slugs = headings.map(|(_, line)| {
        let slug = slug(line.trim_start_matches('#').trim());
        let again = seen.entry(slug.clone()).or_default();
        *again += 1;
        if *again == 1 { slug } else { format!("{slug}-{}", *again - 1) }
    });
    slugs.collect()
}

pub(crate) fn slug(heading: &str) -> String {
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    heading.to_lowercase().chars().filter(kept).map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[test]
fn a_link_to_nothing_is_a_fault() {
    let text = "# One & `two`\n## Same\n## Same\n```sh\n# none\n```\n".to_owned();
    let document = Document { path: "docs/install.md".to_owned(), text };
    let anchors = HashMap::from([("docs/install.md", anchors(&document))]);
    assert_eq!(anchors["docs/install.md"], ["one--two", "same", "same-1"]);
    let fault = |link: &str| fault("docs/watch.md", link, &anchors);
    for right in ["install.md", "install.md#same-1", "../docs/install.md#one--two", "../bench/"] {
        assert_eq!(fault(right), None);
    }
    for wrong in ["instal.md", "install.md#none", "../install.md", "../Cargo.toml#package"] {
        assert!(fault(wrong).is_some(), "{wrong}");
    }
    assert_eq!(links("[a](b.md) and [c](https://d.e) [f](#g)"), ["b.md", "#g"]);
}
