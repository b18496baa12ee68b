//! [`HeadStart`]: a build that begins while the tests before it wait for time limits.

use std::process::{Child, Stdio};

use crate::artifacts::BUILD_LIMIT;
use crate::process;
use crate::workspace::Workspace;

/// A build that runs beside other steps, on CPUs that they leave idle. It says nothing and its
/// result is not looked at: the step that needs the programs builds them again, which repeats
/// warnings and errors, and finds done what was done.
#[derive(Debug)]
pub(super) struct HeadStart {
    // `None`: it could not be started.
    cargo: Option<Child>,
}

impl HeadStart {
    /// Begins a build of what `selection` (words for `cargo build`) names.
    pub(super) fn begin(workspace: &Workspace, profile: &str, selection: &[&str]) -> Self {
        let words = [&["build", "--profile", profile], selection].concat();
        let mut command = workspace.patient_cargo(&words);
        println!("\nbeside the next steps: {}", process::words(&command));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let cargo = command.spawn();
        if let Err(error) = &cargo {
            println!("not started: {error}");
        }
        Self { cargo: cargo.ok() }
    }

    /// Waits for its end.
    pub(super) fn end(mut self) {
        if let Some(cargo) = &mut self.cargo {
            let _ = process::wait(cargo, BUILD_LIMIT, true);
        }
    }
}

impl Drop for HeadStart {
    fn drop(&mut self) {
        if let Some(cargo) = &mut self.cargo
            && matches!(cargo.try_wait(), Ok(None))
        {
            process::end(cargo);
        }
    }
}
