//! Lines for people. Whoever reads them may go away (`grpo_math | head -1`), and the disk behind a redirection may be full:
//! neither ends a run, whose result is in its folder. `println!` and `eprintln!` would panic.
use anyhow::{Context, Result};
use std::{
    fmt::Display,
    io::{self, ErrorKind, Write},
};

/// A line on standard output.
pub fn out(line: impl Display) {
    let _ = write_line(&mut io::stdout().lock(), &line);
}

/// A line on standard error.
pub fn err(line: impl Display) {
    let _ = write_line(&mut io::stderr().lock(), &line);
}

/// Writes what a command was asked for to standard output. A reader that has seen enough is no error; a disk that is full
/// is.
pub fn deliver(text: &str) -> Result<()> {
    deliver_to(&mut io::stdout().lock(), text)
}

fn deliver_to(to: &mut impl Write, text: &str) -> Result<()> {
    match to.write_all(text.as_bytes()).and_then(|()| to.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        done => done.context("cannot write to standard output"),
    }
}

/// In one piece: two processes that share a terminal do not mix their lines.
fn write_line(to: &mut impl Write, line: &impl Display) -> io::Result<()> {
    to.write_all(format!("{line}\n").as_bytes())?;
    to.flush()
}

/// An error with its causes, in one line.
pub fn explain(error: &anyhow::Error) -> String {
    burn_quads::explain(error.as_ref())
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    /// What a closed pipe or a full disk does.
    struct Refuses(ErrorKind);

    impl Write for Refuses {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reader_that_went_away_is_no_error_and_a_full_disk_is() {
        deliver_to(&mut Refuses(ErrorKind::BrokenPipe), "x").unwrap();
        let error = deliver_to(&mut Refuses(ErrorKind::StorageFull), "x").unwrap_err();
        assert!(explain(&error).starts_with("cannot write to standard output: "));
    }

    #[test]
    fn a_line_is_written_in_one_piece() {
        let mut written = Vec::new();
        write_line(&mut written, &"a\nb").unwrap();
        assert_eq!(written, b"a\nb\n");
    }

    #[test]
    fn no_cause_is_told_twice() {
        let cause = || io::Error::other("no space left");
        let quiet = anyhow::Error::new(cause()).context("cannot write x");
        assert_eq!(explain(&quiet), "cannot write x: no space left");

        #[derive(Debug, thiserror::Error)]
        #[error("x.safetensors: {source}")]
        struct TellsItsCause {
            source: io::Error,
        }
        let tells = anyhow::Error::new(TellsItsCause { source: cause() }).context("cannot save");
        assert_eq!(explain(&tells), "cannot save: x.safetensors: no space left");
        assert_eq!(explain(&anyhow!("alone")), "alone");
    }
}
