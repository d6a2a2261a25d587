//! A run that begins with another's warm-up is the run that it would have been with a warm-up of its own.
mod tiny_run;
use std::{
    fs,
    path::{Path, PathBuf},
};
use tiny_run::{checkpoint_file, command, folder, lines, metrics, resume, succeed, text};

/// What shows that masks, optimizer and seeds are those of a warm-up of one's own.
const ARM: &[&str] = &[
    "trainer.precision=w4a4_rac",
    "rac.selection=calibrated",
    "rollout.max_new_tokens=9",
    "grpo.kl_coefficient=0.01",
];

fn from(path: &Path) -> String {
    format!("warmup.from={}", path.display())
}

/// A warm-up and nothing more, in high precision.
fn warmed(folder: &Path) -> PathBuf {
    succeed(&mut command(
        folder,
        &["grpo.steps=0", "trainer.precision=high", "rollout.precision=high"],
    ));
    folder.join("run")
}

#[test]
fn a_warm_up_alone_leaves_its_evaluation_and_checkpoint_and_can_be_prolonged() {
    let folder = folder("warm_up_alone");
    succeed(&mut command(&folder, &["grpo.steps=0", "trainer.lr_schedule=cosine"]));
    let run = folder.join("run");
    let last = lines(&run).pop().unwrap();
    assert_eq!((&last["stage"], &last["step"]), (&"grpo".into(), &0.into()));
    assert!(last["eval/pass@1"].is_number(), "{last}");
    let checkpoints: Vec<_> = fs::read_dir(run.join("checkpoints"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(checkpoints, ["step_0000"]);
    assert!(run.join("report.html").exists() && run.join("results.json").exists());
    succeed(&mut resume(&folder, &["grpo.steps=2"]));
    assert_eq!(lines(&run).pop().unwrap()["step"], 2);
}

#[test]
fn it_ends_with_the_bits_of_a_run_that_warmed_up_itself() {
    let (own, theirs, arm) = (folder("warm_own"), folder("warm_theirs"), folder("warm_arm"));
    succeed(&mut command(&own, ARM));
    let warmed = warmed(&theirs);
    for (name, path) in [("run", warmed.clone()), ("run-2", warmed.join("checkpoints/step_0000"))] {
        succeed(&mut command(&arm, &[ARM, &[&from(&path)]].concat()));
        let (own, arm) = (own.join("run"), arm.join(name));
        assert_eq!(metrics(&own), metrics(&arm), "from {}", path.display());
        for checkpoint in ["step_0000", "step_0006"] {
            for file in ["model.safetensors", "residual_masks.safetensors"] {
                let bytes = |run| checkpoint_file(run, checkpoint, file);
                assert!(bytes(&own) == bytes(&arm), "{file} of {checkpoint} differs");
            }
        }
    }
}

#[test]
fn it_goes_on_without_the_other_run() {
    let (theirs, whole, parts) = (folder("warm_gone"), folder("warm_whole"), folder("warm_parts"));
    let from = from(&warmed(&theirs));
    succeed(&mut command(&whole, &[ARM, &[&from]].concat()));
    succeed(&mut command(&parts, &[ARM, &[&from, "grpo.steps=3"]].concat()));
    fs::remove_dir_all(theirs.join("run")).unwrap();
    succeed(&mut resume(&parts, &["grpo.steps=6"]));
    assert_eq!(metrics(&whole.join("run")), metrics(&parts.join("run")));
    // The first checkpoint alone will do.
    for checkpoint in ["step_0002", "step_0003", "step_0004", "step_0006"] {
        let _ = fs::remove_dir_all(parts.join("run/checkpoints").join(checkpoint));
    }
    succeed(&mut resume(&parts, &[]));
    assert_eq!(metrics(&whole.join("run")), metrics(&parts.join("run")));
}

#[test]
fn outlier_channels_are_put_in_once() {
    let (own, plain, theirs) = (
        folder("outliers_own"),
        folder("outliers_plain"),
        folder("outliers_theirs"),
    );
    let outliers = ["model.outlier_channels=2", "grpo.steps=2"];
    let high = ["trainer.precision=high", "rollout.precision=high"];
    let model = |folder: &Path| checkpoint_file(&folder.join("run"), "step_0000", "model.safetensors");
    let warmed = warmed(&plain);
    succeed(&mut command(&own, &[&outliers[..], &high].concat()));
    assert!(model(&own) != model(&plain), "some channels are larger");
    // A plain warm-up is given them; one that has them keeps them.
    succeed(&mut command(
        &theirs,
        &[&outliers[..], &high, &[&from(&warmed)]].concat(),
    ));
    assert!(model(&own) == model(&theirs));
    let again = folder("outliers_again");
    succeed(&mut command(
        &again,
        &[&outliers[..], &high, &[&from(&theirs.join("run"))]].concat(),
    ));
    assert!(model(&own) == model(&again));
    assert_eq!(metrics(&own.join("run")), metrics(&again.join("run")));
    // In high precision nothing has changed before the first step.
    let first = |folder: &Path| {
        let lines = lines(&folder.join("run"));
        lines.into_iter().find(|line| line["stage"] == "grpo").unwrap()["eval/pass@1"].clone()
    };
    assert_eq!(first(&own), first(&plain));
    let refused = command(
        &folder("outliers_other"),
        &["model.outlier_channels=1", &from(&theirs.join("run"))],
    )
    .output()
    .unwrap();
    let said = text(&refused);
    assert!(
        said.contains("model.outlier_channels = 1: expected 2, as in "),
        "{said}"
    );
}

#[test]
fn another_model_task_or_seed_is_refused_by_its_setting() {
    let (theirs, arm) = (folder("warm_other"), folder("warm_refused"));
    let run = warmed(&theirs);
    let refused = |path: &Path, setting: &str, expected: &str| {
        let output = command(&arm, &[setting, &from(path)]).output().unwrap();
        let said = text(&output);
        assert_eq!(output.status.code(), Some(1), "{setting}: {said}");
        assert!(
            said.contains("warmup.from = ") && said.contains(expected),
            "{expected} is missing: {said}"
        );
        assert!(!arm.join("run").exists(), "{setting}: nothing is left behind");
    };
    for (setting, expected) in [
        ("run.seed=2", "run.seed = 2: expected 1, as in "),
        ("model.num_experts=4", "model.num_experts = 4: expected 3, as in "),
        ("model.init_gain=2", "model.init_gain = 2.0: expected 1.7, as in "),
        (
            "task.addition.order=most_significant_first",
            "task.addition.order = \"most_significant_first\": expected \"least_significant_first\", as in ",
        ),
    ] {
        refused(&run, setting, expected);
    }
    refused(&run.join("nowhere"), "grpo.steps=1", "there is no such folder");
    refused(
        &theirs,
        "grpo.steps=1",
        "it is not the folder of a run (it has no config.toml)",
    );
    refused(&run.join("plots/.."), "run.seed=2", "run.seed = 2: expected 1");
    let later = run.join("checkpoints/step_0002");
    fs::create_dir(&later).unwrap();
    refused(&later, "grpo.steps=1", "it is not the checkpoint after the warm-up");
    let model = run.join("checkpoints/step_0000/model.safetensors");
    let bytes = fs::read(&model).unwrap();
    fs::write(&model, &bytes[1..]).unwrap();
    refused(&run, "grpo.steps=1", "model.safetensors is not what was written");
    fs::write(&model, bytes).unwrap();
    fs::write(run.join("metrics.jsonl"), "").unwrap();
    refused(&run, "grpo.steps=1", "line 1: expected step 1 of the warm-up");
}
