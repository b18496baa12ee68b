//! [`Document`]: the files of one configuration as one table, with the place of each key.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use toml::de::{DeTable, DeValue};
use toml::{Spanned, Value};

use crate::error::{ConfigError, Fault, Site};
use crate::schema::faults::judge;
use crate::schema::flag_layer::{FlagEffect, FlagLayer, FlagValue, Flagged};
use crate::schema::rule::Schema;
use crate::schema::rule::join;

/// Most bytes of a configuration file. A larger file is something else, named by mistake.
const FILE_MAX_BYTES: u64 = 1 << 20;

/// The files of one configuration. A later file adds to the earlier ones or replaces their keys.
#[derive(Debug, Default)]
pub(crate) struct Document {
    table: toml::Table,
    sites: Sites,
}

impl FlagLayer {
    /// The configuration with these values. The rules of the keys hold; those between keys do not.
    ///
    /// # Errors
    /// [`ConfigError`] of a value.
    pub fn over<T: Flagged>(&self, config: &T) -> Result<T, ConfigError> {
        let table =
            toml::Table::try_from(config).map_err(|error| ConfigError::Dump(error.to_string()))?;
        let mut document = Document::of(table);
        document.lay_flags(self);
        document.decode_given(T::schema(), self)
    }
}

/// Where a key and its value are.
#[derive(Debug)]
struct KeySite {
    key: Site,
    value: Site,
}

impl Document {
    /// The document of a configuration that came from elsewhere.
    pub(crate) fn of(table: toml::Table) -> Self {
        Self { table, sites: Sites::default() }
    }

    /// Adds a file. Arrays of tables grow; every other key is replaced.
    pub(crate) fn lay(&mut self, path: &Path) -> Result<(), ConfigError> {
        self.lay_text(&read(path)?, path)
    }

    /// As [`Self::lay`], from text. Errors name it `path`.
    pub(crate) fn lay_text(&mut self, text: &str, path: &Path) -> Result<(), ConfigError> {
        let (table, spans) = parse(text, path)?;
        let source = SourceText { text, path };
        let start = || KeySite { key: source.site(0), value: source.site(0) };
        self.sites.keys.entry(String::new()).or_insert_with(start);
        for (key, value) in table {
            let Some((key_span, span)) = spans.get_ref().get_key_value(key.as_str()) else {
                continue;
            };
            match (self.table.get_mut(&key), value) {
                (Some(Value::Array(all)), Value::Array(more))
                    if is_tables(all) && is_tables(&more) && !more.is_empty() =>
                {
                    source.record_items(&key, all.len(), span, &mut self.sites.keys);
                    all.extend(more);
                }
                (_, value) => {
                    source.record(&key, key_span, span, &mut self.sites.keys);
                    self.table.insert(key, value);
                }
            }
        }
        Ok(())
    }

    /// Adds the values of flags, over those of the files.
    pub(crate) fn lay_flags(&mut self, flags: &FlagLayer) {
        for FlagValue { key, flag, effect } in flags.values() {
            let at = match effect {
                FlagEffect::Value(value) => {
                    self.table.insert((*key).to_owned(), value.clone());
                    (*key).to_owned()
                }
                FlagEffect::Nothing => {
                    self.table.remove(*key);
                    continue;
                }
                FlagEffect::Items(items) => {
                    let all = self.table.entry(*key).or_insert_with(|| Value::Array(Vec::new()));
                    let Value::Array(all) = all else { continue };
                    let first = all.len();
                    all.extend(items.iter().cloned());
                    let others = (first..all.len()).map(|index| format!("{key}[{index}]"));
                    self.sites.flags.extend(others.map(|at| (at, flag.clone())));
                    continue;
                }
                FlagEffect::HostKey { name, key } => {
                    self.lay_host_key(name, key);
                    continue;
                }
            };
            self.sites.flags.insert(at, flag.clone());
        }
    }

    /// Gives a host of the files another key, or adds a host that may open every volume.
    fn lay_host_key(&mut self, name: &str, public: &str) {
        let hosts = self.table.entry("host").or_insert_with(|| Value::Array(Vec::new()));
        let Value::Array(hosts) = hosts else { return };
        let public = Value::String(public.to_owned());
        let mut known = hosts.iter_mut().filter_map(Value::as_table_mut);
        let known = known.find(|host| host.get("name").and_then(Value::as_str) == Some(name));
        if let Some(host) = known {
            if let Some(keys) = host.get_mut("keys").and_then(Value::as_array_mut) {
                keys.push(public);
            }
            return;
        }
        let every = Value::Array(vec![Value::String("*:rw".to_owned())]);
        hosts.push(Value::Table(toml::Table::from_iter([
            ("name".to_owned(), Value::String(name.to_owned())),
            ("keys".to_owned(), Value::Array(vec![public])),
            ("volumes".to_owned(), every),
        ])));
        let at = format!("host[{}]", hosts.len() - 1);
        self.sites.flags.insert(at, None);
    }

