//! [`Rule`]: the allowed values of a key; [`Key`]: the description of one key; [`Schema`]: the keys
//! of one table. A rule of tables names their schema, and a schema has keys with rules.
//!
//! Files, command lines, their help and the reference use the same tables of keys.

use toml::{Table, Value};

use crate::error::Fault;
use crate::key_file::CREDENTIAL;
use crate::schema::nearest::nearest;
use crate::units::{ByteSize, Duration};

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

/// The keys that one table may have.
#[derive(Debug)]
pub struct Schema {
    /// In the order of the examples.
    pub(crate) entries: &'static [Key],
    /// The values of the keys that have a default.
    pub(crate) defaults: fn() -> Table,
    /// Keys of former versions.
    pub(crate) retired: &'static [RetiredKey],
}

/// The description of a key.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// The name.
    pub name: &'static str,
    /// Whether the key must be given.
    pub required: bool,
    /// The allowed values of the key.
    pub rule: Rule,
    /// Whether a reload applies a new value to a target or a mount that runs.
    pub live: bool,
    /// The meaning of its absence. Empty for a key with a default.
    pub absent: &'static str,
    /// A value for the example file, as TOML. Empty for a key with a default.
    pub example: &'static str,
    /// The place in docs/ that says more, such as `security.md#encryption`. May be empty.
    pub more: &'static str,
    text: &'static str,
    flag: Flag,
    bare: &'static str,
}

/// The flag of a key.
#[derive(Clone, Copy, Debug)]
enum Flag {
    /// None: a command has an argument of its own for the key, or only files have the key.
    None,
    /// The name of the key, with `-` for `_`.
    Same,
    /// Another name.
    Named(&'static str),
}

/// A key of former versions, which has no effect any more. A file that has it is accepted.
#[derive(Debug)]
pub struct RetiredKey {
    /// The name.
    pub name: &'static str,
    /// The version that ignores it first.
    pub since: &'static str,
    /// The behaviour now.
    pub now: &'static str,
}

impl Key {
    /// A key with a default, which [`key_table!`] names and describes.
    pub(crate) const fn new(rule: Rule) -> Self {
        Self {
            name: "",
            required: false,
            rule,
            live: false,
            absent: "",
            example: "",
            more: "",
            text: "",
            flag: Flag::Same,
            bare: "",
        }
    }

    /// A key with a whole number. Bounds are inclusive, here and below.
    pub(crate) const fn count(min: u32, max: u32) -> Self {
        Self::new(Rule::Count { min, max })
    }

    /// A key with a size.
    pub(crate) const fn size(min: u64, max: u64, step: u64) -> Self {
        Self::new(Rule::Size { min, max, step })
    }

    /// A key with a time.
    pub(crate) const fn span(min: Duration, max: Duration) -> Self {
        Self::new(Rule::Span { min, max })
    }

    /// A key with one of a few words.
    pub(crate) const fn word(words: &'static [&'static str]) -> Self {
        Self::new(Rule::Word(words))
    }

    /// A key with a list.
    pub(crate) const fn list(item: &'static Rule, max: usize) -> Self {
        Self::new(Rule::List { item, max })
    }

    /// Sets name and description.
    pub(crate) const fn described(self, name: &'static str, text: &'static str) -> Self {
        let name = if self.name.is_empty() { name } else { self.name };
        Self { name, text, ..self }
    }

    /// Says that the name differs from that of the field.
    pub(crate) const fn named(self, name: &'static str) -> Self {
        Self { name, ..self }
    }

    /// Says that the key must be given, with a value for the example file.
    pub(crate) const fn required(self, example: &'static str) -> Self {
        Self { required: true, example, ..self }
    }

    /// Says what the absence of the key means, with a value for the example file.
    pub(crate) const fn absent(self, meaning: &'static str, example: &'static str) -> Self {
        Self { absent: meaning, example, ..self }
    }

    /// Says that a reload applies a new value.
    pub(crate) const fn live(self) -> Self {
        Self { live: true, ..self }
    }

    /// Names the place in docs/ that says more.
    pub(crate) const fn more(self, place: &'static str) -> Self {
        Self { more: place, ..self }
    }

    /// Names the flag. The name of the key is a second name of the flag, unless it is the plural.
    pub(crate) const fn flag(self, name: &'static str) -> Self {
        Self { flag: Flag::Named(name), ..self }
    }

    /// Names the value of the flag without a value.
    pub(crate) const fn bare(self, value: &'static str) -> Self {
        Self { bare: value, ..self }
    }

    /// Says that no flag is made of the key.
    pub(crate) const fn no_flag(self) -> Self {
        Self { flag: Flag::None, ..self }
    }

