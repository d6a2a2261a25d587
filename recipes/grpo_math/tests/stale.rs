//! Rollouts of an older policy: what is stale, what is not, and that a resumed run has the same older policy.
mod tiny_run;
use serde_json::Value;
use std::{fs, path::Path};
use tiny_run::{checkpoint_file, command, folder, lines, metrics, resume, succeed};

/// Large steps, so that an older policy is another one.
const STALE: &[&str] = &[
    "trainer.precision=high",
    "rollout.precision=high",
    "warmup.max_steps=60",
    "trainer.learning_rate=0.02",
    "checkpoint.keep=100",
    "checkpoint.every=1",
    "eval.every=1",
];

fn gaps(run: &Path) -> Vec<f64> {
    let mut lines = lines(run);
    lines.retain(|line| line["stage"] == "grpo" && line["step"] != 0);
    let gap = |line: &Value| line["sampling/sampling_logp_difference/mean"].as_f64().unwrap();
    lines.iter().map(gap).collect()
}

#[test]
fn rollouts_between_two_syncs_are_of_an_older_policy_and_evaluations_of_the_current_one() {
    let (fresh, stale) = (folder("sync_1"), folder("sync_3"));
    succeed(&mut command(&fresh, STALE));
    succeed(&mut command(&stale, &[STALE, &["rollout.sync_every=3"]].concat()));
    let (fresh, stale) = (fresh.join("run"), stale.join("run"));
    assert!(gaps(&fresh).iter().all(|gap| *gap < 1e-4), "{:?}", gaps(&fresh));
    // Steps 1 and 4 come right after a sync; the others see an older policy, where a step has changed something.
    let (synced, older): (Vec<_>, Vec<_>) = (1..).zip(gaps(&stale)).partition(|(step, _)| step % 3 == 1);
    assert!(synced.iter().all(|(_, gap)| *gap < 1e-4), "{synced:?}");
    assert!(older.iter().any(|(_, gap)| *gap > 1e-3), "{older:?}");
    // A step learns from the same rollouts until the first stale ones; its policy is evaluated as it is.
    let step = |run: &Path, step: usize| lines(run).into_iter().rev().find(|line| line["step"] == step).unwrap();
    let evaluated = |run: &Path, at: usize| {
        let line = step(run, at);
        [line["eval/pass@1"].clone(), line["eval/greedy"].clone()]
    };
    assert_eq!(evaluated(&fresh, 1), evaluated(&stale, 1));
    let results: Value = serde_json::from_str(&fs::read_to_string(stale.join("results.json")).unwrap()).unwrap();
    let high = &results["precisions"][0];
    assert_eq!(
        evaluated(&stale, 6),
        [high["pass@1"].clone(), high["greedy"].clone()],
        "the last table is of the last policy"
    );
    assert!(high["gap_mean"].as_f64().unwrap() < 1e-4, "{high}");
}

#[test]
fn a_resumed_run_samples_the_older_policy_that_it_would_have_sampled() {
    let (whole, parts) = (folder("stale_whole"), folder("stale_parts"));
    let settings = [
        STALE,
        &[
            "rollout.sync_every=3",
            "rollout.precision=w4a4_rac",
            "rac.selection=calibrated",
            "rac.recalibrate_every=3",
        ],
    ]
    .concat();
    succeed(&mut command(&whole, &settings));
    succeed(&mut command(&parts, &settings));
    let (whole, parts) = (whole.join("run"), parts.join("run"));
    let has_older = |step: usize| {
        let folder = whole.join(format!("checkpoints/step_{step:04}"));
        folder.join("rollout_model.safetensors").exists()
    };
    assert_eq!(
        [0, 1, 2, 3, 4, 5, 6].map(has_older),
        [false, true, true, false, true, true, false]
    );
    for last in [5, 4, 2, 1] {
        for step in last + 1..=6 {
            fs::remove_dir_all(parts.join(format!("checkpoints/step_{step:04}"))).unwrap();
        }
        succeed(&mut resume(parts.parent().unwrap(), &[]));
        assert_eq!(metrics(&whole), metrics(&parts), "resumed after step {last}");
        let model = |run| checkpoint_file(run, "step_0006", "model.safetensors");
        assert!(model(&whole) == model(&parts), "resumed after step {last}");
    }
}
