//! [`judge`]: all faults of a table of keys at once: of each key alone, and between keys.
//!
//! Contract: a relation between keys is judged by valid values only. A relation is left out if one
//! of its keys is refused itself, so that one mistake is one fault.

use serde::de::DeserializeOwned;
use toml::{Table, Value};

use crate::error::Fault;
use crate::schema::rule::Schema;

/// The value of a table, or all its faults. `relate` adds the faults between keys that are valid
/// alone.
pub(crate) fn judge<T: DeserializeOwned>(
    table: Table,
    schema: &Schema,
    relate: impl Fn(&T, &mut Vec<Fault>),
) -> Result<T, Vec<Fault>> {
    let mut faults = Vec::new();
    schema.judge("", &table, &mut faults);
    let refused: Vec<String> = faults.iter().map(|fault| fault.key.clone()).collect();
    let mut valid = table;
    refused.iter().for_each(|key| remove(&mut valid, key));
    schema.retired.iter().for_each(|key| remove(&mut valid, key.name));
    let value: T = match Value::Table(valid).try_into() {
        Ok(value) => value,
        // The schema is stricter than the types, so this does not happen without faults.
        Err(error) if faults.is_empty() => {
            let text = error.to_string().trim_end().replace('\n', " ");
            return Err(vec![Fault::new("configuration", text, "see the example file")]);
        }
        Err(_) => return Err(faults),
    };
    let mut between = Vec::new();
    relate(&value, &mut between);
    between.retain(|fault| !fault.rests.iter().any(|rest| is_refused(rest, &refused)));
    between.retain(|fault| !stands_beside(fault, &refused));
    faults.extend(between);
    if faults.is_empty() { Ok(value) } else { Err(faults) }
}

/// Whether a key, a part of it, or its parent is refused. `volume[].name` is that of any volume.
fn is_refused(key: &str, refused: &[String]) -> bool {
    let is_part = |part: &str, of: &str| match part.strip_prefix(of) {
        Some(rest) => rest.is_empty() || rest.starts_with(['.', '[']),
        None => false,
    };
    refused.iter().any(|other| {
        let other = if key.contains("[]") { without_indices(other) } else { other.clone() };
        is_part(&other, key) || is_part(key, &other)
    })
}

/// `volume[2].name` as `volume[].name`.
fn without_indices(key: &str) -> String {
    let mut inside = false;
    let kept = key.chars().filter(|c| {
        inside = (inside || *c == '[') && *c != ']';
        !inside || *c == '['
    });
    kept.collect()
}

/// Whether a fault is about a refused key, or rests on one of the same table.
fn stands_beside(fault: &Fault, refused: &[String]) -> bool {
    let table = fault.key.rfind('.').map(|dot| &fault.key[..dot]);
    let beside = table.filter(|_| fault.rests_beside);
    let keys = [Some(fault.key.as_str()), fault.other.as_deref(), beside];
    keys.into_iter().flatten().any(|key| is_refused(key, refused))
}

/// Takes a key out of the table that has it: `arena`, `listen[1]` (all of `listen`),
/// `volume[2].size`.
fn remove(table: &mut Table, key: &str) {
    let (head, rest) = key.split_once('.').unwrap_or((key, ""));
    let (name, index) = head.split_once('[').unwrap_or((head, ""));
    if rest.is_empty() {
        table.remove(name);
    } else if let Ok(index) = index.trim_end_matches(']').parse::<usize>()
        && let Some(Value::Array(all)) = table.get_mut(name)
        && let Some(Value::Table(inner)) = all.get_mut(index)
    {
        remove(inner, rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_taken_out_where_they_are() {
        let left = |key: &str| {
            let mut table: Table =
                "a = 1\nl = [1, 2]\n[[t]]\nx = 1\ny = [3]\n[[t]]\nx = 2\n".parse().unwrap();
            remove(&mut table, key);
            table.to_string().replace('\n', " ")
        };
        let whole = left("none");
        assert!(!left("a").contains("a = 1"));
        assert!(!left("l[1]").contains("l = "));
        assert!(left("t[0].y[0]").contains("x = 1") && !left("t[0].y[0]").contains("y = "));
        assert!(!left("t[1].x").contains("x = 2") && left("t[1].x").contains("x = 1"));
        for unchanged in ["t[7].x", "b[0]", "a.b", ""] {
            assert_eq!(left(unchanged), whole, "{unchanged}");
        }
    }

    #[test]
    fn a_key_is_refused_with_its_parts() {
        let refused = ["volume[1].size".to_owned(), "max_io".to_owned()];
        for key in ["volume", "volume[1]", "volume[1].size", "max_io"] {
            assert!(is_refused(key, &refused), "{key}");
        }
        for key in ["volume[0]", "volume[1].name", "volume[].name", "max", "size"] {
            assert!(!is_refused(key, &refused), "{key}");
        }
        assert!(is_refused("volume[].size", &refused));
        assert!(is_refused("volume[].name", &["volume".to_owned()]));
    }
}
