//! [`Refusal`]: why a target, or a command about one, does not carry out an order, with the exit
//! code of the command.
//!
//! On the control socket a refusal with the code of a plain failure is a text, as older programs
//! have it. One with a code of its own is an object.

use rblk_config::Exit;
use serde::{Deserialize, Serialize};

/// Why an order is not carried out.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
#[error("{text}")]
#[serde(from = "Wire", into = "Wire")]
pub struct Refusal {
    text: String,
    exit: Exit,
}

/// A refusal in JSON.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Wire {
    Text(String),
    Coded { error: String, exit_code: u8 },
}

impl Refusal {
    /// A refusal with an exit code.
    pub fn new(exit: Exit, text: impl Into<String>) -> Self {
        Self { text: text.into(), exit }
    }

    /// The command makes no sense.
    pub fn senseless(text: impl Into<String>) -> Self {
        Self::new(Exit::Usage, text)
    }

    /// The command names something that does not exist.
    pub fn no_such_thing(text: impl Into<String>) -> Self {
        Self::new(Exit::NoSuchThing, text)
    }

    /// There is no volume of that name.
    pub fn no_volume(name: &str) -> Self {
        let text = format!("there is no volume {name}; `rblk-target volume list` shows all");
        Self::no_such_thing(text)
    }

    /// A volume of that name is served.
    pub fn served_already(name: &str) -> Self {
        let text = format!(
            "{name} is served already, and nothing was changed; `rblk-target volume list` shows it"
        );
        Self::new(Exit::AlreadyThere, text)
    }

    /// The reason in words.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The exit code of the command.
    #[must_use]
    pub fn exit(&self) -> Exit {
        self.exit
    }
}

impl From<String> for Refusal {
    fn from(text: String) -> Self {
        Self::new(Exit::Failure, text)
    }
}

impl From<&str> for Refusal {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

impl From<Refusal> for Wire {
    fn from(refusal: Refusal) -> Self {
        match refusal.exit {
            Exit::Failure => Self::Text(refusal.text),
            exit => Self::Coded { error: refusal.text, exit_code: exit.code() },
        }
    }
}

impl From<Wire> for Refusal {
    fn from(wire: Wire) -> Self {
        match wire {
            Wire::Text(text) => text.into(),
            // A later program may have more codes.
            Wire::Coded { error, exit_code } => {
                Self::new(Exit::of_code(exit_code).unwrap_or(Exit::Failure), error)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_refusal_is_a_text_and_one_with_a_code_an_object() {
        let json = |refusal: &Refusal| serde_json::to_string(refusal).unwrap();
        let (plain, coded) = (Refusal::from("no room"), Refusal::no_such_thing("no volume v"));
        assert_eq!(json(&plain), r#""no room""#);
        assert_eq!(json(&coded), r#"{"error":"no volume v","exit_code":11}"#);
        for refusal in [plain, coded] {
            assert_eq!(serde_json::from_str::<Refusal>(&json(&refusal)).unwrap(), refusal);
        }
        let later: Refusal = serde_json::from_str(r#"{"error":"x","exit_code":99}"#).unwrap();
        assert_eq!(later, Refusal::from("x"));
    }
}
