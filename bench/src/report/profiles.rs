//! The section of the profiles: where the processors' time went in a cell, by system, thread and
//! function.

use crate::result::{CpuProfile, Run, ThreadShare};

use super::page::{Page, systems, title};

/// Threads with less of the processors' time get no row.
const ROW_LEAST: f64 = 0.01;
/// Functions that a row names.
const NAMED: usize = 6;

pub(super) fn section(page: &mut Page, run: &Run) {
    if run.profiles.is_empty() {
        return;
    }
    page.section(
        "profile",
        "Where the processors went",
        "All processors sampled while fio ran, in samples of their own. Parts of the time of all of them; functions \
         without what they call. k is the kernel.",
    );
    for cell in &run.cells {
        let of_cell: Vec<(&str, &CpuProfile)> = systems(run)
            .into_iter()
            .filter_map(|info| {
                let found = |p: &&CpuProfile| p.system == info.key && p.cell == cell.key;
                Some((title(info), run.profiles.iter().find(found)?))
            })
            .collect();
        if of_cell.is_empty() {
            continue;
        }
        page.html.text_in("h3", &[], &cell.title());
        page.html.table(&["System", "Thread", "#Time", "Most of it in"], |html| {
            for (title, profile) in &of_cell {
                for thread in profile.threads.iter().filter(|t| t.share >= ROW_LEAST) {
                    html.row(&[
                        (*title).to_owned(),
                        thread.name.clone(),
                        format!("#{}", percent(thread.share)),
                        most(thread),
                    ]);
                }
            }
        });
    }
}

/// The functions in which a thread was most.
fn most(thread: &ThreadShare) -> String {
    if thread.name == ThreadShare::IDLE {
        return String::new();
    }
    let functions = thread.functions.iter().take(NAMED);
    let named = functions
        .map(|f| format!("{}{} {}", f.name, if f.kernel { " (k)" } else { "" }, percent(f.share)));
    named.collect::<Vec<_>>().join(", ")
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}
