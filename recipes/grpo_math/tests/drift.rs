//! Engine drift: a build agrees with itself to the bit, and says what is wrong with an export.
mod tiny_run;
use serde_json::Value;
use std::{fs, path::Path, process::Command};
use tiny_run::{command, folder, succeed, text};

fn drift(export: &Path, arguments: &[&str]) -> Command {
    let mut drift = Command::new(env!("CARGO_BIN_EXE_grpo_math"));
    drift.arg("drift").arg("--export").arg(export).args(arguments);
    drift
}

#[test]
fn the_build_that_exported_has_no_drift_and_damage_is_named() {
    let folder = folder("drift");
    succeed(&mut command(&folder, &["grpo.steps=1"]));
    let export = folder.join("export");
    let mut gap = Command::new(env!("CARGO_BIN_EXE_grpo_math"));
    gap.args(["gap", "--run"]).arg(folder.join("run"));
    succeed(gap.arg("--export").arg(&export));

    let report: Value = serde_json::from_slice(&succeed(&mut drift(&export, &["--json"])).stdout).unwrap();
    let sides = report["sides"].as_array().unwrap();
    // High and W4A16 trainers; W4A4, FP8, two compensated rollouts, and one in high precision.
    assert_eq!(sides.len(), 7, "{report:#}");
    assert!(sides.iter().all(|side| side["max"] == 0.0), "{report:#}");
    let pairings = report["pairings"].as_array().unwrap();
    assert_eq!(pairings.len(), 6);
    assert!(pairings.iter().all(|p| p["gap_here"] == p["gap_there"]), "{report:#}");
    assert!(text(&succeed(&mut drift(&export, &[]))).contains("|Δ log-prob| of cpu and cpu on"));

    // A log-prob that moves is seen, where it was.
    let path = export.join("gap.json");
    let whole: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let write = |change: &dyn Fn(&mut Value)| {
        let mut gap = whole.clone();
        change(&mut gap);
        fs::write(&path, gap.to_string()).unwrap();
    };
    write(&|gap| {
        let log_prob = &mut gap["pairings"][0]["rollout_log_probs"][0][0];
        *log_prob = (log_prob.as_f64().unwrap() - 1.0).into();
    });
    let report: Value = serde_json::from_slice(&succeed(&mut drift(&export, &["--json"])).stdout).unwrap();
    for side in report["sides"].as_array().unwrap() {
        let moved = side["side"] == "rollout" && side["precision"] == "w4a4";
        let max = side["max"].as_f64().unwrap();
        assert!((max - f64::from(moved)).abs() < 1e-5, "{report:#}");
    }

    let refused = |said: &str| {
        let output = drift(&export, &[]).output().unwrap();
        let text = text(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains(said) && !text.contains("panicked"), "{text}");
    };
    write(&|gap| gap["completions"][0]["prompt"][0] = 1_000_000.into());
    refused("completion 0 has the token 1000000, and the model a vocabulary of");
    write(&|gap| gap["pairings"][1]["trainer_log_probs"][0] = Value::Array(vec![]));
    refused("trainer_log_probs of \"fp8\" are not one a token");
    write(&|gap| gap["pairings"][0]["rollout"] = "w3a3".into());
    refused("the precision \"w3a3\" of \"naive\"");
    fs::write(&path, "{}").unwrap();
    refused("gap.json is not what grpo_math gap --export writes");
    fs::remove_file(&path).unwrap();
    refused("cannot read");
}
