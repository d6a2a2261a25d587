//! What a run says about the gap between rollout and trainer: its warning, its parts, and what routing replay takes away.
mod tiny_run;
use serde_json::Value;
use std::{fs, process::Command};
use tiny_run::{command, folder, lines, resume, succeed, text};

/// Warnings about the gap in what a run with these settings says.
fn warnings(test: &str, settings: &[&str]) -> Vec<String> {
    let output = succeed(&mut command(&folder(test), settings));
    let about = |line: &&str| line.contains("mismatch.warn_above");
    text(&output).lines().filter(about).map(String::from).collect()
}

#[test]
fn a_gap_above_the_set_bound_is_warned_of_once() {
    let naive = ["trainer.precision=high", "rollout.precision=w4a4"];
    let said = |bound: &str| {
        let setting = format!("mismatch.warn_above={bound}");
        warnings(&format!("warn_{bound}"), &[naive[0], naive[1], &setting])
    };
    let warned = said("1e-6");
    assert_eq!(warned.len(), 1, "six steps, one warning: {warned:?}");
    assert!(
        warned[0].starts_with("Warning, step 1: the log-probs of sampled tokens differ by ")
            && warned[0].contains("above mismatch.warn_above = 0.000001"),
        "{warned:?}"
    );
    assert_eq!(said("1000"), Vec::<String>::new());
    assert_eq!(said("0"), Vec::<String>::new(), "0: never");
    // The same on both sides: only the order of sums differs.
    let same = [
        "trainer.precision=w4a16",
        "rollout.precision=w4a16",
        "mismatch.warn_above=1e-3",
    ];
    assert_eq!(warnings("warn_same", &same), Vec::<String>::new());
}

fn number(line: &Value, name: &str) -> f64 {
    line[name].as_f64().unwrap_or_else(|| panic!("{name} in {line}"))
}

/// Steps of GRPO of a run with 4-bit rollouts, each decomposed.
fn steps(test: &str, settings: &[&str]) -> Vec<Value> {
    let folder = folder(test);
    let with = [
        &[
            "rollout.precision=w4a4",
            "mismatch.decompose_every=1",
            "model.num_experts=8",
        ],
        settings,
    ]
    .concat();
    succeed(&mut command(&folder, &with));
    let mut lines = lines(&folder.join("run"));
    lines.retain(|line| line["stage"] == "grpo" && line["step"] != 0);
    lines
}

#[test]
fn layers_are_measured_at_the_steps_asked_for_and_once() {
    let folder = folder("layers");
    let settings = [
        "mismatch.layers_every=4",
        "rollout.precision=w4a4_rac",
        "rac.selection=calibrated",
        "rac.fraction=0.25",
    ];
    succeed(&mut command(&folder, &settings));
    let run = folder.join("run");
    let text = fs::read_to_string(run.join("layers.jsonl")).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let steps: Vec<_> = lines.iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [0, 0, 0, 0, 4, 4, 4, 4, 6, 6, 6, 6]);
    assert_eq!(lines[0]["layer"], "layers.0.self_attn.qkv_proj");
    for line in &lines {
        let (plain, rollout) = (number(line, "error_w4a4"), number(line, "error_rollout"));
        // What the masks take away at most: the residuals of their channels.
        let left = plain * (1.0 - number(line, "captured")).sqrt();
        assert!(0.0 < left && rollout < plain && rollout > 0.95 * left, "{line}");
        assert!(number(line, "captured") > 0.25, "more than the mask's share: {line}");
        assert!(number(line, "largest_over_median") >= 1.0, "{line}");
    }
    fs::remove_dir_all(run.join("checkpoints/step_0006")).unwrap();
    succeed(&mut resume(&folder, &[]));
    assert_eq!(fs::read_to_string(run.join("layers.jsonl")).unwrap(), text);
}

#[test]
fn replay_and_decomposition_agree_on_the_experts() {
    let live = steps("replay_off", &[]);
    let replayed = steps("replay_on", &["rollout.routing_replay=true"]);
    for line in &replayed {
        // The trainer's W4A16 weights are the rollout's: through the same experts nothing is left of their part.
        assert_eq!(number(line, "mismatch/delta_weight/max"), 0.0, "{line}");
        assert!(number(line, "mismatch/delta_act/mean") > 0.0, "{line}");
        assert!(
            number(line, "mismatch/delta_num/mean") < 1e-3,
            "the engine's experts are the ones that are scored: {line}"
        );
        // The parts add up to the gap that the learner measures.
        let (sum, whole) = (
            number(line, "mismatch/delta/mean"),
            number(line, "sampling/sampling_logp_difference/mean"),
        );
        assert!((sum - whole).abs() <= 1e-9 + 1e-6 * whole, "{sum} and {whole}");
        assert!(
            line["mismatch/route_flip_rate"].is_null(),
            "nothing flips that is replayed"
        );
    }
    for line in &live {
        let (decisions, tokens) = (
            number(line, "mismatch/route_flip_rate"),
            number(line, "mismatch/route_flip_token_rate"),
        );
        // One layer: a decision a token.
        assert!(decisions == tokens && (0.0..0.5).contains(&decisions), "{line}");
    }
    assert!(live.iter().any(|line| number(line, "mismatch/route_flip_rate") > 0.0));
    // The first step of both runs samples the same tokens from the same policy.
    assert_eq!(live[0]["reward/mean"], replayed[0]["reward/mean"]);
    let gap = |line: &Value| number(line, "mismatch/delta/mean");
    assert_ne!(
        gap(&live[0]),
        gap(&replayed[0]),
        "some tokens are routed differently by trainer and rollout"
    );
}

#[test]
fn the_last_table_and_the_gap_command_replay_too() {
    let folder = folder("replay_results");
    let settings = [
        "rollout.precision=w4a4",
        "model.num_experts=8",
        "rollout.routing_replay=true",
    ];
    succeed(&mut command(&folder, &settings));
    let run = folder.join("run");
    let results: Value = serde_json::from_str(&fs::read_to_string(run.join("results.json")).unwrap()).unwrap();
    let precisions = results["precisions"].as_array().unwrap();
    let row = |name: &str| precisions.iter().find(|row| row["precision"] == name).unwrap();
    assert_eq!(
        number(row("w4a16"), "gap_max"),
        0.0,
        "the trainer's own precision, through the same experts"
    );
    assert!(number(row("w4a4"), "gap_mean") > 0.0);

    let mut gap = Command::new(env!("CARGO_BIN_EXE_grpo_math"));
    gap.arg("gap").arg("--run").arg(&run);
    let table = text(&succeed(&mut gap));
    assert!(
        table.contains("each trainer through its rollout's experts (rollout.routing_replay)"),
        "{table}"
    );
    let report: Value = serde_json::from_slice(&succeed(gap.arg("--json")).stdout).unwrap();
    assert_eq!(report["routing_replay"], true);
    // Without a number of completions there are as many as the task has problems.
    let completions = report["completions"].as_u64().unwrap();
    assert!((7..512).contains(&completions), "{completions}");
}
