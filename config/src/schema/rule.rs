//! The allowed values of keys. Files, command lines and manual pages use the same tables of keys.

use std::net::{Ipv6Addr, SocketAddr};

use toml::Value;

use crate::error::Fault;
use crate::key_file::CREDENTIAL;
use crate::schema::key_table::Schema;
use crate::units::{ByteSize, Duration};
use rblk_protocol::limits::NAME_BYTES;

/// The rule of a value. Bounds are inclusive.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Rule {
    /// A [`ByteSize`] that is a power of two.
    PowerOfTwo {
        /// Least bytes.
        min: u64,
        /// Most bytes.
        max: u64,
    },
    /// A [`ByteSize`].
    Size {
        /// Least bytes.
        min: u64,
        /// Most bytes.
        max: u64,
        /// The size must be a multiple of this.
        step: u64,
    },
    /// A [`Duration`].
    Span {
        /// Least.
        min: Duration,
        /// Most.
        max: Duration,
    },
    /// A [`Spin`](crate::Spin).
    Spin {
        /// The longest time.
        max: Duration,
    },
    /// A whole number.
    Count {
        /// Least.
        min: u32,
        /// Most.
        max: u32,
    },
    /// One of a few whole numbers.
    Choice(&'static [u32]),
    /// One of a few words.
    Word(&'static [&'static str]),
    /// `true` or `false`.
    Flag,
    /// A string that a function checks.
    Text {
        /// The word for a value in help.
        noun: &'static str,
        /// The fix, as an example or a description.
        form: &'static str,
        /// Returns the fault.
        check: fn(&str) -> Result<(), String>,
    },
    /// An array of different values.
    List {
        /// Each of them.
        item: &'static Rule,
        /// Most values. There must be at least one.
        max: usize,
    },
    /// An array of tables: `[[key]]`.
    Tables(&'static Schema),
    /// The keys of another schema, beside the others of the table.
    Keys(&'static Schema),
}

/// A name of a volume, host, target or mount, as the protocol allows it: safe in paths and on
/// command lines.
pub(crate) const NAME: Rule = Rule::Text {
    noun: "name",
    form: "1 to 64 letters, digits, \".\", \"_\" or \"-\", not starting with \".\" or \"-\"",
    check: check_name,
};

/// An address of a target.
pub(crate) const ADDRESS: Rule = Rule::Text {
    noun: "address",
    form: "an address such as \"rdma://192.0.2.1:7720\" or \"tcp://[2001:db8::1]:7721\"",
    check: check_address,
};

/// An absolute path.
pub(crate) const PATH: Rule = Rule::Text {
    noun: "path",
    form: "an absolute path such as \"/srv/rblk/a.img\"",
    check: check_path,
};

/// An absolute path of a directory.
pub(crate) const DIRECTORY: Rule = Rule::Text {
    noun: "path",
    form: "an absolute path such as \"/var/lib/rblk\"",
    check: check_path,
};

/// An absolute path that fits a socket address.
pub(crate) const SOCKET: Rule = Rule::Text {
    noun: "path",
    form: "an absolute path of at most 107 bytes such as \"/run/rblk/target/control.sock\"",
    check: check_socket,
};

/// An address of this host in numbers, and a port.
pub(crate) const SOCKET_ADDRESS: Rule = Rule::Text {
    noun: "address:port",
    form: "an address and a port such as \"127.0.0.1:9720\" or \"[::1]:9720\"",
    check: check_socket_address,
};

/// A key file.
pub(crate) const KEY_FILE: Rule = Rule::Text {
    noun: "path",
    form: "an absolute path such as \"/etc/rblk/target.key\", or \"credential:NAME\" for a credential of systemd",
    check: check_key_file,
};

/// Memory that programs share.
pub(crate) const MEMORY_FILE: Rule = Rule::Text {
    noun: "path",
    form: "an absolute path of a file of tmpfs or hugetlbfs, such as \"/dev/shm/database\"",
    check: check_path,
};

impl Rule {
    /// The fix, starting with the verb.
    #[must_use]
    pub(crate) fn fix(&self) -> String {
        match self {
            Self::Tables(_) => "write one table or more under double brackets".to_owned(),
            Self::List { item, .. } => {
                format!("write a list of one or more, each {}", item.accepts())
            }
            _ => format!("write {}", self.accepts()),
        }
    }

    /// The accepted values, as a noun.
    #[must_use]
    pub(crate) fn accepts(&self) -> String {
        match self {
            Self::PowerOfTwo { min, max } => {
                format!("a power of two from \"{}\" to \"{}\"", ByteSize(*min), ByteSize(*max))
            }
            Self::Size { min, max, step: 1 } => {
                format!("a size from \"{}\" to \"{}\"", ByteSize(*min), ByteSize(*max))
            }
            Self::Size { min, max, step } => format!(
                "a multiple of {} from \"{}\" to \"{}\"",
                ByteSize(*step),
                ByteSize(*min),
                ByteSize(*max)
            ),
            Self::Span { min, max } => format!("a duration from \"{min}\" to \"{max}\""),
            Self::Spin { max } => {
                format!("\"adaptive\", \"always\" or a duration from \"0s\" to \"{max}\"")
            }
            Self::Count { min, max } => format!("a whole number from {min} to {max}"),
            Self::Choice(numbers) => alternatives(numbers.iter().map(ToString::to_string)),
            Self::Word(words) => alternatives(words.iter().map(|word| format!("\"{word}\""))),
            Self::Flag => "true or false".to_owned(),
            Self::Text { form, .. } => (*form).to_owned(),
            Self::List { item, .. } => format!("a list of {}", item.accepts()),
            Self::Tables(_) | Self::Keys(_) => "tables".to_owned(),
        }
    }

    /// The accepted values in a few words, as in a table of keys.
    #[must_use]
    pub fn values(&self) -> String {
        let words = |words: &[&str]| {
            words.iter().map(|word| format!("\"{word}\"")).collect::<Vec<_>>().join(", ")
        };
        match self {
            Self::PowerOfTwo { min, max } => {
                format!("power of two, {} to {}", ByteSize(*min), ByteSize(*max))
            }
            Self::Size { min, max, step: 1 } => {
                format!("{} to {}", ByteSize(*min), ByteSize(*max))
            }
            Self::Size { min, max, step } => {
                let (min, max, step) = (ByteSize(*min), ByteSize(*max), ByteSize(*step));
                format!("{min} to {max}, multiple of {step}")
            }
            Self::Span { min, max } => format!("{min} to {max}"),
            Self::Spin { max } => format!("\"adaptive\", \"always\", 0s to {max}"),
            Self::Count { min, max } => format!("{min} to {max}"),
            Self::Choice(numbers) => {
                numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
            }
            Self::Word(known) => words(known),
            Self::Flag => "true, false".to_owned(),
            Self::Text { noun, .. } => (*noun).to_owned(),
            Self::List { item: Self::Text { noun, .. }, max } => {
                let plural = if noun.ends_with('s') { "es" } else { "s" };
                format!("list of 1 to {max} {noun}{plural}")
            }
            Self::List { item, max } => format!("list of 1 to {max} numbers, {}", item.values()),
            Self::Tables(_) | Self::Keys(_) => "tables".to_owned(),
        }
    }

    /// The word for a value in the help of a flag.
    #[must_use]
    pub fn value_name(&self) -> String {
        match self {
            Self::PowerOfTwo { .. } | Self::Size { .. } => "SIZE".to_owned(),
            Self::Span { .. } | Self::Spin { .. } => "TIME".to_owned(),
            Self::Count { .. } => "N".to_owned(),
            Self::Choice(numbers) => {
                numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join("|")
            }
            Self::Word(words) => words.join("|"),
            Self::Flag => "true|false".to_owned(),
            Self::Text { noun, .. } => {
                noun.rsplit(' ').next().unwrap_or_default().to_ascii_uppercase()
            }
            Self::List { item, .. } => item.value_name(),
            Self::Tables(_) | Self::Keys(_) => String::new(),
        }
    }

    /// A text of a command line as a value, which the rule may still refuse. A relative path is one
    /// below the current directory.
    pub(crate) fn value_of(&self, text: &str) -> Value {
        match self {
            Self::Count { .. } | Self::Choice(_) => text.parse().map(Value::Integer).ok(),
            Self::Flag => text.parse().map(Value::Boolean).ok(),
            Self::Text { noun: "path", .. }
                if !text.is_empty() && !text.starts_with(CREDENTIAL) =>
            {
                let path = std::path::absolute(text).ok();
                path.and_then(|path| path.to_str().map(|path| Value::String(path.to_owned())))
            }
            _ => None,
        }
        .unwrap_or_else(|| Value::String(text.to_owned()))
    }

    /// Adds the faults of a value.
    pub(crate) fn judge(&self, path: &str, value: &Value, faults: &mut Vec<Fault>) {
        match self {
            Self::List { item, max } => self.judge_list(item, *max, path, value, faults),
            Self::Tables(schema) => {
                let tables = value.as_array().filter(|all| all.iter().all(Value::is_table));
                let Some(tables) = tables else {
                    let problem = format!("{}, not tables", kind(value));
                    let fix = format!("write [[{path}]] above the keys of each");
                    return faults.push(Fault::new(path, problem, fix));
                };
                for (index, table) in tables.iter().filter_map(Value::as_table).enumerate() {
                    schema.judge(&format!("{path}[{index}]"), table, faults);
                }
            }
            _ => {
                if let Err(problem) = self.judge_scalar(value) {
                    let fix = self.fix_for(value);
                    faults.push(Fault::new(path, problem, fix).value(value.clone()));
                }
            }
        }
    }

    fn judge_list(
        &self,
        item: &Rule,
        max: usize,
        path: &str,
        value: &Value,
        faults: &mut Vec<Fault>,
    ) {
        let Some(values) = value.as_array() else {
            let problem = format!("{}, not a list", kind(value));
            return faults.push(Fault::new(path, problem, self.fix()).value(value.clone()));
        };
        if values.is_empty() {
            return faults.push(Fault::new(path, "empty", self.fix()).value(value.clone()));
        }
        if values.len() > max {
            let problem = format!("{} values, the limit is {max}", values.len());
            return faults.push(Fault::new(path, problem, "remove some of them"));
        }
        for (index, value) in values.iter().enumerate() {
            let at = format!("{path}[{index}]");
            if let Some(first) = values[..index].iter().position(|earlier| earlier == value) {
                let problem = format!("the same value as {path}[{first}]");
                faults.push(Fault::new(at, problem, "remove one of them").value(value.clone()));
            } else {
                item.judge(&at, value, faults);
            }
        }
    }

    fn judge_scalar(&self, value: &Value) -> Result<(), String> {
        match self {
            Self::PowerOfTwo { min, max } => {
                let size = size(value)?;
                within(size, ByteSize(*min), ByteSize(*max))?;
                if size.0.is_power_of_two() { Ok(()) } else { Err("not a power of two".to_owned()) }
            }
            Self::Size { min, max, step } => {
                let size = size(value)?;
                within(size, ByteSize(*min), ByteSize(*max))?;
                match size.0 % step {
                    0 => Ok(()),
                    _ => Err(format!("not a multiple of {}", ByteSize(*step))),
                }
            }
            Self::Span { min, max } => judge_span(value, *min, *max),
            Self::Spin { max } => match value.as_str().map(str::trim) {
                Some("adaptive" | "always") => Ok(()),
                _ => judge_span(value, Duration::default(), *max),
            },
            Self::Count { min, max } => within(integer(value)?, i64::from(*min), i64::from(*max)),
            Self::Choice(numbers) => {
                let number = integer(value)?;
                match numbers.iter().any(|allowed| i64::from(*allowed) == number) {
                    true => Ok(()),
                    false => Err("not one of the choices".to_owned()),
                }
            }
            Self::Word(words) => match value.as_str() {
                Some(text) if words.contains(&text) => Ok(()),
                Some(_) => Err("not one of the choices".to_owned()),
                None => Err(format!("{}, not a string", kind(value))),
            },
            Self::Flag if value.is_bool() => Ok(()),
            Self::Flag => Err(format!("{}, not true or false", kind(value))),
            Self::Text { check, .. } => match value.as_str() {
                Some(text) => check(text),
                None => Err(format!("{}, not a string", kind(value))),
            },
            // Lists and tables have functions of their own.
            Self::List { .. } | Self::Tables(_) | Self::Keys(_) => Ok(()),
        }
    }

    /// The fix, with the nearest valid values.
    fn fix_for(&self, value: &Value) -> String {
        let fix = self.fix();
        match self {
            Self::PowerOfTwo { min, max } => match size(value) {
                Ok(size) if size.0 > *min && size.0 < *max => {
                    let above = size.0.next_power_of_two();
                    format!("{fix}, such as \"{}\" or \"{}\"", ByteSize(above / 2), ByteSize(above))
                }
                _ => fix,
            },
            Self::Word(words) => {
                match value.as_str().and_then(|text| nearest(text, words.iter().copied())) {
                    Some(near) => format!("{fix}; did you mean \"{near}\"?"),
                    None => fix,
                }
            }
            _ => fix,
        }
    }
}

/// Path of a key in a table.
pub(crate) fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

fn within<T: PartialOrd + std::fmt::Display>(value: T, min: T, max: T) -> Result<(), String> {
    if value < min {
        return Err(format!("less than {min}"));
    }
    if value > max {
        return Err(format!("more than {max}"));
    }
    Ok(())
}

fn size(value: &Value) -> Result<ByteSize, String> {
    match value {
        Value::String(text) => text.parse().map_err(|e| format!("{e}")),
        Value::Integer(bytes) => {
            u64::try_from(*bytes).map(ByteSize).map_err(|_| "negative".to_owned())
        }
        Value::Float(_) => Err("a fraction; use a smaller unit".to_owned()),
        _ => Err(format!("{}, not a size", kind(value))),
    }
}

fn judge_span(value: &Value, min: Duration, max: Duration) -> Result<(), String> {
    match value {
        Value::String(text) => {
            let span: Duration = text.parse().map_err(|e| format!("{e}"))?;
            within(span, min, max)
        }
        Value::Integer(_) | Value::Float(_) => Err("a number without a unit".to_owned()),
        _ => Err(format!("{}, not a duration", kind(value))),
    }
}

fn integer(value: &Value) -> Result<i64, String> {
    value.as_integer().ok_or_else(|| match value {
        Value::Float(_) => "a fraction".to_owned(),
        _ => format!("{}, not a number", kind(value)),
    })
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::String(_) => "a string",
        Value::Integer(_) | Value::Float(_) => "a number",
        Value::Boolean(_) => "true or false",
        Value::Datetime(_) => "a date",
        Value::Array(_) => "a list",
        Value::Table(_) => "a table",
    }
}

