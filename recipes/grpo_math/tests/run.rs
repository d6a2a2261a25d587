//! What a run leaves behind, and that the same seed leaves the same.
mod tiny_run;
use serde_json::Value;
use std::fs;
use tiny_run::{checkpoint_file, command, folder, lines, metrics, resume, succeed, text};

#[test]
fn a_run_leaves_its_metrics_checkpoints_plots_report_and_results() {
    let folder = folder("leaves");
    let output = text(&succeed(&mut command(&folder, &[])));
    for said in ["task", "w4a4_rac", "packed", "Held-out accuracy", "report.html"] {
        assert!(output.contains(said), "{said} is missing:\n{output}");
    }
    let run = folder.join("run");

    let lines = lines(&run);
    let grpo: Vec<_> = lines.iter().filter(|line| line["stage"] == "grpo").collect();
    let steps: Vec<_> = grpo.iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [0, 1, 2, 3, 4, 5, 6]);
    for line in &grpo {
        let step = line["step"].as_u64().unwrap();
        let evaluated = [0, 3, 6].contains(&step);
        assert_eq!(line["eval/pass@1"].is_number(), evaluated, "{line}");
        assert_eq!(line["reward/mean"].is_number(), step > 0, "{line}");
        assert_eq!(
            line["mismatch/delta_act/mean"].is_number(),
            step > 0 && step % 2 == 0,
            "{line}"
        );
        for name in [
            "actor/entropy",
            "actor/grad_norm",
            "actor/grad_norm_max",
            "actor/pg_clipfrac",
            "skipped_steps",
            "sampling/sampling_logp_difference/mean",
            "sampling/sampling_logp_difference/p99",
            "sampling/sampling_logp_difference/max",
            "rollout_corr/k3_kl",
            "rollout_corr/k3_kl_reverse",
            "rollout_corr/rollout_is_eff_sample_size",
            "rollout_corr/rollout_is_oob_ratio",
            "mismatch/route_flip_rate",
            "response_length/clip_ratio",
            "response_length/mean",
        ] {
            assert_eq!(line[name].is_number(), step > 0, "{name}: {line}");
        }
    }
    // 10 problems, 4 a step: the third step begins the second pass.
    assert_eq!(grpo[2]["data/epoch"], 0.8);
    assert_eq!(grpo[3]["data/epoch"], 1.2);

    let warmup = lines.iter().filter(|line| line["stage"] == "warmup").count();
    assert_eq!(warmup, 12);
    assert!(lines[3]["validation/pass@1"].is_number() && lines[2]["validation/pass@1"].is_null());

    for checkpoint in ["step_0000", "step_0002", "step_0004", "step_0006"] {
        for file in [
            "model.safetensors",
            "config.json",
            "optimizer.safetensors",
            "state.json",
            "checksums.txt",
        ] {
            assert!(!checkpoint_file(&run, checkpoint, file).is_empty());
        }
    }
    for plot in ["accuracy", "reward", "gap", "entropy", "grad_norm", "response_length"] {
        let svg = fs::read_to_string(run.join("plots").join(format!("{plot}.svg"))).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{plot}");
    }
    let report = fs::read_to_string(run.join("report.html")).unwrap();
    assert!(report.contains("Complete") && report.contains("</html>"));
    for foreign in ["http://", "https://", "<script", "src="] {
        let found = report.replace("http://www.w3.org/2000/svg", "");
        assert!(!found.contains(foreign), "{foreign} in report.html");
    }

    let results: Value = serde_json::from_str(&fs::read_to_string(run.join("results.json")).unwrap()).unwrap();
    let precisions: Vec<_> = results["precisions"].as_array().unwrap().iter().collect();
    let names: Vec<_> = precisions
        .iter()
        .map(|row| row["precision"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["high", "w4a16", "w4a4", "w4a4_rac", "fp8"]);
    // Packed W4A16 weights are the trainer's: what is left is the order of sums.
    assert!(precisions[1]["gap_mean"].as_f64().unwrap() < 1e-5, "{}", precisions[1]);
    assert_eq!(results["before"]["pass@1"], grpo[0]["eval/pass@1"]);
    assert_eq!(results["after"]["pass@1"], grpo[6]["eval/pass@1"]);

    let config = fs::read_to_string(run.join("config.toml")).unwrap();
    assert!(config.contains("\nsteps = 6\n") && config.contains("# Optimizer steps on each batch of rollouts."));
}

