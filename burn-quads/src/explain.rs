//! Errors in one line. Errors of libraries tell their cause themselves, for whoever prints only them; programs print the
//! whole chain: no cause is told twice.
use std::error::Error;

/// An error with its causes, from the outermost on, in one line.
pub fn explain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        let cause = error.to_string();
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
        next = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Failed {
        #[error("cannot save")]
        Quiet { source: Box<Failed> },
        #[error("x.safetensors: {source}")]
        TellsItsCause { source: std::io::Error },
    }

    #[test]
    fn no_cause_is_told_twice() {
        let tells = Failed::TellsItsCause {
            source: std::io::Error::other("no space left"),
        };
        assert_eq!(explain(&tells), "x.safetensors: no space left");
        let quiet = Failed::Quiet { source: tells.into() };
        assert_eq!(explain(&quiet), "cannot save: x.safetensors: no space left");
    }
}
