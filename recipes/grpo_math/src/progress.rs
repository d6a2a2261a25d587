//! What a run says while it is under way: a bar on a terminal, plain lines elsewhere.
use burn_quads::checkpoint::LoadProgress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::{io::IsTerminal, time::Duration};

use crate::console;

/// Lines of a stage that is not watched on a terminal.
const PLAIN_LINES: usize = 20;

/// Progress of one stage.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    stage: &'static str,
    total: usize,
    /// Steps between two plain lines; absent on a terminal.
    plain_every: Option<usize>,
}

impl Progress {
    /// A stage of `total` steps, `done` of which are behind.
    pub fn new(stage: &'static str, done: usize, total: usize) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let target = if terminal {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(Some(total as u64), target);
        let template = "{prefix:<8} {bar:24.cyan/dim} {pos:>4}/{len}  {msg}  {eta_precise:.dim} left";
        bar.set_style(
            ProgressStyle::with_template(template)
                .expect("a fixed template")
                .progress_chars("━╸─"),
        );
        bar.set_prefix(stage);
        bar.set_position(done as u64);
        bar.reset_eta();
        if terminal {
            bar.enable_steady_tick(Duration::from_millis(500));
        }
        Self {
            bar,
            stage,
            total,
            plain_every: (!terminal).then(|| total.div_ceil(PLAIN_LINES).max(1)),
        }
    }

    /// Step `step` is done.
    pub fn step(&self, step: usize, message: String) {
        if self
            .plain_every
            .is_some_and(|every| step.is_multiple_of(every) || step == self.total)
        {
            console::err(format!("{:<8} {step:>4}/{}  {message}", self.stage, self.total));
        }
        self.bar.set_position(step as u64);
        self.bar.set_message(message);
    }

    /// A line above the bar.
    pub fn say(&self, line: &str) {
        match self.plain_every {
            Some(_) => console::err(line),
            None => self.bar.suspend(|| console::err(line)),
        }
    }

    /// The stage is over; its bar goes.
    pub fn finish(self) {
        self.bar.finish_and_clear();
    }
}

/// Progress of reading a model, in bytes; shown on a terminal only.
#[derive(Debug)]
pub struct LoadBar(ProgressBar);

impl LoadBar {
    /// A bar that shows nothing yet.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        let target = match std::io::stderr().is_terminal() {
            true => ProgressDrawTarget::stderr(),
            false => ProgressDrawTarget::hidden(),
        };
        let bar = ProgressBar::with_draw_target(None, target);
        let template = "loading  {bar:24.cyan/dim} {bytes}/{total_bytes}  {msg}";
        let style = ProgressStyle::with_template(template).expect("a fixed template");
        bar.set_style(style.progress_chars("━╸─"));
        Self(bar)
    }

    /// A parameter is there.
    pub fn show(&self, progress: LoadProgress<'_>) {
        self.0.set_length(progress.total_bytes);
        self.0.set_position(progress.bytes);
        self.0.set_message(progress.parameter.to_string());
    }

    /// All is read; the bar goes.
    pub fn finish(self) {
        self.0.finish_and_clear();
    }
}
