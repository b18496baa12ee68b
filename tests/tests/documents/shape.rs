//! The shape of a page: its contents name its sections, and no table is cut off.

use crate::links::slug;
use crate::markdown::{Document, cells};

/// The fewest sections of a page with a table of contents.
const SECTIONS: usize = 4;

pub(crate) fn faults(documents: &[Document]) -> Vec<String> {
    documents
        .iter()
        .flat_map(|page| table_faults(page).into_iter().chain(contents_fault(page)))
        .collect()
}

/// Rows outside a table: without a line of dashes above them, or with another number of cells.
fn table_faults(page: &Document) -> Vec<String> {
    let prose = page.prose();
    let mut faults = Vec::new();
    let mut columns = None;
    for (index, &(number, line)) in prose.iter().enumerate() {
        if !line.trim_start().starts_with('|') {
            columns = None;
            continue;
        }
        let below = prose.get(index + 1).map_or("", |(_, line)| line.trim_start());
        let count = cells(&line.replace("\\|", "")).len();
        match columns {
            None if below.starts_with("| ---") => columns = Some(count),
            None => faults.push(format!("{}:{number}: a row outside of a table", page.path)),
            Some(columns) if columns != count => {
                faults.push(format!("{}:{number}: {count} cells instead of {columns}", page.path));
            }
            Some(_) => {}
        }
    }
    faults
}

/// Contents that differ from the sections of a page, or from their order.
fn contents_fault(page: &Document) -> Option<String> {
    let prose = page.prose();
    let sections: Vec<String> = prose
        .iter()
        .filter_map(|(_, line)| line.strip_prefix("## "))
        .map(|title| format!("- [{title}](#{})", slug(title)))
        .collect();
    let contents: Vec<&str> = prose
        .iter()
        .map(|(_, line)| *line)
        .filter(|line| line.starts_with("- [") && line.contains("](#"))
        .collect();
    let named = contents.iter().filter(|line| sections.iter().any(|section| section == *line));
    let is_whole = named.eq(sections.iter());
    (sections.len() >= SECTIONS && !is_whole)
        .then(|| format!("{}: its contents are not its sections: {sections:#?}", page.path))
}

#[test]
fn a_page_without_its_contents_and_a_cut_table_are_faults() {
    let page = |text: &str| Document { path: "docs/x.md".to_owned(), text: text.to_owned() };
    let sections = "## A b\n## C\n## D\n## E\n";
    let contents = "- [A b](#a-b)\n- [C](#c)\n- [D](#d)\n- [E](#e)\n";
    assert_eq!(contents_fault(&page(&format!("{contents}\n{sections}"))), None);
    for wrong in ["", "- [A b](#a-b)\n- [D](#d)\n- [C](#c)\n- [E](#e)\n"] {
        assert!(contents_fault(&page(&format!("{wrong}\n{sections}"))).is_some(), "{wrong}");
    }
    assert_eq!(contents_fault(&page("## A\n## B\n## C\n")), None, "a short page needs none");

    let table = "| a | b |\n| --- | --- |\n| c | `d \\| e` |\n";
    assert_eq!(table_faults(&page(table)), Vec::<String>::new());
    let cut = format!("{table}\n| f | g |\n");
    assert_eq!(table_faults(&page(&cut)), ["docs/x.md:5: a row outside of a table"]);
    let wide = format!("{table}| f | g | h |\n");
    assert_eq!(table_faults(&page(&wide)), ["docs/x.md:4: 3 cells instead of 2"]);
}
