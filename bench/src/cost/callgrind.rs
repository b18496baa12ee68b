//! [`Profile`]: callers, callees and their costs, from a file of valgrind's callgrind. Pure.
//!
//! The format is callgrind's own (its manual, "Callgrind Format Specification"), with names
//! compressed or not, and one event per line.

use std::collections::HashMap;

use anyhow::{Context, Result, bail};

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
struct Function(usize);

/// Calls of one function by another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Arc {
    pub(super) calls: u64,
    /// Events in the callee and all it called.
    pub(super) cost: u64,
}

#[derive(Debug, Default)]
pub(super) struct Profile {
    names: Vec<String>,
    by_name: HashMap<String, Function>,
    // By caller and callee.
    arcs: HashMap<(Function, Function), Arc>,
    own: HashMap<Function, u64>,
}

impl Profile {
    pub(super) fn parse(text: &str) -> Result<Self> {
        let mut profile = Self::default();
        // Names by their numbers, where they are compressed.
        let mut numbers = HashMap::new();
        let (mut caller, mut callee, mut calls) = (None, None, None);
        for (number, line) in text.lines().enumerate() {
            let at = || format!("line {} of the profile: {line}", number + 1);
            if let Some(name) = line.strip_prefix("fn=") {
                caller = Some(profile.function(&mut numbers, name).with_context(at)?);
            } else if let Some(name) = line.strip_prefix("cfn=") {
                callee = Some(profile.function(&mut numbers, name).with_context(at)?);
            } else if let Some(rest) = line.strip_prefix("calls=") {
                let count = rest.split_whitespace().next().and_then(|n| n.parse::<u64>().ok());
                calls = Some(count.with_context(at)?);
            } else if line.starts_with(|c: char| c.is_ascii_digit() || "+-*".contains(c)) {
                let cost = line.split_whitespace().nth(1).map_or(Ok(0), str::parse::<u64>);
                let (cost, from) = (cost.with_context(at)?, caller.with_context(at)?);
                match calls.take() {
                    Some(count) => {
                        let to = callee.with_context(at)?;
                        let arc = profile.arcs.entry((from, to)).or_default();
                        arc.calls += count;
                        arc.cost += cost;
                    }
                    None => *profile.own.entry(from).or_default() += cost,
                }
            } else if line.starts_with("events:") && line.split_whitespace().count() != 2 {
                bail!("{}: one event was expected", at());
            }
        }
        Ok(profile)
    }

    // `(7) name` the first time, `(7)` later, or just the name.
    fn function(
        &mut self,
        numbers: &mut HashMap<String, Function>,
        name: &str,
    ) -> Result<Function> {
        let compressed = name.strip_prefix('(').and_then(|rest| rest.split_once(')'));
        let Some((number, name)) = compressed.filter(|(n, _)| n.parse::<u32>().is_ok()) else {
            return Ok(self.named(name));
        };
        if let Some(name) = name.strip_prefix(' ') {
            let function = self.named(name);
            numbers.insert(number.to_owned(), function);
            return Ok(function);
        }
        numbers.get(number).copied().context("a name that was not given before")
    }

    fn named(&mut self, name: &str) -> Function {
        if let Some(function) = self.by_name.get(name) {
            return *function;
        }
        let function = Function(self.names.len());
        self.names.push(name.to_owned());
        self.by_name.insert(name.to_owned(), function);
        function
    }

    /// The sum of all calls that pass, by caller and callee.
    pub(super) fn sum(&self, is_such: impl Fn(&str, &str) -> bool) -> Arc {
        let mut sum = Arc::default();
        for ((from, to), arc) in &self.arcs {
            if is_such(&self.names[from.0], &self.names[to.0]) {
                sum.calls += arc.calls;
                sum.cost += arc.cost;
            }
        }
        sum
    }

    pub(super) fn hottest(&self, most: usize) -> Vec<(&str, u64)> {
        let mut own: Vec<_> = self
            .own
            .iter()
            .map(|(function, cost)| (self.names[function.0].as_str(), *cost))
            .collect();
        own.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
        own.truncate(most);
        own
    }
}

#[cfg(test)]
mod tests;