#[test]
fn the_same_seed_gives_the_same_bytes_and_another_seed_others() {
    let (one, two, three) = (folder("same_1"), folder("same_2"), folder("same_3"));
    succeed(&mut command(&one, &[]));
    succeed(&mut command(&two, &["rollout.slots=8"]));
    succeed(&mut command(&three, &["run.seed=2"]));
    let [one, two, three] = [one, two, three].map(|folder| folder.join("run"));
    assert_eq!(metrics(&one), metrics(&two));
    let weights = |run| checkpoint_file(run, "step_0006", "model.safetensors");
    assert_eq!(weights(&one), weights(&two));
    assert_ne!(metrics(&one), metrics(&three));
}

#[test]
fn a_second_run_of_the_same_name_leaves_the_first_alone() {
    let folder = folder("second");
    let short = &["grpo.steps=1", "eval.every=0"];
    succeed(&mut command(&folder, short));
    let first = fs::read(folder.join("run/metrics.jsonl")).unwrap();
    let output = succeed(&mut command(&folder, short));
    assert!(text(&output).contains("run-2"));
    assert!(folder.join("run-2/report.html").is_file());
    assert_eq!(fs::read(folder.join("run/metrics.jsonl")).unwrap(), first);
}

#[test]
fn every_precision_runs_on_either_side() {
    for (trainer, rollout, rac) in [
        ("high", "w4a4", "all"),
        ("fp8", "fp8", "all"),
        ("w4a4", "w4a16", "all"),
        ("w4a16", "w4a4_rac", "calibrated"),
        ("w4a4_rac", "w4a4_rac", "per_token"),
        ("w4a4_rac", "high", "calibrated"),
        // Only the last table is compensated.
        ("w4a16", "w4a4", "calibrated"),
    ] {
        let folder = folder(&format!("precision_{trainer}_{rollout}_{rac}"));
        let settings = [
            format!("trainer.precision={trainer}"),
            format!("rollout.precision={rollout}"),
            format!("rac.selection={rac}"),
            "grpo.steps=2".into(),
            "rac.recalibrate_every=1".into(),
        ];
        succeed(&mut command(&folder, &settings.each_ref().map(String::as_str)));
        assert!(folder.join("run/results.json").is_file());
    }
}

#[test]
fn every_task_loss_and_correction_runs() {
    for (index, settings) in [
        &["task.chain_sum.weight=1", "grpo.loss=dapo", "grpo.correction=tis"][..],
        &[
            "task.modular.weight=2",
            "task.addition.weight=0",
            "grpo.loss=dr_grpo",
            "grpo.scale_rewards=none",
        ],
        &[
            "grpo.loss=gspo",
            "grpo.correction=sequence_mask_mean",
            "rollout.routing_replay=true",
        ],
        &["grpo.loss=cispo", "grpo.correction=icepop", "trainer.micro_batch=3"],
        &[
            "grpo.loss=bnpo",
            "grpo.kl_coefficient=0.1",
            "grpo.correction=sequence_mask",
            "trainer.lr_schedule=cosine",
        ],
        &[
            "grpo.scale_rewards=batch",
            "grpo.truncated=mask",
            "grpo.clip_two_sided=3",
            "trainer.lr_warmup_steps=2",
        ],
    ]
    .into_iter()
    .enumerate()
    {
        let folder = folder(&format!("setting_{index}"));
        let settings: Vec<_> = settings.iter().copied().chain(["grpo.steps=2"]).collect();
        succeed(&mut command(&folder, &settings));
    }
}

#[test]
fn a_finished_run_can_be_prolonged() {
    let (short, long) = (folder("prolonged"), folder("long"));
    succeed(&mut command(&short, &["grpo.steps=3"]));
    succeed(&mut resume(&short, &["grpo.steps=6"]));
    succeed(&mut command(&long, &[]));
    assert_eq!(metrics(&short.join("run")), metrics(&long.join("run")));
}
