//! [`Profile`]: who called whom at what cost, read from a file of valgrind's callgrind. Pure.
//!
//! The format is callgrind's own (its manual, "Callgrind Format Specification"), with names
//! compressed or not, and one event per line.

use std::collections::HashMap;

use anyhow::{Context, Result, bail};

/// A function, by its place in [`Profile::names`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
struct Function(usize);

/// Calls of one function by another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Arc {
    /// How often.
    pub(super) calls: u64,
    /// Events in the callee and all it called.
    pub(super) cost: u64,
}

/// One dump of callgrind.
#[derive(Debug, Default)]
pub(super) struct Profile {
    names: Vec<String>,
    by_name: HashMap<String, Function>,
    // By caller and callee.
    arcs: HashMap<(Function, Function), Arc>,
    own: HashMap<Function, u64>,
}

impl Profile {
    /// Reads one dump.
    ///
    /// # Errors
    /// It is not in callgrind's format.
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

    // `(7) name` the first time, `(7)` from then on, or just the name.
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

    /// The sum of all calls whose caller and callee are such.
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

    /// The functions with the most events of their own, most first.
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
mod tests {
    use super::*;

    const TEXT: &str = "# callgrind format\nversion: 1\npositions: line\nevents: Ir\nsummary: 80\n\n\
        ob=(1) /bin/x\nfl=(1) ???\nfn=(1) turn<a, b>\n16 20\ncfn=(2) poll\ncalls=3 50\n16 12\n+1 5\n\
        cfn=(3)\n\nfn=(2)\n* 7\ncfi=(2) y.rs\ncfn=(4) memcpy\ncalls=1 0\n* 5\n";

    #[test]
    fn costs_of_functions_and_of_calls() {
        let text = TEXT.replace("cfn=(3)\n", "");
        let profile = Profile::parse(&text).unwrap();
        let of = |from: &'static str, to: &'static str| {
            profile.sum(move |caller, callee| caller == from && callee == to)
        };
        assert_eq!(of("turn<a, b>", "poll"), Arc { calls: 3, cost: 12 });
        assert_eq!(of("poll", "memcpy"), Arc { calls: 1, cost: 5 });
        assert_eq!(of("memcpy", "poll"), Arc::default());
        assert_eq!(profile.hottest(9), [("turn<a, b>", 25), ("poll", 7)]);
        assert_eq!(profile.hottest(1), [("turn<a, b>", 25)]);
        assert_eq!(profile.sum(|_, _| true), Arc { calls: 4, cost: 17 });
    }

    #[test]
    fn names_need_not_be_compressed() {
        let text = "events: Ir\nfn=(anonymous)::f\n0 3\ncfn=g\ncalls=2 0\n0 9\nfn=g\n0 9\n";
        let profile = Profile::parse(text).unwrap();
        assert_eq!(profile.hottest(9), [("g", 9), ("(anonymous)::f", 3)]);
        assert_eq!(profile.sum(|_, to| to == "g"), Arc { calls: 2, cost: 9 });
    }

    #[test]
    fn what_is_no_profile_is_refused() {
        // A number without a name, a cost and calls without a function, two events.
        for text in [TEXT, "0 5\n", "fn=f\ncalls=1 0\n0 5\n", "events: Ir Dr\n", "fn=f\n0 x\n"] {
            assert!(Profile::parse(text).is_err(), "{text}");
        }
    }
}
