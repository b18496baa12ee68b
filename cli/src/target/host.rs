//! `rblk-target host`: changes the hosts that may connect, in the files of the configuration and in
//! the running target. The files come first, so that the target does after a restart as it does
//! now.

use std::path::{Path, PathBuf};

use anyhow::Context;
use rblk_config::{Auth, Exit, HostConfig, HostFile, Limits, TargetConfig};
use rblk_operate::Output;
use rblk_operate::target::ask::{Ask, HostsReport, Response};
use rblk_operate::target::client::ask;
use rblk_operate::target::flags::{
    HostAddArgs, HostCommand, HostPlace, HostRemoveArgs, HostSetArgs,
};
use rblk_operate::target::refusal::Refusal;
use serde::Serialize;

use crate::target::running::{asked, not_understood, socket_of};
use crate::target::table;

/// A host, in JSON.
#[derive(Serialize)]
struct Listed<'c> {
    #[serde(flatten)]
    host: &'c HostConfig,
    /// The file that `host add` and `host remove` change. Null: the host stands in a file that
    /// people write.
    file: Option<PathBuf>,
}

/// The outcome of a command on a host, in JSON.
#[derive(Serialize)]
struct HostDone<'d> {
    name: &'d str,
    /// The file that is written, changed or removed.
    file: &'d Path,
    /// The change of the file.
    outcome: &'d str,
    /// The effect on the running target. Null: none answers.
    target: Option<HostsReport>,
}

/// Carries out a command.
pub(crate) fn host(command: &HostCommand, output: Output) -> anyhow::Result<Exit> {
    match command {
        HostCommand::Add(args) => add(args, output),
        HostCommand::Set(args) => set(args, output),
        HostCommand::Remove(args) => remove(args, output),
        HostCommand::List { config } => list(config, output),
    }
}

fn add(args: &HostAddArgs, output: Output) -> anyhow::Result<Exit> {
    let file = HostFile::lock(&args.place.config, &args.name)?;
    let before = file.read()?;
    let host = added(before.clone(), args)?;
    let name = host.name.clone();
    let path = file.path().to_owned();
    let (outcome, config) = match before == Some(host.clone()) {
        true => {
            output.text(format_args!("{name}: {} says so already", path.display()))?;
            ("unchanged", TargetConfig::load(&args.place.config)?)
        }
        false => {
            let config = file.write(&host)?;
            output.text(format_args!("{name}: written to {}", path.display()))?;
            ("written", config)
        }
    };
    drop(file);
    let target = tell(&args.place, &config, (&name, true), output)?;
    output.answer(&HostDone { name: &name, file: &path, outcome, target }, String::new)?;
    Ok(Exit::Ok)
}

/// The host with the additions of a command.
fn added(before: Option<HostConfig>, args: &HostAddArgs) -> anyhow::Result<HostConfig> {
    let name = &args.name;
    let mut host = match before {
        Some(host) => host,
        None if args.key.is_empty() || args.volume.is_empty() => {
            return Err(Refusal::senseless(format!(
                "a new host needs a key and a volume: `rblk-target host add {name} --key KEY --volume VOLUME:rw`. \
                 `rblk-initiator key new` on {name} prints the key"
            ))
            .into());
        }
        None => HostConfig::new(name, Vec::new(), Vec::new()),
    };
    for key in &args.key {
        if !host.keys.contains(key) {
            host.keys.push(*key);
        }
    }
    if host.keys.len() > rblk_config::KEYS_MAX {
        return Err(Refusal::senseless(format!(
            "{name} has two keys already; take the old one away first: \
             `rblk-target host remove {name} --key {}`",
            host.keys[0]
        ))
        .into());
    }
    for right in &args.volume {
        match host.volumes.iter_mut().find(|old| old.volume() == right.volume()) {
            Some(old) => old.clone_from(right),
            None => host.volumes.push(right.clone()),
        }
    }
    Ok(args.keys.over(&host)?)
}

