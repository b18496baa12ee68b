//! [`said_once`]: an error and its causes as one line for people.

use std::error::Error;

/// An error and its causes, `fault: cause: cause`. Many errors name their cause in their own text;
/// that cause is not repeated.
#[must_use]
pub fn said_once(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Sample {
        #[error("cannot listen: {source}")]
        Named { source: io::Error },
        #[error("cannot listen")]
        Unnamed { source: io::Error },
        #[error("{source}; lower it")]
        Inside { source: io::Error },
        #[error("volume `v`")]
        Around(#[source] Box<Sample>),
    }

    fn cause() -> io::Error {
        io::Error::other("no room")
    }

    #[test]
    fn no_cause_is_said_twice() {
        let text = |sample: Sample| said_once(&sample);
        assert_eq!(text(Sample::Named { source: cause() }), "cannot listen: no room");
        assert_eq!(text(Sample::Unnamed { source: cause() }), "cannot listen: no room");
        assert_eq!(text(Sample::Inside { source: cause() }), "no room; lower it");
        let around = |inner| text(Sample::Around(Box::new(inner)));
        assert_eq!(around(Sample::Named { source: cause() }), "volume `v`: cannot listen: no room");
        assert_eq!(
            around(Sample::Unnamed { source: cause() }),
            "volume `v`: cannot listen: no room"
        );
    }
}
