//! What is planned, chosen and refused, with files laid by hand.
use super::{choice::best, *};
use crate::{
    results::{Answers, ArmRun, Curve, Evaluation, Tried},
    series::{DECLARED, Declaration, all_settings},
};

fn plan(test: &str) -> Plan {
    let out = std::env::temp_dir().join(format!("quads_ablation_{}_{test}", std::process::id()));
    let _ = std::fs::remove_dir_all(&out);
    let declared = Declaration::read(DECLARED, false).unwrap();
    Plan {
        layout: Layout::new(out),
        series: declared.select(&["hard".into()]).unwrap(),
        declared: declared.series,
        device: grpo_math::backend::DEVICE.into(),
        keep_checkpoints: false,
    }
}

fn finished(right: usize, settings: Settings) -> ArmFile {
    let answers = Answers((0..100).map(|problem| problem < right).collect());
    let evaluation = Evaluation {
        own: answers.clone(),
        trainer: answers.clone(),
        high: answers.clone(),
        w4a4: answers,
    };
    ArmFile {
        complete: true,
        settings,
        warmup_steps: 1,
        processor: None,
        run: ArmRun {
            arm: "A".into(),
            start: evaluation.clone(),
            end: evaluation,
            steps: 1,
            stopped: None,
            skipped_updates: 0,
            collapse: None,
            curve: Curve::default(),
            layers: vec![],
            wall_s: 0.0,
            host: None,
        },
    }
}

#[test]
fn the_learning_rate_is_chosen_by_one_arm_before_the_others_run() {
    let plan = plan("choice");
    let hard = &plan.series[0];
    let choice = hard.choice.clone().unwrap();
    let jobs = plan.jobs();
    let tries = choice.grid.len() * choice.seeds.len();
    let tried = |job: &&Job| matches!(job, Job::Arm { tried: Some(_), .. });
    assert_eq!(jobs.iter().filter(tried).count(), tries);
    let is = |wanted: &str| jobs.iter().find(|job| job.name() == wanted).unwrap();
    let try_of = |value: &str, seed: u64| Job::Arm {
        series: hard.clone(),
        seed,
        arm: choice.arm,
        tried: Some(value.into()),
    };
    let (arm, gaps) = (is("hard, seed 1, arm B"), is("gaps of hard, seed 1"));
    // Warm-ups are there; only the choice is not.
    for seed in hard.seeds.iter().chain(&choice.seeds) {
        let warm = plan.layout.warmup("hard", *seed).join("checkpoints/step_0000");
        std::fs::create_dir_all(warm).unwrap();
    }
    let measured = plan.work(gaps, None).unwrap();

    // Means of 0.40, 0.60, 0.60 and 0.10: of the two best the first.
    let rights = [[30, 50], [80, 40], [60, 60], [10, 10]];
    for (index, (value, rights)) in choice.grid.iter().zip(rights).enumerate() {
        for (seed, right) in choice.seeds.iter().zip(rights) {
            assert_eq!(plan.chosen(hard, &choice).unwrap(), None, "{index} of {tries}");
            assert!(!plan.is_ready(arm).unwrap() && plan.is_ready(gaps).unwrap());
            let run = plan.layout.choice_arm("hard", value, *seed, choice.arm);
            let settings = all_settings(&plan.assignments(&try_of(value, *seed)).unwrap()).unwrap();
            files::write(&arm_file(&run), &finished(right, settings)).unwrap();
        }
    }
    assert!(plan.is_ready(arm).unwrap());
    let chosen = choice.grid[1].clone();
    assert_eq!(plan.chosen(hard, &choice).unwrap().unwrap().chosen, chosen);
    // Without settings they are no warm-ups to go on from.
    std::fs::remove_dir_all(plan.layout.out().join("warmups")).unwrap();
    plan.left().unwrap();
    assert!(!plan.layout.choice("hard").exists(), "looking writes nothing");
    plan.keep_choice(hard).unwrap();
    let file: Chosen = files::read(&plan.layout.choice("hard")).unwrap().unwrap();
    assert_eq!((&file.chosen, &file.tried[1].pass_at_1), (&chosen, &vec![0.8, 0.4]));
    let Work::Arm { run, .. } = plan.work(arm, None).unwrap() else {
        panic!("an arm's work");
    };
    assert!(run.assignments.contains(&format!("{}={chosen}", choice.key)));
    // What was measured before the choice stays as it is, and nothing is tried again.
    assert_eq!(plan.work(gaps, None).unwrap(), measured);
    assert_eq!(plan.jobs().iter().filter(tried).count(), 0);
    // A file of another choice, or of none, is refused before anything is run.
    let with = |change: &dyn Fn(&mut Chosen)| {
        let mut other = file.clone();
        change(&mut other);
        serde_json::to_string(&other).unwrap()
    };
    for (text, expected) in [
        ("{".into(), "cannot read"),
        (
            with(&|file| file.chosen = "7".into()),
            "trainer.learning_rate = 7 was chosen, which the declaration does not offer",
        ),
        (
            with(&|file| file.arm = "B".into()),
            "was chosen by arm B with the seeds",
        ),
        (
            with(&|file| file.seeds = vec![1, 2]),
            "with the seeds [1, 2], where arm A",
        ),
        (with(&|file| file.tried.clear()), "expected a result of each of 3e-5"),
        (
            with(&|file| file.tried[0].pass_at_1[0] = f64::NAN),
            "expected a result of each of 3e-5",
        ),
        (
            with(&|file| file.chosen = "3e-4".into()),
            "trainer.learning_rate = 3e-4 was chosen, where 1e-4 has the highest mean",
        ),
    ] {
        std::fs::write(plan.layout.choice("hard"), text).unwrap();
        let error = format!("{:#}", plan.left().unwrap_err());
        assert!(error.contains("choice.json") && error.contains(expected), "{error}");
    }
    // It alone, as it is carried to another machine, tells nothing of the settings there.
    let mut elsewhere = self::plan("choice_carried");
    elsewhere.series[0].change(&["grpo.steps=50".into()]).unwrap();
    files::write(&elsewhere.layout.choice("hard"), &file).unwrap();
    let (left, _) = elsewhere.left().unwrap();
    assert!(
        left.iter()
            .all(|(job, _)| !matches!(job, Job::Arm { tried: Some(_), .. }))
    );
    std::fs::remove_dir_all(elsewhere.layout.out()).unwrap();
    // A try of another arm, or made with other settings, is found beside it; one of another device is none.
    files::write(&plan.layout.choice("hard"), &file).unwrap();
    plan.left().unwrap();
    let run = plan
        .layout
        .choice_arm("hard", &choice.grid[0], choice.seeds[0], choice.arm);
    let whole: ArmFile = files::read(&arm_file(&run)).unwrap().unwrap();
    let mut other = whole.clone();
    other.settings.insert("run.device".into(), "\"cuda:0\"".into());
    files::write(&arm_file(&run), &other).unwrap();
    plan.left().unwrap();
    other.settings.insert("grpo.steps".into(), "8".into());
    files::write(&arm_file(&run), &other).unwrap();
    let error = format!("{:#}", plan.left().unwrap_err());
    assert!(error.contains("grpo.steps was 8, and is 100"), "{error}");
    other = whole.clone();
    other.run.arm = "B".into();
    files::write(&arm_file(&run), &other).unwrap();
    let error = format!("{:#}", plan.left().unwrap_err());
    assert!(
        error.contains("the file of arm B, where that of arm A is expected"),
        "{error}"
    );
    // Judged on fewer problems than the others.
    other = whole;
    other.run.end.own.0.pop();
    files::write(&arm_file(&run), &other).unwrap();
    std::fs::remove_file(plan.layout.choice("hard")).unwrap();
    let error = format!("{:#}", plan.left().unwrap_err());
    assert!(error.contains("different numbers of problems: {99, 100}"), "{error}");
    // An arm whose choice is gone.
    std::fs::remove_dir_all(&run).unwrap();
    let run = plan.path(arm);
    std::fs::create_dir_all(run.join("checkpoints")).unwrap();
    std::fs::write(run.join("config.toml"), "").unwrap();
    let error = format!("{:#}", plan.left().unwrap_err());
    assert!(
        error.contains("seed_1/B is there, and") && error.contains("choice.json is not"),
        "{error}"
    );
    std::fs::remove_dir_all(plan.layout.out()).unwrap();
}

