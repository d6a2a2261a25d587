//! Runs the jobs of a plan as processes of this very program, several at once.
use anyhow::{Context, Result};
use grpo_math::{console, interrupt::Interrupt, results::duration};
use std::{
    collections::BTreeSet,
    fs::{self, File, OpenOptions},
    io::{IsTerminal, Write},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use crate::{
    layout::log_file,
    plan::{Job, Plan},
};

/// Between two looks at the processes.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How many processes, and how wide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Width {
    /// Processes at once.
    pub jobs: usize,
    /// Threads of each.
    pub threads: usize,
}

/// What became of a plan.
#[derive(Debug, Default)]
pub struct Report {
    /// Jobs that did not end well, with the reason.
    pub failed: Vec<(String, String)>,
    /// Somebody asked to stop; everything is saved.
    pub interrupted: bool,
}

/// Does all jobs of a plan that are not done yet.
///
/// # Errors
/// When something was made with other settings, before anything is started; when no process can be started.
pub fn run(plan: &Plan, width: Width, interrupt: &Interrupt) -> Result<Report> {
    let (left, done) = plan.left()?;
    // The tries may have been made elsewhere.
    plan.series.iter().try_for_each(|series| plan.keep_choice(series))?;
    let waiting: Vec<_> = left.into_iter().map(|(job, _)| (job, None)).collect();
    let all = waiting.len() + done;
    let left = waiting.iter().map(|(job, _)| plan.weight(job)).sum();
    let mut scheduler = Scheduler {
        plan,
        width,
        waiting,
        running: Vec::new(),
        held: BTreeSet::new(),
        stopped: Vec::new(),
        report: Report::default(),
        line: Line::new(all, done, left, width.jobs),
    };
    scheduler.line.show(0, "");
    let mut forwarded = false;
    loop {
        let mut held = false;
        scheduler.reap()?;
        if interrupt.is_requested() {
            if !forwarded {
                // A signal from the keyboard has reached them already, and one wish is enough for each.
                scheduler.running.iter().for_each(|running| terminate(&running.child));
                forwarded = true;
            }
            scheduler.report.interrupted = true;
        } else {
            held = scheduler.start();
        }
        if scheduler.running.is_empty() && !held {
            break;
        }
        sleep(LOOK_EVERY);
    }
    if !scheduler.report.interrupted {
        for name in std::mem::take(&mut scheduler.stopped) {
            let reason = "its process was told to stop, and has saved; the same command goes on".to_string();
            scheduler.report.failed.push((name, reason));
        }
        // What they need is not there, because it failed.
        for (job, _) in &scheduler.waiting {
            let needs = "what it starts from is not there".to_string();
            scheduler.report.failed.push((job.name(), needs));
        }
    }
    scheduler.line.end();
    Ok(scheduler.report)
}

struct Scheduler<'a> {
    plan: &'a Plan,
    width: Width,
    /// Jobs with the reason for which an arm is given up, if it is.
    waiting: Vec<(Job, Option<String>)>,
    running: Vec<Running>,
    /// Jobs that another process works on, by name: each was told of once.
    held: BTreeSet<String>,
    /// Jobs whose processes were told to stop; an interruption only where this program was told, too.
    stopped: Vec<String>,
    report: Report,
    line: Line,
}

struct Running {
    job: Job,
    given_up: Option<String>,
    child: Child,
    log: PathBuf,
    started: Instant,
}

