//! The log-prob gap after the default warm-up: what the two sides of QUADS are worth, each for itself; and its export.
//! `tests/interop/check_gaps.py` measures the exported gaps anew with transformers.
mod tiny_run;
use burn_nvfp4::{Precision, safetensors_file::Dtype};
use burn_quads::{
    checkpoint::ModelFolder,
    modules::residual_masks::ResidualMasks,
    sync::sync,
    token_log_probs::{ScoreOptions, TokenRow, score},
};
use grpo_math::{
    backend::{Policy, Sampler},
    scoring::trainer_side,
};
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};
use tiny_run::{TEXT_SETTINGS, command, folder, succeed, text, text_model, text_problems};

fn gap(run: &Path, arguments: &[&str]) -> Command {
    let mut gap = Command::new(env!("CARGO_BIN_EXE_grpo_math"));
    gap.arg("gap").arg("--run").arg(run).args(arguments);
    gap
}

/// Measures and exports; the report and the folder.
fn export(folder: &Path, arguments: &[&str]) -> (Value, PathBuf) {
    let export = folder.join("export");
    let mut gap = gap(&folder.join("run"), arguments);
    let output = succeed(gap.arg("--json").arg("--export").arg(&export));
    (serde_json::from_slice(&output.stdout).unwrap(), export)
}

fn mean(report: &Value, pairing: &str) -> f64 {
    let gaps = report["gaps"].as_array().unwrap();
    let gap = gaps.iter().find(|gap| gap["pairing"] == pairing);
    gap.unwrap_or_else(|| panic!("no {pairing}"))["mean"].as_f64().unwrap()
}

fn token_ids(ids: &Value) -> Vec<u32> {
    let ids = ids.as_array().unwrap().iter();
    ids.map(|id| id.as_u64().unwrap().try_into().unwrap()).collect()
}

fn log_probs(rows: &Value) -> Vec<Vec<f32>> {
    let row = |row: &Value| {
        row.as_array()
            .unwrap()
            .iter()
            .map(|x| x.as_f64().unwrap() as f32)
            .collect()
    };
    rows.as_array().unwrap().iter().map(row).collect()
}

/// What is exported gives, read back, the bits of both sides' log-probs and the reported gaps.
fn assert_whole(export: &Path, report: &Value) {
    let mut names: Vec<_> = fs::read_dir(export)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["gap.json", "model", "residual_masks.safetensors"]);
    let model = ModelFolder::open(export.join("model")).unwrap();
    assert_eq!(model.dtype(), Some(Dtype::F32), "rounded by nobody but the precisions");
    let policy: Policy = model.load(&Default::default(), |_| {}).unwrap();
    let masks = ResidualMasks::load(&export.join("residual_masks.safetensors")).unwrap();
    let gap: Value = serde_json::from_slice(&fs::read(export.join("gap.json")).unwrap()).unwrap();

    let completions = gap["completions"].as_array().unwrap();
    assert_eq!(report["completions"], completions.len());
    let rows: Vec<_> = completions
        .iter()
        .map(|row| (token_ids(&row["prompt"]), token_ids(&row["completion"])))
        .collect();
    let tokens: usize = rows.iter().map(|(_, completion)| completion.len()).sum();
    assert_eq!(report["tokens"], tokens);
    let rewards: Vec<_> = completions.iter().map(|row| row["reward"].as_f64().unwrap()).collect();
    let accuracy = rewards.iter().sum::<f64>() / rewards.len() as f64;
    assert_eq!(report["accuracy"].as_f64().unwrap(), accuracy);

    let rows: Vec<_> = rows
        .iter()
        .map(|(prompt, completion)| TokenRow {
            prompt,
            completion,
            routing: None,
        })
        .collect();
    let options = ScoreOptions {
        temperature: gap["temperature"].as_f64().unwrap() as f32,
        ..ScoreOptions::default()
    };
    let scored = |model: &Sampler| score(model, &rows, &options).log_probs;
    let pairings = gap["pairings"].as_array().unwrap();
    assert_eq!(pairings.len(), 6);
    for (pairing, reported) in pairings.iter().zip(report["gaps"].as_array().unwrap()) {
        for (field, value) in reported.as_object().unwrap() {
            assert_eq!(&pairing[field], value, "{field}");
        }
        let precision = |side: &str| pairing[side].as_str().unwrap().parse::<Precision>().unwrap();
        let (trainer, rollout) = (
            log_probs(&pairing["trainer_log_probs"]),
            log_probs(&pairing["rollout_log_probs"]),
        );
        let name = &pairing["pairing"];
        let side = trainer_side(&policy, &precision("trainer")).unwrap();
        assert!(trainer == scored(&side), "{name}: the trainer's log-probs");
        let (side, _) = sync(&policy, &precision("rollout"), Some(&masks)).unwrap();
        assert!(rollout == scored(&side), "{name}: the rollout's log-probs");
        let differences = trainer.iter().flatten().zip(rollout.iter().flatten());
        let sum: f64 = differences.map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs()).sum();
        let mean = pairing["mean"].as_f64().unwrap();
        assert!((sum / tokens as f64 - mean).abs() <= 1e-12, "{name}: {mean}");
    }
}