    /// Decodes the table after a check of the keys that flags gave, each alone.
    pub(crate) fn decode_given<T: DeserializeOwned>(
        self,
        schema: &Schema,
        flags: &FlagLayer,
    ) -> Result<T, ConfigError> {
        let mut faults = Vec::new();
        for key in schema.keys().filter(|key| flags.has(key.name)) {
            if let Some(value) = self.table.get(key.name) {
                key.rule.judge(key.name, value, &mut faults);
            }
        }
        if !faults.is_empty() {
            return Err(self.sites.refuse(faults));
        }
        let decoded = Value::Table(self.table).try_into();
        decoded.map_err(|error: toml::de::Error| ConfigError::Dump(error.to_string()))
    }

    /// Checks the whole table and decodes it. `relate` adds the faults between keys.
    pub(crate) fn decode<T: DeserializeOwned>(
        self,
        schema: &Schema,
        relate: impl Fn(&T, &mut Vec<Fault>),
    ) -> Result<T, ConfigError> {
        judge(self.table, schema, relate).map_err(|faults| self.sites.refuse(faults))
    }
}

/// The origins of the keys of a configuration.
#[derive(Debug, Default)]
pub(crate) struct Sites {
    /// Places in files.
    keys: HashMap<String, KeySite>,
    /// Keys whose value a flag gave: the flag, or `None` for a flag that is not named like its key.
    flags: HashMap<String, Option<String>>,
}

impl Sites {
    /// An error from faults that have no place yet.
    pub(crate) fn refuse(&self, mut faults: Vec<Fault>) -> ConfigError {
        for fault in &mut faults {
            match nearest(&self.flags, &fault.key) {
                Some(flag) => fault.flag.clone_from(flag),
                None => fault.site = self.find(&fault.key, fault.at_key),
            }
            if let Some(other) = &fault.other {
                fault.other_site = self.find(other, false);
            }
        }
        faults.sort_by(|a, b| a.site.cmp(&b.site));
        ConfigError::Invalid { faults }
    }

    /// The place of a key. If it has none: of the nearest table around it, or the start of the
    /// first file.
    fn find(&self, path: &str, at_key: bool) -> Option<Site> {
        let site = nearest(&self.keys, path).or_else(|| self.keys.get(""))?;
        Some(if at_key { site.key.clone() } else { site.value.clone() })
    }
}

/// The entry of a key, or of the nearest key around it.
fn nearest<'s, T>(entries: &'s HashMap<String, T>, path: &str) -> Option<&'s T> {
    let mut path = path;
    while !path.is_empty() {
        if let Some(entry) = entries.get(path) {
            return Some(entry);
        }
        path = &path[..path.rfind(['.', '[']).unwrap_or(0)];
    }
    None
}

/// A file of `X.d/` as it will be.
#[derive(Debug)]
pub(crate) struct Draft {
    /// The file, whether it is there or not.
    pub(crate) path: PathBuf,
    /// The new content. `None`: the file will be removed.
    pub(crate) text: Option<String>,
}

/// `X.toml`, then every `*.toml` of `X.d/`, with the draft instead of the file of its path.
pub(crate) fn lay_with_drop_ins(
    path: &Path,
    draft: Option<&Draft>,
) -> Result<Document, ConfigError> {
    let mut document = Document::default();
    document.lay(path)?;
    let Some(directory) = drop_ins_of(path) else { return Ok(document) };
    let mut files = toml_files(&directory)?;
    if let Some(draft) = draft {
        files.push(draft.path.clone());
        files.sort();
        files.dedup();
    }
    for file in files {
        match draft.filter(|draft| draft.path == file) {
            None => document.lay(&file)?,
            Some(Draft { text: Some(text), .. }) => document.lay_text(text, &file)?,
            Some(Draft { text: None, .. }) => {}
        }
    }
    Ok(document)
}

