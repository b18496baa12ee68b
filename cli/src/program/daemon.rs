//! [`become_daemon`]: a command becomes the daemon beside it.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;

use rblk_operate::Output;

/// A variable of the environment that a program with RDMA should have when it starts, with its
/// value. With it, librdmacm and libibverbs free the objects of a device that is gone. Without it,
/// each object of a device that was removed or reset stays in memory. libibverbs reads it once, so
/// it cannot be set later.
pub(crate) const ENVIRONMENT: (&str, &str) = ("RDMAV_ALLOW_DISASSOC_DESTROY", "1");

/// The descriptors that the daemon keeps of those that this process was started with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LentDescriptors {
    /// The three standard ones.
    Standard,
    /// All of them: the caller may have passed a file to this command as a descriptor, or a target
    /// left its descriptors open before it became this program.
    All,
}

/// The path of the daemon of that name, in the directory of this program.
pub(crate) fn beside(name: &str) -> anyhow::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(name))
}

/// Replaces this process by a daemon in the same directory, with the same arguments. Returns only
/// the failure. `program`: the name of this program.
pub(crate) fn become_daemon(
    program: &str,
    name: &str,
    descriptors: LentDescriptors,
) -> anyhow::Error {
    let path = match beside(name) {
        Ok(path) => path,
        Err(error) => return error,
    };
    // A daemon must not keep a descriptor of the script or the terminal that starts it.
    if descriptors == LentDescriptors::Standard
        && let Err(error) = rblk_runtime::close_lent_on_exec()
    {
        Output::Table.aside(format_args!(
            "{program}: WARN cannot close what this process inherited (close_range): {error}"
        ));
    }
    let (variable, value) = ENVIRONMENT;
    let error = std::process::Command::new(&path)
        .args(std::env::args_os().skip(1))
        .env(variable, value)
        .exec();
    anyhow::Error::from(error)
        .context(format!("cannot run {}: is rblk installed whole?", path.display()))
}
