//! Ctrl-C: the first finishes the step and saves, the second quits at once.
use anyhow::{Context, Result};
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// The exit code of a run that was interrupted, as shells count it (128 + SIGINT).
pub const EXIT_CODE: u8 = 130;

/// Whether somebody wants the run to stop.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Listens for Ctrl-C. Once a process.
    pub fn listen() -> Result<Self> {
        let interrupt = Self::default();
        let asked = interrupt.0.clone();
        ctrlc::set_handler(move || {
            if asked.swap(true, Ordering::SeqCst) {
                std::process::exit(i32::from(EXIT_CODE));
            }
            eprintln!("\nStopping after this step, then saving. Ctrl-C again quits at once, without saving.");
        })
        .context("cannot listen for Ctrl-C")?;
        Ok(interrupt)
    }

    /// Whether Ctrl-C was pressed.
    pub fn is_requested(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// As if Ctrl-C had been pressed.
    pub fn request(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