#[test]
fn quads_closes_the_gap_that_naive_rollouts_leave() {
    let folder = folder("gap");
    // The default model and warm-up; of GRPO only what makes a run.
    let mut run = Command::new(env!("CARGO_BIN_EXE_grpo_math"));
    run.args(["--name", "run", "--set", &format!("run.directory={}", folder.display())]);
    for setting in ["grpo.steps=1", "eval.problems=64", "eval.every=0"] {
        run.args(["--set", setting]);
    }
    succeed(&mut run);
    let (report, export) = export(&folder, &["--completions", "512"]);
    assert_eq!(report["completions"], 512);
    let accuracy = report["accuracy"].as_f64().unwrap();
    assert!(
        (0.2..0.6).contains(&accuracy),
        "a policy that is right now and then: {accuracy}"
    );

    let mean = |pairing: &str| mean(&report, pairing);
    let naive = mean("naive");
    assert!(naive > 0.01, "4-bit rollouts differ from an f32 trainer: {naive}");
    assert!(mean("quads, all channels") <= naive / 4.0, "{report:#}");
    assert!(
        mean("quads, half of the channels") < mean("qat without rac"),
        "{report:#}"
    );
    assert!(
        mean("high on both sides") < 1e-5,
        "one precision on both sides leaves the order of sums: {report:#}"
    );
    assert_whole(&export, &report);
}

/// Another shape than the default's: fewer keys than queries, narrow experts, more of them, three layers, a temperature.
#[test]
fn an_export_has_all_that_its_gaps_were_measured_on() {
    let folder = folder("gap_of_grouped_heads");
    let settings = [
        "task.addition.digits=3",
        "task.train_problems=64",
        "model.hidden_size=48",
        "model.num_hidden_layers=3",
        "model.num_attention_heads=6",
        "model.num_key_value_heads=2",
        "model.head_dim=8",
        "model.num_experts=8",
        "model.num_experts_per_tok=3",
        "model.moe_intermediate_size=32",
        "warmup.max_steps=60",
        "warmup.batch_size=32",
        "rollout.temperature=0.7",
        "grpo.steps=1",
    ];
    succeed(&mut command(&folder, &settings));
    let (report, export) = export(&folder, &["--step", "1", "--completions", "1024"]);
    assert!(mean(&report, "naive") > 0.01, "{report:#}");
    assert_whole(&export, &report);
}

/// Its weights came in bf16: short numbers, many of them exactly between two codes.
#[test]
fn the_export_of_a_loaded_model_is_a_folder_like_its_own() {
    let folder = folder("gap_of_a_loaded_model");
    let path = |name: &str| folder.join(name);
    text_model(&path("model"));
    text_problems(&path("train.jsonl"), 0..20);
    text_problems(&path("held_out.jsonl"), 1000..1256);
    let mut run = Command::new(env!("CARGO_BIN_EXE_grpo_math"));
    run.args(["--name", "run", "--set", &format!("run.directory={}", folder.display())]);
    run.arg("--model").arg(path("model"));
    run.arg("--data")
        .arg(path("train.jsonl"))
        .arg("--held-out")
        .arg(path("held_out.jsonl"));
    let settings = [
        "grpo.steps=1",
        "eval.every=0",
        "eval.problems=256",
        "eval.samples=1",
        "eval.pass_at=1",
        "rollout.max_new_tokens=6",
    ];
    run.args(
        TEXT_SETTINGS
            .iter()
            .chain(&settings)
            .flat_map(|setting| ["--set", setting]),
    );
    succeed(&mut run);
    let (report, export) = export(&folder, &[]);
    assert_eq!(report["completions"], 256);
    assert_whole(&export, &report);
    let tokenizer = |folder: &Path| fs::read(folder.join("tokenizer.json")).unwrap();
    assert!(tokenizer(&export.join("model")) == tokenizer(&path("model")));
}

#[test]
fn an_export_never_replaces_anything_and_leaves_nothing_half_done() {
    let folder = folder("gap_export_refused");
    succeed(&mut command(&folder, &["grpo.steps=1"]));
    let run = folder.join("run");
    let refused = |export: &Path, said: &str| {
        let output = gap(&run, &["--export"]).arg(export).output().unwrap();
        let text = text(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains(said) && !text.contains("panicked"), "{text}");
        text
    };
    let (empty, file) = (folder.join("empty"), folder.join("file"));
    fs::create_dir(&empty).unwrap();
    fs::write(&file, "mine").unwrap();
    for taken in [&empty, &file, &run] {
        let text = refused(taken, &format!("--export {}: exists already", taken.display()));
        assert!(!text.contains("pairing"), "refused before anything is measured: {text}");
    }
    refused(Path::new("/"), "--export /: expected the name of a new folder");
    let below = file.join("x");
    refused(&below, &format!("cannot write {}", below.display()));
    assert_eq!(fs::read(&file).unwrap(), b"mine");
    let mut names: Vec<_> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["empty", "file", "run"]);
}