fn alternatives(items: impl Iterator<Item = String>) -> String {
    let mut items: Vec<_> = items.collect();
    match items.pop() {
        Some(last) if !items.is_empty() => format!("{} or {last}", items.join(", ")),
        last => last.unwrap_or_default(),
    }
}

pub(crate) fn check_name(text: &str) -> Result<(), String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if text.is_empty() {
        return Err("empty".to_owned());
    }
    if let Some(bad) = text.chars().find(|c| !allowed(*c)) {
        return Err(format!("{bad:?} is not allowed in a name"));
    }
    if text.starts_with(['.', '-']) {
        return Err(format!("starts with {:?}", &text[..1]));
    }
    if text.len() > NAME_BYTES {
        return Err(format!("{} characters, the limit is {NAME_BYTES}", text.len()));
    }
    Ok(())
}

fn check_socket_address(text: &str) -> Result<(), String> {
    match text.parse::<SocketAddr>() {
        Ok(address) if address.port() == 0 => Err("no port".to_owned()),
        Ok(_) => Ok(()),
        Err(_) => Err("not an address in numbers with a port".to_owned()),
    }
}

/// Checks only the rules that hold for every provider. The provider checks the rest.
fn check_address(text: &str) -> Result<(), String> {
    let (scheme, host) = text.split_once("://").unwrap_or(("rdma", text));
    if text.is_empty() {
        return Err("empty".to_owned());
    }
    let lower = scheme.to_ascii_lowercase();
    if lower != scheme && matches!(lower.as_str(), "rdma" | "tcp") {
        return Err(format!("the scheme {scheme:?} is in upper case, schemes are in lower case"));
    }
    if !matches!(scheme, "rdma" | "tcp") {
        return Err(format!("unknown scheme {scheme:?}, the schemes are rdma and tcp"));
    }
    if host.ends_with('/') {
        return Err("a `/` follows, remove it".to_owned());
    }
    if host.contains(|c: char| c.is_whitespace() || c.is_control() || c == '/') {
        return Err("the host is not a name or an IP address".to_owned());
    }
    if host.is_empty() || host == "[]" || (host.starts_with(':') && !host.starts_with("::")) {
        return Err("no host".to_owned());
    }
    let ip = host.strip_prefix('[').and_then(|inner| inner.split(']').next()).unwrap_or(host);
    if ip.parse::<Ipv6Addr>().is_ok_and(|ip| ip.is_unicast_link_local()) {
        return Err(format!("a link-local address needs its interface, such as \"[{ip}%eth0]\""));
    }
    let port = match host.strip_prefix('[') {
        Some(inner) => match inner.split_once(']') {
            None => return Err("`[` without `]`".to_owned()),
            Some((_, "")) => None,
            Some((_, after)) => Some(after.strip_prefix(':').ok_or("text after `]`")?),
        },
        // More than one colon: an IPv6 address without a port.
        None if host.matches(':').count() > 1 => None,
        None => host.split_once(':').map(|(_, port)| port),
    };
    match port.map(str::parse::<u16>) {
        None | Some(Ok(1..)) => Ok(()),
        _ => Err("the port is not a number from 1 to 65535".to_owned()),
    }
}