/// As many right answers of 1,024, as a file keeps their shares.
#[test]
fn equal_means_stay_equal_in_a_file() {
    let tried = |value: &str, right: [f64; 2]| Tried {
        value: value.into(),
        pass_at_1: right.map(|right| right / 1024.0).to_vec(),
    };
    for more in 0..100 {
        let more = f64::from(more);
        let tried = [tried("1", [700.0, 700.0]), tried("2", [700.0 + more, 700.0 - more])];
        let text = serde_json::to_string(&tried).unwrap();
        let read: Vec<Tried> = serde_json::from_str(&text).unwrap();
        assert_eq!(best(&read).unwrap().value, "1", "{text}");
    }
    let close = [tried("1", [700.0, 700.0]), tried("2", [700.0, 701.0])];
    assert_eq!(best(&close).unwrap().value, "2");
}

#[test]
fn series_that_agree_share_their_warm_ups() {
    let mut plan = plan("warmups");
    plan.series = plan.declared.clone();
    let jobs = plan.jobs();
    let names: BTreeSet<_> = jobs
        .iter()
        .filter_map(|job| match job {
            Job::Warmup { name, .. } => Some(name.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(names, BTreeSet::from(["calm", "hard", "scaling-128", "scaling-256"]));
}

/// All that are declared, so that those of a later call are there; no others: `rollout_old` refuses G.
#[test]
fn gaps_are_those_of_the_arms_that_a_series_is_declared_with() {
    let mut plan = plan("gaps");
    plan.series = plan.declared.clone();
    for series in &mut plan.series {
        series.arms.truncate(1);
    }
    let arms = |name: &str| {
        let job = plan.jobs().into_iter().find_map(|job| match job {
            Job::Gaps { ref series, .. } if series.name == name => Some(job),
            _ => None,
        });
        let warm = plan.layout.warmup("calm", 1);
        std::fs::create_dir_all(warm.join("checkpoints/step_0000")).unwrap();
        match plan.work(&job.unwrap(), None).unwrap() {
            Work::Gaps { arms, .. } => arms.join(" "),
            other => panic!("{other:?} is no measurement of gaps"),
        }
    };
    assert_eq!(arms("calm"), "A B C D E E+ F F' G H I");
    assert_eq!(arms("rollout_old"), "A B C D E E+ F F' H I");
    std::fs::remove_dir_all(plan.layout.out()).unwrap();
}
