//! Evaluations in several precisions, and the answers one by one.
mod tiny_run;
use serde_json::Value;
use std::{fs, path::Path};
use tiny_run::{command, folder, lines, metrics, resume, succeed};

fn answers(run: &Path) -> Vec<(u64, String, String)> {
    let text = fs::read_to_string(run.join("answers.jsonl")).unwrap();
    let line = |line: &str| {
        let value: Value = serde_json::from_str(line).unwrap();
        let text = |name: &str| value[name].as_str().unwrap().to_string();
        (value["step"].as_u64().unwrap(), text("precision"), text("right"))
    };
    text.lines().map(line).collect()
}

const SEVERAL: &[&str] = &[
    "eval.precisions=own, high w4a4,trainer fp8",
    "eval.samples=3",
    "warmup.max_steps=60",
    "rollout.precision=w4a4",
];

#[test]
fn every_precision_asked_for_has_its_pass_at_1_and_its_answers() {
    let folder = folder("eval_precisions");
    succeed(&mut command(&folder, SEVERAL));
    let run = folder.join("run");
    let grpo: Vec<_> = lines(&run).into_iter().filter(|line| line["stage"] == "grpo").collect();
    let names = ["high", "w4a4", "trainer", "fp8"];
    for line in &grpo {
        let evaluated = [0, 3, 6].contains(&line["step"].as_u64().unwrap());
        for name in names {
            assert_eq!(line[format!("eval/{name}/pass@1")].is_number(), evaluated, "{line}");
        }
        assert_eq!(
            line["eval/w4a4/pass@1"], line["eval/pass@1"],
            "the rollout's own precision"
        );
    }
    let answers = answers(&run);
    let kept: Vec<_> = answers.iter().map(|(step, name, _)| (*step, name.as_str())).collect();
    let of = |step| ["own", "high", "w4a4", "trainer", "fp8"].map(|name| (step, name));
    assert_eq!(kept, [of(0), of(6)].concat());
    for (step, name, right) in &answers {
        assert_eq!(right.len(), 6 * 3, "problems times samples");
        let share = right.chars().filter(|digit| *digit == '1').count() as f64 / right.len() as f64;
        let metric = match name.as_str() {
            "own" => "eval/pass@1".to_string(),
            name => format!("eval/{name}/pass@1"),
        };
        let logged = grpo[*step as usize][&metric].as_f64().unwrap();
        assert!(
            (share - logged).abs() < 1e-12,
            "{metric} at {step}: {share} and {logged}"
        );
    }
    // The last table evaluates the same policy with the same random numbers.
    let results: Value = serde_json::from_str(&fs::read_to_string(run.join("results.json")).unwrap()).unwrap();
    for row in results["precisions"].as_array().unwrap() {
        let metric = match row["precision"].as_str().unwrap() {
            "w4a16" => "eval/trainer/pass@1".into(),
            name => format!("eval/{name}/pass@1"),
        };
        if grpo[6][&metric].is_number() {
            assert_eq!(row["pass@1"], grpo[6][&metric], "{metric}");
        }
    }
}

#[test]
fn more_precisions_change_nothing_else_and_a_resumed_run_has_the_same_answers() {
    let (few, several) = (folder("eval_few"), folder("eval_several"));
    succeed(&mut command(&few, &SEVERAL[1..]));
    succeed(&mut command(&several, SEVERAL));
    let (few, several) = (few.join("run"), several.join("run"));
    let without = |line: Value| -> Value {
        let line = line.as_object().unwrap().clone();
        let kept = |name: &str| {
            !(name.starts_with("time/")
                || name.starts_with("perf/")
                || name.matches('/').count() == 2 && name.starts_with("eval/"))
        };
        line.into_iter().filter(|(name, _)| kept(name)).collect()
    };
    let bare = |run: &Path| lines(run).into_iter().map(without).collect::<Vec<_>>();
    assert_eq!(bare(&few), bare(&several));
    let (before, whole) = (metrics(&several), fs::read(several.join("answers.jsonl")).unwrap());
    // From the middle, from the end, and from before the first evaluation.
    for kept in [4, 6, 0] {
        for step in [2, 4, 6].into_iter().filter(|step| *step > kept) {
            let _ = fs::remove_dir_all(several.join(format!("checkpoints/step_{step:04}")));
        }
        succeed(&mut resume(several.parent().unwrap(), &[]));
        assert_eq!(metrics(&several), before, "from step {kept}");
        assert_eq!(
            fs::read(several.join("answers.jsonl")).unwrap(),
            whole,
            "from step {kept}"
        );
    }
}