/// The running target takes the limits first, like those of a volume: it may refuse them.
fn set(args: &HostSetArgs, output: Output) -> anyhow::Result<Exit> {
    let HostSetArgs { name, limits, persist, running } = args;
    let limits = limits.limits(limits.over(&Limits::default())?);
    // Locked before the change, so that files and changes have one order.
    let file = match persist {
        true => Some(HostFile::lock(&running.config, name)?),
        false => None,
    };
    let draft = match &file {
        None => None,
        Some(file) => {
            let host = file.read()?;
            let host = host.ok_or_else(|| not_in(file, &running.config, name, "change"))?;
            let host = HostConfig { limits: limits.on(host.limits), ..host };
            file.check(&host)?;
            Some((file, host))
        }
    };
    let ask = Ask::SetHost { name: name.clone(), limits };
    let Response::Host(host) = asked(&socket_of(running)?, ask)? else {
        return Err(not_understood());
    };
    if let Some((file, host)) = &draft {
        file.write(host).with_context(|| {
            format!("the running target has changed {name}, but a restart undoes that")
        })?;
    }
    output.answer(&host, || {
        let limits = match host.limits {
            limits if limits.is_none() => format!("{name}: changed, without limits"),
            limits => format!("{name}: changed, limited to {limits}"),
        };
        let stays = match &file {
            Some(file) => format!("{name}: {} is changed", file.path().display()),
            None => format!("{name}: until the target restarts or reloads; --persist keeps it"),
        };
        format!("{limits}\n{stays}")
    })?;
    Ok(Exit::Ok)
}

/// The refusal for a host without a file to change.
fn not_in(file: &HostFile, config: &Path, name: &str, verb: &str) -> anyhow::Error {
    let text = match TargetConfig::load(config) {
        Err(error) => return error.into(),
        Ok(config) if config.hosts.iter().any(|host| host.name == name) => format!(
            "{name} is not in {}, so people wrote it into another file of the configuration: {verb} it \
             there, then run `rblk-target reload`",
            file.path().display()
        ),
        Ok(_) => {
            let text = format!("there is no host {name}; see `rblk-target host list`");
            return Refusal::no_such_thing(text).into();
        }
    };
    Refusal::senseless(text).into()
}

fn remove(args: &HostRemoveArgs, output: Output) -> anyhow::Result<Exit> {
    let name = &args.name;
    let file = HostFile::lock(&args.place.config, name)?;
    let host = file.read()?;
    let mut host = host.ok_or_else(|| not_in(&file, &args.place.config, name, "remove"))?;
    let path = file.path().to_owned();
    let (outcome, config) = match taken(&mut host, args)? {
        Taken::Part => {
            let config = file.write(&host)?;
            output.text(format_args!("{name}: {} is changed", path.display()))?;
            ("changed", config)
        }
        Taken::Whole => {
            let config = file.remove()?;
            output.text(format_args!("{name}: {} is gone", path.display()))?;
            ("removed", config)
        }
    };
    drop(file);
    let stays = args.key.is_some() || args.volume.is_some();
    let target = tell(&args.place, &config, (name, stays), output)?;
    output.answer(&HostDone { name, file: &path, outcome, target }, String::new)?;
    Ok(Exit::Ok)
}

/// The part of a host that is taken away.
enum Taken {
    Part,
    Whole,
}