fn check_path(text: &str) -> Result<(), String> {
    if text.is_empty() {
        return Err("empty".to_owned());
    }
    if text.contains('\0') {
        return Err("contains a NUL character".to_owned());
    }
    if !text.starts_with('/') {
        return Err("not absolute".to_owned());
    }
    Ok(())
}

fn check_key_file(text: &str) -> Result<(), String> {
    match text.strip_prefix(CREDENTIAL) {
        Some(name) => check_name(name),
        None => check_path(text),
    }
}

fn check_socket(text: &str) -> Result<(), String> {
    check_path(text)?;
    match text.len() {
        0..=107 => Ok(()),
        len => Err(format!("{len} bytes, a socket address holds 107")),
    }
}

/// The candidate that was probably meant, if one is close.
pub(crate) fn nearest<'a>(
    word: &str,
    candidates: impl Iterator<Item = &'a str>,
) -> Option<&'a str> {
    let word = word.to_ascii_lowercase().replace('-', "_");
    candidates
        .map(|candidate| (distance(&word, candidate), candidate))
        .filter(|(distance, candidate)| *distance <= 1 + candidate.len() / 4)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// Edits (insert, delete, replace, swap of neighbours) between two words.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<_>, Vec<_>) = (a.chars().collect(), b.chars().collect());
    let mut before: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replaced = last[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = replaced.min(last[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(before[j - 2] + 1);
            }
            row.push(best);
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        for (a, b, edits) in [
            ("", "", 0),
            ("", "abc", 3),
            ("spin", "spin", 0),
            ("areans", "arena", 2),
            ("sipn", "spin", 1),
        ] {
            assert_eq!((distance(a, b), distance(b, a)), (edits, edits), "{a} {b}");
        }
        assert_eq!(nearest("max-io", ["max_io", "spin"].into_iter()), Some("max_io"));
        assert_eq!(nearest("MAX_OI", ["max_io", "spin"].into_iter()), Some("max_io"));
        assert_eq!(nearest("colour", ["max_io", "spin"].into_iter()), None);
    }

    #[test]
    fn addresses() {
        for good in [
            "rdma://0.0.0.0:7720",
            "tcp://[::]:7721",
            "rdma://fd00::7",
            "rdma://::1",
            "store1",
            "store1:9000",
            "tcp://[fe80::1%eth0]:99",
        ] {
            assert_eq!(check_address(good), Ok(()), "{good}");
        }
        for bad in
            ["", "rdma://", "tcp://:7721", "http://x", "a b", "rdma://a/b", "rdma://[]", "://x"]
                .into_iter()
                .chain(["x:0", "tcp://x:65536", "x:", "x:y", "[::1", "[::1]9", "tcp://[::1]:y"])
        {
            assert!(check_address(bad).is_err(), "{bad}");
        }
        for (slip, named) in [
            ("TCP://store1", "the scheme \"TCP\" is in upper case"),
            ("tcp://store1:7721/", "a `/` follows, remove it"),
            ("tcp://[fe80::1]:7721", "needs its interface, such as \"[fe80::1%eth0]\""),
            ("fe80::1", "needs its interface"),
        ] {
            let said = check_address(slip).unwrap_err();
            assert!(said.contains(named), "{slip}: {said}");
        }
    }
}
