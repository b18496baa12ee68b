//! The section of `scale`: how cost grows with the work.

use crate::result::{Axis, Run, ScalePlot, Summary};

use super::chart::{Direction, Form, Layout, Line, Lines};
use super::number;
use super::page::Page;
use super::style;

pub(super) fn section(page: &mut Page, run: &Run) {
    let Some(scale) = run.scale.as_ref() else { return };
    if scale.plots.is_empty() && scale.idle.is_none() {
        return;
    }
    page.section(
        "scale",
        "As the work grows",
        "One thing grows, the rest is held fixed. The exponent is 1 where twice the work costs twice as much.",
    );
    page.cards(|page| {
        for plot in &scale.plots {
            draw(page, plot);
        }
    });
    if let Some(idle) = &scale.idle {
        let text = format!(
            "{} mounted volumes with nothing to do, watched for {:.0} s{}: the initiators together use {} of one \
             processor, the target {}.",
            idle.volumes,
            idle.seconds,
            if idle.place.is_empty() { String::new() } else { format!(" ({})", idle.place) },
            percent(idle.initiator_percent),
            percent(idle.target_percent)
        );
        page.html.text_in("p", &[], &text);
    }
}

fn percent(value: f64) -> String {
    format!("{} %", number::plain(value))
}

fn direction(axis: &Axis, layout: Layout) -> Direction {
    Direction { label: axis.label.clone(), form: Form::Unit(axis.unit), layout }
}

fn draw(page: &mut Page, plot: &ScalePlot) {
    let lines: Vec<Line> = plot
        .lines
        .iter()
        .enumerate()
        .map(|(n, line)| {
            let label = match line.slope {
                Some(slope) => format!("{}, exponent {slope:.2}", line.label),
                None => line.label.clone(),
            };
            let mut points: Vec<_> = line
                .points
                .iter()
                .map(|p| {
                    (
                        p.x,
                        Summary {
                            median: p.y,
                            low: p.low.min(p.y),
                            high: p.high.max(p.y),
                            count: 1,
                        },
                    )
                })
                .collect();
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            Line { label, look: look(&line.label, n), dashed: line.flagged, points }
        })
        .collect();
    let chart = Lines {
        title: plot.title.clone(),
        x: direction(&plot.x, if plot.x.log { Layout::Set } else { Layout::Zero }),
        y: direction(&plot.y, if plot.y.log { Layout::Log } else { Layout::Zero }),
        lines,
        means: Vec::new(),
        marks: true,
    };
    let mut caption = plot.note.clone();
    if let Some(why) = &plot.error {
        caption = format!("Not measured: {why}. {caption}");
    }
    if plot.lines.iter().any(|line| line.flagged) {
        caption += " Dashed: grows faster than its work.";
    }
    let key: String = plot.key.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
    page.card(&format!("scale-{key}"), &chart.draw(), false, caption.trim());
}

/// A line named as a system looks like that system; others differ.
fn look(label: &str, n: usize) -> usize {
    let key = crate::result::system::ORDER.into_iter().find(|key| *key == label);
    key.map_or(n * 3 % 9, |key| style::look(key, &[]))
}