/// Takes away the part that the command names.
fn taken(host: &mut HostConfig, args: &HostRemoveArgs) -> Result<Taken, Refusal> {
    let name = &args.name;
    let last = |what: &str| {
        let text = format!(
            "that is the last {what} of {name}; add another one first, or remove the host: \
             `rblk-target host remove {name}`"
        );
        Err(Refusal::senseless(text))
    };
    if let Some(key) = &args.key {
        if !host.keys.contains(key) {
            let keys: Vec<String> = host.keys.iter().map(ToString::to_string).collect();
            let text = format!("{name} does not have that key; it has {}", keys.join(" and "));
            return Err(Refusal::senseless(text));
        }
        host.keys.retain(|kept| kept != key);
        return if host.keys.is_empty() { last("key") } else { Ok(Taken::Part) };
    }
    let Some(volume) = &args.volume else { return Ok(Taken::Whole) };
    let volume = (volume != "*").then_some(volume.as_str());
    let before = host.volumes.len();
    host.volumes.retain(|right| right.volume() != volume);
    if host.volumes.len() == before {
        let volume = volume.unwrap_or("*");
        return Err(Refusal::senseless(format!(
            "{name} has no right to {volume}; see `rblk-target host list`"
        )));
    }
    if host.volumes.is_empty() { last("right") } else { Ok(Taken::Part) }
}

/// Makes the running target read the hosts again. `stays`: whether the host is still one.
fn tell(
    place: &HostPlace,
    config: &TargetConfig,
    (name, stays): (&str, bool),
    output: Output,
) -> anyhow::Result<Option<HostsReport>> {
    let socket = place.control_socket.as_deref().unwrap_or(&config.control_socket);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match runtime.block_on(ask(socket, Ask::ReloadHosts)) {
        Ok(Response::Hosts(report)) if report.hosts.iter().any(|host| host == name) != stays => {
            anyhow::bail!(
                "the target at {} reads another configuration than {}, so nothing has changed there: restart \
                 it with --config {1}, or name its configuration with --config here",
                socket.display(),
                place.config.display()
            );
        }
        Ok(Response::Hosts(report)) => {
            output.text(told(&report))?;
            Ok(Some(report))
        }
        Ok(Response::Error(error)) => {
            anyhow::bail!(
                "the file is written, and the target at {} says: {error}",
                socket.display()
            )
        }
        Ok(_) => {
            anyhow::bail!("the target at {} did not understand the request", socket.display())
        }
        Err(error) => {
            output.text(format_args!(
                "no target answers at {} ({error}); the next `rblk-target serve --config {}` uses it",
                socket.display(),
                place.config.display()
            ))?;
            if config.authentication() == Auth::None {
                output.text(OPEN)?;
            }
            Ok(None)
        }
    }
}

/// The note for people where the list of hosts has no effect.
const OPEN: &str =
    "authentication is off, so every host may connect, and the list of hosts has no effect";

/// The effect of a reload of the hosts, in words.
pub(crate) fn told(report: &HostsReport) -> String {
    let hosts = match report.hosts.as_slice() {
        [] => "no host".to_owned(),
        [host] => format!("one host, {host},"),
        hosts => format!("{} hosts", hosts.len()),
    };
    let mut text = format!("the running target lets in {hosts} now");
    if !report.ended.is_empty() {
        text += &format!("; sessions were ended of {}", report.ended.join(", "));
    }
    if !report.required {
        text += &format!("\n{OPEN}");
    }
    text
}

