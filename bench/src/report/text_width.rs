//! [`width_of`], [`fit`]: how wide a text of 12 px is, without a browser.
//!
//! The numbers are those of DejaVu Sans, the widest of the fonts that a report may be shown in: a
//! label that fits in it is clipped in none.

/// Size of the text of charts, in pixels.
const PIXELS: f64 = 12.0;
/// Units of the table in one em.
const EM: f64 = 2048.0;
/// Width of a letter that is not in the table: that of most capitals.
const OTHER: u16 = 1600;

/// Widths of the characters of each row, from its first one on.
const WIDTHS: [(char, &[u16]); 3] = [
    (' ', &[651, 821, 942, 1716, 1303, 1946, 1597, 563, 799, 799, 1024, 1716, 651, 739, 651, 690]),
    (
        '0',
        &[
            1303, 1303, 1303, 1303, 1303, 1303, 1303, 1303, 1303, 1303, 690, 690, 1716, 1716, 1716,
            1087,
        ],
    ),
    (
        '@',
        &[
            2048, 1401, 1405, 1430, 1577, 1294, 1178, 1587, 1540, 604, 604, 1343, 1141, 1767, 1532,
            1612, 1235, 1612, 1423, 1300, 1251, 1499, 1401, 2025, 1403, 1251, 1403, 799, 690, 799,
            1716, 1024, 1024, 1255, 1300, 1126, 1300, 1260, 721, 1300, 1298, 569, 569, 1186, 569,
            1995, 1298, 1253, 1300, 1300, 842, 1067, 803, 1298, 1212, 1675, 1212, 1212, 1075, 1303,
            690, 1303, 1716,
        ],
    ),
];

fn units(c: char) -> u16 {
    let in_row = |(first, widths): &(char, &[u16])| {
        let at = u32::from(c).checked_sub(u32::from(*first))?;
        widths.get(usize::try_from(at).ok()?).copied()
    };
    match c {
        '×' => 1716,
        '·' => 651,
        '–' => 1024,
        '…' => 2048,
        _ => WIDTHS.iter().find_map(in_row).unwrap_or(OTHER),
    }
}

/// The width of a text, in pixels.
pub(super) fn width_of(text: &str) -> f64 {
    text.chars().map(|c| f64::from(units(c))).sum::<f64>() / EM * PIXELS
}

/// As much of a text as fits in so many pixels; what is cut off is shown by `…`.
pub(super) fn fit(text: &str, pixels: f64) -> String {
    if width_of(text) <= pixels {
        return text.to_owned();
    }
    let mut kept = String::new();
    for c in text.chars() {
        kept.push(c);
        if width_of(&kept) + width_of("…") > pixels {
            kept.pop();
            break;
        }
    }
    kept + "…"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_letters_are_wide() {
        assert!((width_of("0") - 7.634_765_625).abs() < 1e-9);
        assert!((width_of("m") - 11.689_453_125).abs() < 1e-9);
        assert!((width_of("~") - 10.054_687_5).abs() < 1e-9);
        assert!(width_of("WWWW") > 2.0 * width_of("ffff"));
        // 6.7 px for each, as it was: too little for the labels of the cells.
        assert!(width_of("4k randwrite QD32") > 17.0 * 6.7 * 0.95);
        assert!(width_of("rblk-verbs MMMM") > 15.0 * 6.7);
    }

    #[test]
    fn what_is_cut_fits() {
        assert_eq!(fit("short", 100.0), "short");
        for pixels in [20.0, 50.0, 100.0] {
            let text = fit("a label that is longer than its place WWWWW", pixels);
            assert!(width_of(&text) <= pixels && text.ends_with('…'), "{text}");
        }
    }
}