impl Scheduler<'_> {
    /// Takes in what has ended.
    fn reap(&mut self) -> Result<()> {
        let mut index = 0;
        while index < self.running.len() {
            let status = self.running[index].child.try_wait();
            let Some(status) = status.context("cannot wait for a process")? else {
                index += 1;
                continue;
            };
            let ended = self.running.swap_remove(index);
            self.ended(ended, status);
        }
        Ok(())
    }

    fn ended(&mut self, ended: Running, status: ExitStatus) {
        let name = ended.job.name();
        let took = duration(ended.started.elapsed().as_secs_f64());
        if status.success() {
            let given_up = ended
                .given_up
                .as_ref()
                .map(|reason| format!("{name} stopped: {reason}"));
            self.line.done(self.plan.weight(&ended.job));
            let said = given_up.unwrap_or_else(|| format!("{name}: {took}"));
            self.line.show(self.running.len(), &said);
            if let Job::Arm {
                series, tried: Some(_), ..
            } = &ended.job
                && let Err(error) = self.plan.keep_choice(series)
            {
                self.fail(format!("choice of {}", series.name), console::explain(&error));
            }
            return;
        }
        if status.code() == Some(i32::from(grpo_math::interrupt::EXIT_CODE)) {
            self.line.show(self.running.len(), &format!("{name}: saved"));
            self.stopped.push(name);
            return;
        }
        let reason = format!("{} ({})", reason(status, &ended.log), ended.log.display());
        match ended.given_up {
            // An arm without steps has nothing to be judged by.
            None if self.plan.can_be_judged(&ended.job) => {
                self.fail(name, reason.clone());
                self.waiting.insert(0, (ended.job, Some(reason)));
            }
            _ => self.fail(name, reason),
        }
    }

    /// Says that something failed; the others go on.
    fn fail(&mut self, name: String, reason: String) {
        self.line.show(self.running.len(), &format!("{name} failed: {reason}"));
        let failure = (name, reason);
        // An arm that fails again when it is to be judged has said why.
        if !self.report.failed.contains(&failure) {
            self.report.failed.push(failure);
        }
    }

    /// Starts what is ready, as far as there is room. Tells whether something waits for a process that is not ours.
    fn start(&mut self) -> bool {
        let (mut index, mut held) = (0, false);
        while index < self.waiting.len() && self.running.len() < self.width.jobs {
            let job = &self.waiting[index].0;
            let ready = match self.awaits_warmup(job) {
                true => Ok(false),
                false => self.plan.is_ready(job),
            };
            match ready {
                Ok(true) => {}
                Ok(false) => {
                    index += 1;
                    continue;
                }
                Err(error) => {
                    let (job, _) = self.waiting.remove(index);
                    self.fail(job.name(), console::explain(&error));
                    continue;
                }
            }
            if self.plan.is_held(job) {
                held = true;
                let name = job.name();
                if self.held.insert(name.clone()) {
                    let says =
                        "another process still works on its run (of a call that was killed?): waits until that ends";
                    self.line.show(self.running.len(), &format!("{name}: {says}"));
                }
                index += 1;
                continue;
            }
            let (job, given_up) = self.waiting.remove(index);
            let name = job.name();
            match self.spawn(job, given_up) {
                Ok(running) => self.running.push(running),
                // A disk that is full, a file in a folder's place: the others go on.
                Err(error) => self.fail(name, console::explain(&error)),
            }
        }
        held
    }

    /// Whether the warm-up that a job starts from is still to be made, or made again because its checkpoint is damaged.
    fn awaits_warmup(&self, job: &Job) -> bool {
        let Some(warmup) = self.plan.warmup_of(job) else {
            return false;
        };
        let waiting = self.waiting.iter().map(|(job, _)| job);
        let mut undone = waiting.chain(self.running.iter().map(|running| &running.job));
        undone.any(|job| job.is_warmup() && self.plan.path(job) == warmup)
    }

    fn spawn(&self, job: Job, given_up: Option<String>) -> Result<Running> {
        self.plan.check_warmup(&job)?;
        let log = log_file(&self.plan.path(&job));
        let work = self.plan.work(&job, given_up.as_deref())?;
        let program = std::env::current_exe().context("cannot find this program's own file")?;
        let mut command = Command::new(program);
        command
            .arg("work")
            .arg(serde_json::to_string(&work)?)
            .env("RAYON_NUM_THREADS", self.width.threads.to_string())
            .stdin(Stdio::null())
            .stdout(open_log(&log)?)
            .stderr(open_log(&log)?);
        Ok(Running {
            child: command
                .spawn()
                .with_context(|| format!("cannot start {}", job.name()))?,
            job,
            given_up,
            log,
            started: Instant::now(),
        })
    }
}

fn open_log(path: &Path) -> Result<File> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
    }
    let file = OpenOptions::new().create(true).append(true).open(path);
    file.with_context(|| format!("cannot write {}", path.display()))
}

/// Why a process ended: what it said last, or how the system ended it.
fn reason(status: ExitStatus, log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let said = text.lines().rev().take(5).find_map(|line| line.strip_prefix("error: "));
    match (status.code(), said) {
        (Some(_), Some(said)) => said.to_string(),
        _ => status.to_string(),
    }
}

/// Asks a process to save and stop.
#[cfg(unix)]
fn terminate(child: &Child) {
    use nix::{
        sys::signal::{Signal, kill},
        unistd::Pid,
    };
    if let Ok(id) = i32::try_from(child.id()) {
        let _ = kill(Pid::from_raw(id), Signal::SIGTERM);
    }
}

#[cfg(not(unix))]
fn terminate(_: &Child) {}

/// One line that tells how far the jobs are: rewritten on a terminal, a line a job elsewhere.
struct Line {
    terminal: bool,
    all: usize,
    done: usize,
    /// In steps of an arm.
    left: f64,
    worked: f64,
    jobs: usize,
    started: Instant,
}

impl Line {
    fn new(all: usize, done: usize, left: f64, jobs: usize) -> Self {
        Self {
            terminal: std::io::stderr().is_terminal(),
            all,
            done,
            left,
            worked: 0.0,
            jobs,
            started: Instant::now(),
        }
    }

    fn done(&mut self, weight: f64) {
        self.done += 1;
        self.left -= weight;
        self.worked += weight;
    }

    /// Shows the line; what has just happened stays above it.
    fn show(&self, running: usize, happened: &str) {
        let left = self.all - self.done;
        let time = match self.worked > 0.0 && left > 0 {
            true => {
                let seconds = self.started.elapsed().as_secs_f64() * self.left / self.worked;
                format!(", about {} left", duration(seconds))
            }
            false => String::new(),
        };
        let waiting = left.saturating_sub(running);
        let line = format!(
            "{} of {} done, {running} of {} running, {waiting} waiting{time}",
            self.done, self.all, self.jobs
        );
        let mut to = std::io::stderr().lock();
        // A reader that has gone away ends nothing.
        let _ = match (self.terminal, happened) {
            (true, "") => write!(to, "\r\x1b[2K{line}"),
            (true, happened) => write!(to, "\r\x1b[2K{happened}\n{line}"),
            (false, "") => writeln!(to, "{line}"),
            (false, happened) => writeln!(to, "{happened} ({line})"),
        };
        let _ = to.flush();
    }

    fn end(&self) {
        if self.terminal {
            console::err("");
        }
    }
}