    /// The name of its flag, without the dashes.
    #[must_use]
    pub fn flag_name(&self) -> Option<String> {
        match self.flag {
            Flag::None => None,
            Flag::Same => Some(self.name.replace('_', "-")),
            Flag::Named(name) => Some(name.to_owned()),
        }
    }

    /// The value of its flag without a value. `None`: the flag needs a value.
    #[must_use]
    pub fn bare_value(&self) -> Option<&'static str> {
        match self.rule {
            Rule::Flag => Some("true"),
            _ => Some(self.bare).filter(|bare| !bare.is_empty()),
        }
    }

    /// A second name of its flag.
    #[must_use]
    pub fn flag_alias(&self) -> Option<String> {
        match self.flag {
            // A flag of a list names one item.
            Flag::Named(name) if !self.name.starts_with(&name.replace('-', "_")) => {
                Some(self.name.replace('_', "-"))
            }
            _ => None,
        }
    }

    /// The description: paragraphs, without line breaks. Names of keys are between backticks.
    #[must_use]
    pub fn paragraphs(&self) -> Vec<String> {
        let mut all = vec![String::new()];
        for line in self.text.lines().map(str::trim) {
            let last = all.len() - 1;
            if line.is_empty() {
                all.push(String::new());
            } else if all[last].is_empty() {
                line.clone_into(&mut all[last]);
            } else {
                all[last] = format!("{} {line}", all[last]);
            }
        }
        all.retain(|paragraph| !paragraph.is_empty());
        all
    }

    /// The description for a terminal or a file: without backticks around single words.
    #[must_use]
    pub fn plain_paragraphs(&self) -> Vec<String> {
        self.paragraphs().iter().map(|paragraph| without_ticks(paragraph)).collect()
    }
}

impl Schema {
    /// The keys, in the order of the examples.
    pub fn keys(&self) -> impl Iterator<Item = &'static Key> + use<> {
        self.entries.iter().flat_map(|entry| match entry.rule {
            Rule::Keys(inner) => inner.entries,
            _ => std::slice::from_ref(entry),
        })
    }

    /// The key of a name.
    #[must_use]
    pub fn key(&self, name: &str) -> Option<&'static Key> {
        self.keys().find(|key| key.name == name)
    }

    /// The default of a key, as it stands in a file. `None` without one.
    #[must_use]
    pub fn default_of(&self, key: &Key) -> Option<Value> {
        if key.required { None } else { (self.defaults)().remove(key.name) }
    }

    /// The keys of former versions, which have no effect any more.
    #[must_use]
    pub fn retired(&self) -> &'static [RetiredKey] {
        self.retired
    }

    /// Adds the faults of a table to `faults`. `path` is the path of the table, empty for a file.
    pub(crate) fn judge(&self, path: &str, table: &Table, faults: &mut Vec<Fault>) {
        for (name, value) in table {
            match self.key(name) {
                Some(key) => key.rule.judge(&join(path, name), value, faults),
                None if self.retired.iter().any(|retired| retired.name == name) => {}
                None => faults.push(self.unknown(path, name)),
            }
        }
        for key in self.keys().filter(|key| key.required && !table.contains_key(key.name)) {
            faults.push(Fault::new(join(path, key.name), "missing", key.rule.fix()));
        }
    }

    fn unknown(&self, path: &str, name: &str) -> Fault {
        let known: Vec<_> = self.keys().map(|key| key.name).collect();
        let fix = match nearest(name, known.iter().copied()) {
            Some(near) => format!("did you mean {near}?"),
            None => format!("the known keys are {}", known.join(", ")),
        };
        Fault::new(join(path, name), "unknown key", fix).at_key()
    }
}

impl RetiredKey {
    /// The warning for a file that has the key.
    pub(crate) fn warning(&self) -> String {
        let Self { name, since, now } = self;
        format!("{name} has no effect since version {since}: {now}; remove the line")
    }
}

/// The text without backticks around single words.
fn without_ticks(text: &str) -> String {
    let mut plain = String::new();
    let mut parts = text.split('`');
    plain.push_str(parts.next().unwrap_or_default());
    while let Some(quoted) = parts.next() {
        let tick = if quoted.contains(' ') { "`" } else { "" };
        plain.push_str(&format!("{tick}{quoted}{tick}"));
        plain.push_str(parts.next().unwrap_or_default());
    }
    plain
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backticks_stay_around_commands() {
        let text = "see `max_io`, and `rblk-target key new`.";
        assert_eq!(without_ticks(text), "see max_io, and `rblk-target key new`.");
    }
}