/// The directory of the drop-ins of `X.toml`: `X.d`. A file with another ending has none.
pub(crate) fn drop_ins_of(path: &Path) -> Option<PathBuf> {
    let is_toml = path.extension().is_some_and(|extension| extension == "toml");
    is_toml.then(|| path.with_extension("d"))
}

/// Warnings of a file: keys of former versions, which have no effect any more.
pub(crate) fn retired_keys(path: &Path, schema: &Schema) -> Vec<String> {
    let table = read(path).ok().and_then(|text| text.parse::<toml::Table>().ok());
    let table = table.unwrap_or_default();
    let found = schema.retired.iter().filter(|retired| table.contains_key(retired.name));
    found.map(|retired| format!("{}: {}", path.display(), retired.warning())).collect()
}

/// A directory that looks like the drop-ins of a file and is not read.
///
/// For `target.toml` the directory is `target.d`; people also make `target.toml.d`, as systemd has
/// it.
#[must_use]
pub fn ignored_drop_ins(path: &Path) -> Option<String> {
    let mut ignored = path.as_os_str().to_owned();
    ignored.push(".d");
    let ignored = PathBuf::from(ignored);
    if !ignored.is_dir() {
        return None;
    }
    let fix = match drop_ins_of(path) {
        Some(read) => format!("the drop-ins of {} are in {}", path.display(), read.display()),
        None => format!("{} has no drop-ins, as its name does not end in .toml", path.display()),
    };
    Some(format!("{} is not read: {fix}", ignored.display()))
}

/// The `*.toml` files of a directory in the order of their names, without hidden files. None if
/// there is no such directory.
fn toml_files(directory: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    let fail = |error| ConfigError::Read { path: directory.to_owned(), error };
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(fail)?,
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(fail)?.path();
        let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if !hidden && path.extension().is_some_and(|extension| extension == "toml") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn read(path: &Path) -> Result<String, ConfigError> {
    let fail = |error| ConfigError::Read { path: path.to_owned(), error };
    let mut text = String::new();
    let file = File::open(path).map_err(fail)?;
    file.take(FILE_MAX_BYTES + 1).read_to_string(&mut text).map_err(fail)?;
    if text.len() as u64 > FILE_MAX_BYTES {
        return Err(fail(io::Error::new(
            io::ErrorKind::FileTooLarge,
            "larger than 1MiB, so it is not a configuration",
        )));
    }
    Ok(text)
}

fn parse<'t>(
    text: &'t str,
    path: &Path,
) -> Result<(toml::Table, Spanned<DeTable<'t>>), ConfigError> {
    let fail = |error: toml::de::Error| {
        let start = error.span().map_or(0, |span| span.start);
        let problem = error.message().replace('\n', ", ");
        ConfigError::Syntax { site: SourceText { text, path }.site(start), problem }
    };
    Ok((text.parse().map_err(fail)?, DeTable::parse(text).map_err(fail)?))
}

fn is_tables(values: &[Value]) -> bool {
    values.iter().all(Value::is_table)
}

/// A text, and the name that errors give it.
struct SourceText<'s> {
    text: &'s str,
    path: &'s Path,
}

impl SourceText<'_> {
    fn site(&self, offset: usize) -> Site {
        let before = self.text.get(..offset).unwrap_or(self.text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        Site {
            file: self.path.to_owned(),
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
        }
    }

    fn record<K>(
        &self,
        at: &str,
        key: &Spanned<K>,
        value: &Spanned<DeValue<'_>>,
        sites: &mut HashMap<String, KeySite>,
    ) {
        let site =
            KeySite { key: self.site(key.span().start), value: self.site(value.span().start) };
        sites.insert(at.to_owned(), site);
        match value.get_ref() {
            DeValue::Table(table) => self.record_table(at, table, sites),
            DeValue::Array(_) => self.record_items(at, 0, value, sites),
            _ => {}
        }
    }

    fn record_table(&self, at: &str, table: &DeTable<'_>, sites: &mut HashMap<String, KeySite>) {
        for (key, value) in table {
            self.record(&join(at, key.get_ref()), key, value, sites);
        }
    }

    /// Records the items of an array, counting from `first`.
    fn record_items(
        &self,
        at: &str,
        first: usize,
        array: &Spanned<DeValue<'_>>,
        sites: &mut HashMap<String, KeySite>,
    ) {
        for (index, item) in array.get_ref().as_array().into_iter().flatten().enumerate() {
            self.record(&format!("{at}[{}]", first + index), item, item, sites);
        }
    }
}
