//! Runs of a second: the parity of a sum, a model of a few thousand parameters.
#![allow(dead_code)] // every test file uses its part
use quads_ablation::results::Results;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

/// Settings over those of the quick series.
pub const SETTINGS: &[&str] = &[
    "task.addition.weight=0",
    "task.modular.weight=1",
    "task.modular.modulus=2",
    "task.train_problems=64",
    "model.hidden_size=32",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
    "model.num_experts=3",
    "model.moe_intermediate_size=16",
    "warmup.validation_problems=64",
    "warmup.check_every=5",
    "warmup.max_steps=60",
    "warmup.target_accuracy=0.2",
    "warmup.batch_size=16",
    "trainer.learning_rate=1e-3",
    "grpo.steps=8",
    "grpo.prompts_per_step=4",
    "grpo.group_size=4",
    "grpo.minibatches=2",
    "rollout.slots=64",
    "rac.calibration_prompts=8",
    "mismatch.decompose_every=2",
    "eval.every=2",
    "eval.problems=32",
    "checkpoint.every=3",
];

/// An empty folder for one test.
pub fn folder(test: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("ablation_{test}"));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// The program.
pub fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quads_ablation"));
    command.stdin(Stdio::null());
    command
}

/// The quick series at this size, in `out`, and some more options.
pub fn tiny(out: &Path, more: &[&str]) -> Command {
    let mut command = program();
    command.args(["--quick", "--out"]).arg(out);
    for setting in SETTINGS {
        command.args(["--set", setting]);
    }
    command.args(more);
    command
}

/// Runs to the end and expects success.
pub fn succeed(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    output
}

/// Runs to the end and expects an exit code; gives what was said.
pub fn fail(command: &mut Command, code: i32) -> String {
    let output = command.output().unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(code), "{said}");
    said
}

/// All that a command said.
pub fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// What was measured, without what depends on the machine.
pub fn results(out: &Path) -> Results {
    let mut results = Results::read(&out.join("results.json")).unwrap();
    results.machine = Default::default();
    let seeds = results.series.iter_mut().flat_map(|series| &mut series.seeds);
    for arm in seeds.flat_map(|seed| &mut seed.arms) {
        arm.wall_s = 0.0;
        arm.host = None;
    }
    results
}

/// Waits until something holds.
pub fn wait_for(what: &str, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < Duration::from_secs(120), "waited for {what}");
        sleep(Duration::from_millis(2));
    }
}

/// Lines of a run's metrics so far.
pub fn lines(run: &Path) -> usize {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    text.lines().filter(|line| line.contains("\"stage\":\"grpo\"")).count()
}

/// Sends a signal, by its name without SIG.
pub fn send(process: u32, signal: &str) {
    let sent = Command::new("kill")
        .args([&format!("-{signal}"), &process.to_string()])
        .status()
        .unwrap();
    assert!(sent.success());
}

/// The child of a process that works on a run folder; by what Linux tells of processes.
pub fn worker(parent: &Child, run: &Path) -> Option<u32> {
    let folder = run.display().to_string();
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    ids.into_iter().find(|id| {
        let read = |file: &str| fs::read_to_string(format!("/proc/{id}/{file}")).unwrap_or_default();
        let parent_id = read("status")
            .lines()
            .find_map(|line| line.strip_prefix("PPid:")?.trim().parse::<u32>().ok());
        parent_id == Some(parent.id()) && read("cmdline").contains(&folder)
    })
}
