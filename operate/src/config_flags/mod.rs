//! [`ConfigFlags`]: the flags of a command that set keys of a configuration, made of the
//! descriptions of the keys in `rblk-config`. A flag has the name, the values, the default and the
//! help of its key, and its value has the rule and the errors of the key.
//!
//! `rblk-config` has the descriptions without clap, so that a program with `rblk-client` has no
//! parser of command lines.

pub mod flag_sets;

use std::marker::PhantomData;

use clap::builder::{Arg, ArgAction, ArgGroup};
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, Error, FromArgMatches};
use rblk_config::{ConfigError, FlagLayer, Flagged, Key, Limits, Rule, Schema};
use toml::Value;

use crate::target::ask::{LimitsWish, Wish};

/// The word that takes the value of a key away, where a command allows it.
const NONE: &str = "none";

/// The heading above these flags in help.
const HEADING: &str = "Keys of the configuration";

/// The keys that a command takes as flags.
pub trait FlagSet: 'static {
    /// The table of the keys.
    fn schema() -> &'static Schema;

    /// Whether the command takes this key. It must have a flag.
    fn takes(_key: &Key) -> bool {
        true
    }

    /// Whether `none` takes the value of a key away that may be absent.
    const CLEARS: bool = false;

    /// Whether the command changes what is there: it needs at least one of the flags, and the other
    /// keys stay.
    const CHANGES: bool = false;
}

/// The values of these flags.
pub struct ConfigFlags<S> {
    layer: FlagLayer,
    keys: PhantomData<fn() -> S>,
}

impl<S> Default for ConfigFlags<S> {
    fn default() -> Self {
        Self { layer: FlagLayer::default(), keys: PhantomData }
    }
}

impl<S> std::fmt::Debug for ConfigFlags<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.layer.fmt(f)
    }
}

impl<S: FlagSet> ConfigFlags<S> {
    /// The values, for a layer over files.
    #[must_use]
    pub fn layer(&self) -> &FlagLayer {
        &self.layer
    }

    /// Whether a flag gives the key a value.
    #[must_use]
    pub fn has(&self, key: &str) -> bool {
        self.layer.has(key)
    }

    /// The configuration with the values of the flags. The rules between keys are not checked.
    ///
    /// # Errors
    /// The value of a flag breaks the rule of its key.
    pub fn over<T: Flagged>(&self, config: &T) -> Result<T, ConfigError> {
        self.layer.over(config)
    }

    /// The wish that a flag states about a key: `value` reads the key of a configuration that has
    /// the values of the flags.
    #[must_use]
    pub fn wish<T>(&self, key: &str, value: Option<T>) -> Option<Wish<T>> {
        self.has(key).then(|| value.map_or(Wish::None, Wish::Some))
    }

    /// The wishes about limits. `limits` has the values of the flags.
    #[must_use]
    pub fn limits(&self, limits: Limits) -> LimitsWish {
        let Limits { iops, bandwidth, iops_burst, bandwidth_burst } = limits;
        LimitsWish {
            iops: self.wish("iops", iops),
            bandwidth: self.wish("bandwidth", bandwidth),
            iops_burst: self.wish("iops_burst", iops_burst),
            bandwidth_burst: self.wish("bandwidth_burst", bandwidth_burst),
        }
    }

    fn keys() -> impl Iterator<Item = (&'static Key, String)> {
        let keys = S::schema().keys().filter(|key| S::takes(key));
        keys.filter_map(|key| Some((key, key.flag_name()?)))
    }

    /// Whether `none` is a value of the flag.
    fn clears(key: &Key) -> bool {
        S::CLEARS && !key.absent.is_empty() && !matches!(key.rule, Rule::Word(_))
    }
}

impl<S: FlagSet> Args for ConfigFlags<S> {
    fn augment_args(command: Command) -> Command {
        let flag = |(key, name)| {
            let default = if S::CHANGES { String::new() } else { default_of(S::schema(), key) };
            flag(key, name, &default, Self::clears(key))
        };
        let command = command.args(Self::keys().map(flag));
        if !S::CHANGES {
            return command;
        }
        let names = Self::keys().map(|(key, _)| key.name);
        command.group(ArgGroup::new("keys").required(true).multiple(true).args(names))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<S: FlagSet> FromArgMatches for ConfigFlags<S> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let mut flags = Self::default();
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        for (key, name) in Self::keys() {
            if matches.value_source(key.name) != Some(ValueSource::CommandLine) {
                continue;
            }
            let texts: Vec<&str> =
                matches.get_many::<String>(key.name).into_iter().flatten().map(|t| &**t).collect();
            match texts.as_slice() {
                [NONE] if Self::clears(key) => self.layer.clear(key),
                texts => self.layer.set(key, &format!("--{name}"), texts.iter().copied()),
            }
        }
        Ok(())
    }
}

/// The flag of a key.
fn flag(key: &'static Key, name: String, default: &str, clears: bool) -> Arg {
    let is_list = matches!(key.rule, Rule::List { .. });
    let value_name = key.rule.value_name();
    let value_name = if clears { format!("{value_name}|{NONE}") } else { value_name };
    let mut arg = Arg::new(key.name)
        .long(name)
        .visible_aliases(key.flag_alias())
        .value_name(value_name)
        .help_heading(HEADING)
        .action(if is_list { ArgAction::Append } else { ArgAction::Set });
    if let Some(value) = key.bare_value() {
        arg = arg.num_args(0..=1).require_equals(true).default_missing_value(value);
    }
    let mut paragraphs = key.plain_paragraphs();
    if let (true, Some(first)) = (is_list, paragraphs.first_mut()) {
        first.push_str(" Repeat for several.");
    }
    let short = paragraphs.first().map(|first| format!("{first}{default}"));
    if paragraphs.len() > 1 {
        let long = format!("{}\n\n{}", paragraphs.join("\n\n"), default.trim_start());
        arg = arg.long_help(long.trim_end().to_owned());
    }
    arg.help(short.unwrap_or_default())
}

/// The default of a key as help shows it, with a space before it. Empty without one.
fn default_of(schema: &Schema, key: &Key) -> String {
    let default = match schema.default_of(key) {
        Some(Value::String(text)) => text,
        Some(value) => value.to_string(),
        None => key.absent.to_owned(),
    };
    if default.is_empty() { default } else { format!(" [default: {default}]") }
}