fn list(path: &Path, output: Output) -> anyhow::Result<Exit> {
    let config = TargetConfig::load(path)?;
    let file =
        |host: &HostConfig| HostFile::path_of(path, &host.name).ok().filter(|file| file.exists());
    let listed: Vec<Listed> =
        config.hosts.iter().map(|host| Listed { host, file: file(host) }).collect();
    output.answer(&listed, || table::hosts(&config.hosts))?;
    if config.authentication() == Auth::None {
        output.aside(OPEN);
    }
    Ok(Exit::Ok)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use rblk_operate::target::flags::{Cli, Command};

    use super::*;

    const KEYS: [&str; 3] = [
        "rblk1:rmntdxzdp7243knecdmiemm4oyocypa7zz7jqx3pl4dllz3we4n5uqpkpe",
        "rblk1:n4ja2ifhmaemcmpyur5k7rpesrcxf2h5xwdzd6wpggvre7d3kyu752zoua",
        "rblk1:j4ig6c6io6zdk6plk6wwhll6q2evaknz4ddjjqgpcf5mewpah4vu6wlnny",
    ];

    fn parse(line: &str) -> HostCommand {
        let words = format!("rblk-target host {line}");
        match Cli::try_parse_from(words.split_whitespace()).unwrap().command {
            Command::Host(command) => command,
            other => panic!("{other:?}"),
        }
    }

    fn add(before: Option<HostConfig>, line: &str) -> Result<HostConfig, String> {
        let HostCommand::Add(args) = parse(&format!("add db1 {line}")) else { panic!("{line}") };
        added(before, &args).map_err(|error| error.to_string())
    }

    fn take(host: &HostConfig, line: &str) -> Result<Option<HostConfig>, String> {
        let HostCommand::Remove(args) = parse(&format!("remove db1 {line}")) else {
            panic!("{line}")
        };
        let mut host = host.clone();
        match taken(&mut host, &args) {
            Ok(Taken::Whole) => Ok(None),
            Ok(Taken::Part) => Ok(Some(host)),
            Err(error) => Err(error.to_string()),
        }
    }

    fn rights(host: &HostConfig) -> Vec<String> {
        host.volumes.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_host_gets_keys_and_rights_and_keeps_the_rest() {
        let host = add(None, &format!("--key {} --volume vol0:ro", KEYS[0])).unwrap();
        assert_eq!((host.keys.len(), host.take_over), (1, false));
        let host = add(Some(host), &format!("--key {}", KEYS[1])).unwrap();
        assert_eq!(host.keys, [KEYS[0].parse().unwrap(), KEYS[1].parse().unwrap()]);
        assert_eq!(rights(&host), ["vol0:ro"]);
        let host = add(Some(host), "--volume *:ro --volume vol0:rw --take-over").unwrap();
        assert_eq!(rights(&host), ["vol0:rw", "*:ro"]);
        assert!(host.take_over && host.keys.len() == 2);
        let again = add(Some(host.clone()), &format!("--key {}", KEYS[1])).unwrap();
        assert_eq!(again, host);
        assert!(!add(Some(host.clone()), "--take-over=false").unwrap().take_over);

        let error = add(Some(host), &format!("--key {}", KEYS[2])).unwrap_err();
        let command = format!("`rblk-target host remove db1 --key {}`", KEYS[0]);
        assert!(error.contains("two keys already") && error.contains(&command), "{error}");
        for less in ["", "--volume vol0:rw", &format!("--key {}", KEYS[0])] {
            let error = add(None, less).unwrap_err();
            assert!(error.contains("a new host needs a key and a volume"), "{error}");
        }
    }

    #[test]
    fn removals_leave_a_part_of_a_host_or_none() {
        let keys = format!("--key {} --key {}", KEYS[0], KEYS[1]);
        let host = add(None, &format!("{keys} --volume vol0:ro --volume *:rw")).unwrap();
        assert_eq!(take(&host, "").unwrap(), None);
        let left = take(&host, &format!("--key {}", KEYS[0])).unwrap().unwrap();
        assert_eq!(left.keys, [KEYS[1].parse().unwrap()]);
        let error = take(&left, &format!("--key {}", KEYS[1])).unwrap_err();
        assert!(error.contains("the last key of db1"), "{error}");
        let error = take(&left, &format!("--key {}", KEYS[0])).unwrap_err();
        assert!(error.contains(&format!("it has {}", KEYS[1])), "{error}");

        let left = take(&host, "--volume *").unwrap().unwrap();
        assert_eq!(rights(&left), ["vol0:ro"]);
        assert!(take(&left, "--volume vol0").unwrap_err().contains("the last right of db1"));
        assert!(take(&left, "--volume vol1").unwrap_err().contains("no right to vol1"));
    }
}
