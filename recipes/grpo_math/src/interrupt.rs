//! Ctrl-C, SIGTERM and SIGHUP: the first finishes the step or evaluation and saves, a second one quits at once.
use anyhow::{Context, Result};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use crate::console;

/// The exit code of a run that was interrupted, as shells count it (128 + SIGINT).
pub const EXIT_CODE: u8 = 130;

/// Signals so close together are one wish: a terminal that closes hangs up twice, once by itself and once by its shell.
const ONE_WISH: Duration = Duration::from_millis(500);

/// Whether somebody wants the run to stop.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Listens for Ctrl-C, SIGTERM and SIGHUP (unless `nohup` told this process to ignore it). Once a process.
    pub fn listen() -> Result<Self> {
        let interrupt = Self::default();
        let asked = interrupt.0.clone();
        let mut first = None;
        let handler = move || match first {
            None => {
                first = Some(Instant::now());
                asked.store(true, Ordering::SeqCst);
                console::err(
                    "\nStopping after this step or evaluation, then saving. Ctrl-C again quits at once, without saving.",
                );
            }
            Some(first) if first.elapsed() < ONE_WISH => {}
            Some(_) => std::process::exit(i32::from(EXIT_CODE)),
        };
        keeping_ignored_hangups(|| ctrlc::set_handler(handler)).context("cannot listen for Ctrl-C")?;
        Ok(interrupt)
    }

    /// Whether somebody asked.
    pub fn is_requested(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// `nohup` ignores hang-ups before it starts a program; a handler would undo that.
#[cfg(unix)]
fn keeping_ignored_hangups<T>(set_handlers: impl FnOnce() -> T) -> T {
    use nix::sys::signal::{SigHandler, Signal, signal};
    // SAFETY: no handler is installed here; ignoring a signal runs no code of ours.
    let ignore = || unsafe { signal(Signal::SIGHUP, SigHandler::SigIgn) };
    let ignored = matches!(ignore(), Ok(SigHandler::SigIgn));
    let set = set_handlers();
    if ignored {
        let _ = ignore();
    }
    set
}

#[cfg(not(unix))]
fn keeping_ignored_hangups<T>(set_handlers: impl FnOnce() -> T) -> T {
    set_handlers()
}
