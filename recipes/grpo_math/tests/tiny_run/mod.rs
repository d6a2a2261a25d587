//! A run that takes a second: one-digit sums, a model of a few thousand parameters.
#![allow(dead_code)] // every test file uses its part
use serde_json::Value;
use std::{
    fs,
    ops::Range,
    path::{Path, PathBuf},
    process::{Child, Command, Output},
    thread::sleep,
    time::{Duration, Instant},
};

/// Settings of the run; training problems wrap round every 5 / 2 steps.
pub const SETTINGS: &[&str] = &[
    "task.train_problems=10",
    "task.addition.digits=1",
    "model.hidden_size=32",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
    "model.num_experts=3",
    "model.moe_intermediate_size=16",
    "warmup.validation_problems=6",
    "warmup.check_every=4",
    "warmup.max_steps=12",
    "warmup.target_accuracy=1.0",
    "warmup.batch_size=8",
    "grpo.steps=6",
    "grpo.prompts_per_step=4",
    "grpo.group_size=4",
    "grpo.minibatches=2",
    "rollout.slots=8",
    "rac.calibration_prompts=8",
    "mismatch.decompose_every=2",
    "eval.every=3",
    "eval.problems=6",
    "checkpoint.every=2",
];

/// Settings of a run of [`text_model`], with completions so short that random weights are right now and then.
pub const TEXT_SETTINGS: &[&str] = &[
    "data.prompt=say {question}",
    "data.verifier=exact",
    "grpo.steps=2",
    "grpo.prompts_per_step=8",
    "grpo.group_size=32",
    "trainer.learning_rate=1e-3",
    "trainer.lr_warmup_steps=0",
    "rollout.max_new_tokens=1",
    "eval.every=2",
    "eval.problems=4",
    "eval.samples=8",
    "eval.pass_at=4",
    "checkpoint.every=1",
    "mismatch.decompose_every=1",
];

/// A Hugging Face folder: a model of random weights, and a tokenizer of as many tokens.
pub fn text_model(folder: &Path) {
    fs::create_dir_all(folder).unwrap();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    for file in [
        "qwen3moe_tiny/config.json",
        "qwen3moe_tiny/model.safetensors",
        "text_tiny/tokenizer.json",
        "text_tiny/tokenizer_config.json",
        "text_tiny/generation_config.json",
    ] {
        let file = fixtures.join(file);
        fs::copy(&file, folder.join(file.file_name().unwrap())).unwrap();
    }
}

/// Questions whose answer is one letter: what a random model writes now and then.
pub fn text_problems(file: &Path, questions: Range<usize>) {
    let line = |n: usize| serde_json::json!({"question": format!("letter {n}?"), "answer": "e"}).to_string() + "\n";
    fs::write(file, questions.map(line).collect::<String>()).unwrap();
}

/// An empty folder for the runs of one test.
pub fn folder(test: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// The command of a run with the settings above and some more, in `folder/run`.
pub fn command(folder: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_grpo_math"));
    command
        .arg("--name")
        .arg("run")
        .arg("--set")
        .arg(format!("run.directory={}", folder.display()));
    for setting in SETTINGS.iter().chain(more) {
        command.arg("--set").arg(setting);
    }
    command
}

/// The command that goes on with `folder/run`.
pub fn resume(folder: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_grpo_math"));
    command.arg("--resume").arg(folder.join("run"));
    for setting in more {
        command.arg("--set").arg(setting);
    }
    command
}

/// Runs to the end and expects success.
pub fn succeed(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    output
}

/// Waits until a run has written so many lines of metrics.
pub fn wait_for_lines(child: &Child, run: &Path, lines: usize) {
    let started = Instant::now();
    let written = || {
        fs::read_to_string(run.join("metrics.jsonl"))
            .unwrap_or_default()
            .lines()
            .count()
    };
    while written() < lines {
        assert!(
            started.elapsed() < Duration::from_secs(120),
            "process {} wrote {} lines",
            child.id(),
            written()
        );
        sleep(Duration::from_millis(2));
    }
}

/// Sends a signal, by its name without SIG.
pub fn send(child: &Child, signal: &str) {
    let id = child.id().to_string();
    let sent = Command::new("kill")
        .args([&format!("-{signal}"), &id])
        .status()
        .unwrap();
    assert!(sent.success());
}

/// All that a command said.
pub fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// `metrics.jsonl` without what depends on the machine.
pub fn metrics(run: &Path) -> String {
    let lines = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let cut = |line: &str| line[..line.find(",\"time/").expect("every line has times")].to_string() + "\n";
    lines.lines().map(cut).collect()
}

/// The lines of `metrics.jsonl`.
pub fn lines(run: &Path) -> Vec<Value> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The bytes of a file of a checkpoint.
pub fn checkpoint_file(run: &Path, checkpoint: &str, file: &str) -> Vec<u8> {
    let path = run.join("checkpoints").join(checkpoint).join(file);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
