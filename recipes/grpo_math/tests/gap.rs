//! The log-prob gap after the default warm-up: what the two sides of QUADS are worth, each for itself.
mod tiny_run;
use serde_json::Value;
use std::process::Command;
use tiny_run::{folder, succeed};

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
    let mut gap = Command::new(env!("CARGO_BIN_EXE_grpo_math"));
    gap.arg("gap")
        .arg("--run")
        .arg(folder.join("run"))
        .args(["--completions", "512", "--json"]);
    let report: Value = serde_json::from_slice(&succeed(&mut gap).stdout).unwrap();
    assert_eq!(report["completions"], 512);
    let accuracy = report["accuracy"].as_f64().unwrap();
    assert!(
        (0.2..0.6).contains(&accuracy),
        "a policy that is right now and then: {accuracy}"
    );

    let mean = |pairing: &str| {
        let gaps = report["gaps"].as_array().unwrap();
        let gap = gaps.iter().find(|gap| gap["pairing"] == pairing);
        gap.unwrap_or_else(|| panic!("no {pairing}"))["mean"].as_f64().unwrap()
    };
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
}
