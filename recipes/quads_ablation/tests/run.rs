//! The program from outside, on a tiny model: what it leaves, what it refuses, and that nothing that happens to its
//! processes changes a number.
mod tiny;

use quads_ablation::{checks::checks, files, files::ArmFile, results::Results};
use std::{fs, process::Stdio};
use tiny::{fail, folder, lines, program, results, send, succeed, text, tiny, wait_for, worker};

#[test]
fn a_run_leaves_results_and_is_never_repeated() {
    let out = folder("whole");
    succeed(&mut tiny(&out, &["--arms", "A,B,E"]));
    let results = results(&out);
    assert_eq!(results.series.len(), 1);
    let seed = &results.series[0].seeds[0];
    assert_eq!(seed.gaps.len(), 11, "gaps are measured for every arm");
    assert_eq!(
        seed.arms.iter().map(|arm| arm.arm.as_str()).collect::<Vec<_>>(),
        ["A", "B", "E"]
    );
    for arm in &seed.arms {
        assert_eq!((arm.steps, &arm.stopped), (8, &None), "{}", arm.arm);
        assert_eq!(arm.curve.step, (0..=8).collect::<Vec<_>>());
        assert_eq!(arm.start.own.0.len(), 256);
        assert!(!arm.layers.is_empty(), "{}", arm.arm);
        let evaluated = arm.curve.points("eval/pass@1").count();
        assert_eq!(evaluated, 5, "{}", arm.arm);
        for precision in ["trainer", "high"] {
            let name = format!("eval/{precision}/pass@1");
            assert_eq!(arm.curve.points(&name).count(), evaluated, "{}", arm.arm);
        }
        assert!(
            arm.curve.points("actor/grad_norm").any(|(_, norm)| norm > 0.0),
            "it learns something"
        );
    }
    let written = Results::read(&out.join("results.json")).unwrap();
    let processors = std::thread::available_parallelism().unwrap().get();
    for arm in &written.series[0].seeds[0].arms {
        let host = arm.host.as_ref().unwrap();
        assert_eq!(
            (host.processors, host.device.as_str()),
            (Some(processors), "cpu"),
            "{}",
            arm.arm
        );
        assert_eq!(host.processor, written.machine.processor, "{}", arm.arm);
    }
    let start = |arm: usize| &seed.arms[arm].start.high;
    assert!(
        start(0) == start(1) && start(1) == start(2),
        "all start from one policy"
    );
    for file in [
        "report.html",
        "warmups/quick/seed_1/config.toml",
        "quick/seed_1/A/metrics.jsonl",
        "quick/seed_1/A.log",
    ] {
        assert!(out.join(file).is_file(), "{file}");
    }
    assert!(!out.join("quick/seed_1/A/checkpoints/step_0000").exists());
    assert!(out.join("quick/seed_1/A/checkpoints/step_0008").is_dir());

    // Run folders are ordinary ones, and the small files are all that results are made of.
    let before = fs::read(out.join("results.json")).unwrap();
    for run in ["A", "B", "E"] {
        let run = out.join("quick/seed_1").join(run);
        let arm = fs::read(run.join("arm.json")).unwrap();
        fs::remove_dir_all(&run).unwrap();
        fs::create_dir(&run).unwrap();
        fs::write(run.join("arm.json"), arm).unwrap();
    }
    fs::remove_file(out.join("results.json")).unwrap();
    let said = text(&succeed(program().args(["report", "--quick", "--out"]).arg(&out)));
    assert!(said.contains("results.json") && said.contains("report.html"), "{said}");
    assert_eq!(fs::read(out.join("results.json")).unwrap(), before);
    let said = text(&succeed(&mut tiny(&out, &["--arms", "A,B,E"])));
    assert!(said.contains("5 of 5 done") && !said.contains("arm A:"), "{said}");
    let said = text(&succeed(&mut tiny(&out, &["--arms", "A,C", "--dry-run"])));
    assert!(said.starts_with("1 to run, 3 done\n  quick, seed 1, arm C"), "{said}");
    // A warm-up that nothing starts from any more is not made again.
    fs::remove_dir_all(out.join("warmups")).unwrap();
    let said = text(&succeed(&mut tiny(&out, &["--arms", "A,B,E"])));
    assert!(said.contains("4 of 4 done") && !out.join("warmups").exists(), "{said}");
    let said = text(&succeed(&mut tiny(&out, &["--arms", "A,C", "--dry-run"])));
    assert!(
        said.starts_with("2 to run, 2 done\n  warm-up quick, seed 1\n  quick, seed 1, arm C"),
        "{said}"
    );
}

#[test]
fn what_was_made_with_other_settings_is_refused_by_name() {
    let out = folder("changed");
    succeed(&mut tiny(&out, &["--arms", "A"]));
    let said = fail(
        &mut tiny(&out, &["--arms", "A", "--set", "trainer.learning_rate=2e-3"]),
        1,
    );
    assert!(
        said.contains("was made with other settings: trainer.learning_rate was 0.001, and is 0.002. Undo the change"),
        "{said}"
    );
    let said = fail(&mut tiny(&out, &["--arms", "B", "--set", "warmup.batch_size=8"]), 1);
    assert!(
        said.contains("warmups/quick/seed_1 was made with other settings: warmup.batch_size was 16, and is 8"),
        "{said}"
    );
    assert!(!out.join("quick/seed_1/B").exists(), "refused before anything is run");
}

#[test]
fn impossible_options_are_refused_before_anything_is_made() {
    let out = folder("refused").join("none");
    for (options, code, expected) in [
        (&["--series", "calmer"][..], 1, "--series calmer: expected one of quick"),
        (&["--arms", "A,Z"], 1, "arm Z: expected one of A, B, C"),
        (
            &["--seeds", "0"],
            2,
            "0: expected a number of seeds, a range (1-5) or a list (2,4)",
        ),
        (&["--seeds", "2,2"], 1, "each is to be given once"),
        (
            &["--seeds", "101"],
            1,
            "--seeds 101: at most 1 are declared; the seed 101 alone is 101-101",
        ),
        (&["--seeds", "9223372036854775808,1"], 2, "expected a number of seeds"),
        (&["--jobs", "0"], 2, "0 is not in 1.."),
        (&["--set", "=3"], 1, "--set =3: expected section.key=value"),
        (&["--set", "grpo.stepz=3"], 1, "unknown setting grpo.stepz"),
        (
            &["--set", "trainer.precision=fp8"],
            1,
            "trainer.precision is what the arms differ in",
        ),
        (&["--set", "run.seed=8"], 1, "run.seed follows from seed, arm and --out"),
        (
            &["--set", "grpo.steps"],
            1,
            "--set grpo.steps: expected section.key=value",
        ),
        (
            &["--set", "grpo.minibatches=7"],
            1,
            "grpo.minibatches = 7 (from --set): expected a divisor",
        ),
        (&["--device", "tpu"], 1, "run.device = \"tpu\" (from --set): expected"),
    ] {
        let said = fail(program().args(["--quick", "--out"]).arg(&out).args(options), code);
        assert!(said.contains(expected), "{options:?}: {said}\nwithout {expected}");
    }
    let said = fail(program().args(["report", "--out"]).arg(&out), 1);
    assert!(said.contains("no arm and no warm-up has left anything there"), "{said}");
    assert!(!out.exists());
}

#[test]
fn a_list_shows_the_whole_declaration() {
    let said = text(&succeed(program().arg("--list")));
    for text in [
        "E+  trainer w4a16",
        "calm:",
        "stress:",
        "trainer.learning_rate is chosen from",
        "70 %",
    ] {
        assert!(said.contains(text), "{text}: {said}");
    }
}

#[test]
fn an_arm_that_not_every_series_has_is_run_where_it_is() {
    let said = text(&succeed(
        program()
            .args(["--arms", "G", "--dry-run", "--out"])
            .arg(folder("some_series").join("none")),
    ));
    assert!(
        said.contains("calm, seed 1, arm G") && !said.contains("rollout_old"),
        "{said}"
    );
    let said = fail(
        program()
            .args(["--series", "scaling", "--arms", "G", "--dry-run", "--out"])
            .arg(folder("no_series").join("none")),
        1,
    );
    assert!(said.contains("--arms G: none of the series has them"), "{said}");
}

#[test]
fn files_that_do_not_belong_together_are_no_results() {
    let out = folder("mixed");
    // Quotes, a space, and a letter of two characters: settings hold the folder's name.
    let out = out.join("a \"b\" 'c' e\u{301}");
    succeed(&mut tiny(&out, &["--arms", "A,B"]));
    let found = results(&out);
    assert!(
        found.command.contains(" --set 'grpo.steps=8'") && !found.command.contains("precision"),
        "{}",
        found.command
    );
    let report = || {
        let mut report = program();
        report.args(["report", "--quick", "--out"]).arg(&out);
        report
    };
    let file = |arm: &str| out.join("quick/seed_1").join(arm).join("arm.json");
    let (one, other) = (fs::read(file("A")).unwrap(), fs::read_to_string(file("B")).unwrap());
    fs::write(file("A"), &other).unwrap();
    let said = fail(&mut report(), 1);
    assert!(
        said.contains("A/arm.json: the file of arm B, where that of arm A is expected"),
        "{said}"
    );
    fs::write(file("A"), one).unwrap();
    let rate = "\"trainer.learning_rate\":\"0.001\"";
    assert!(other.contains(rate));
    fs::write(file("B"), other.replace(rate, "\"trainer.learning_rate\":\"0.9\"")).unwrap();
    let said = fail(&mut report(), 1);
    assert!(
        said.contains("were made with other settings: trainer.learning_rate was 0.001 and 0.9. Move one of them away"),
        "{said}"
    );
    assert_eq!(results(&out), found, "what was there stays");
    fs::write(file("B"), &other).unwrap();
    succeed(&mut report());

    // A run refuses what a report would, before it does anything.
    fs::create_dir(file("C").parent().unwrap()).unwrap();
    fs::write(file("C"), &other).unwrap();
    let said = fail(&mut tiny(&out, &["--arms", "C"]), 1);
    assert!(
        said.contains("C/arm.json: the file of arm B, where that of arm C is expected"),
        "{said}"
    );
    fs::write(file("B"), other.replace(rate, &format!("\"trainer.new\":\"1\",{rate}"))).unwrap();
    let said = fail(&mut tiny(&out, &["--arms", "B"]), 1);
    assert!(said.contains("trainer.new was 1, and is not a setting"), "{said}");
    fs::remove_dir_all(file("C").parent().unwrap()).unwrap();
    fs::write(file("B"), other).unwrap();
    let gaps = out.join("quick/seed_1/gaps.json");
    let measured = fs::read_to_string(&gaps).unwrap();
    assert!(measured.contains(rate));
    fs::write(&gaps, measured.replace(rate, "\"trainer.learning_rate\":\"0.9\"")).unwrap();
    let said = fail(&mut report(), 1);
    assert!(
        said.contains("gaps.json") && said.contains("trainer.learning_rate was 0.001 and 0.9"),
        "{said}"
    );
    fs::write(&gaps, measured).unwrap();

    // Another warm-up, another seed, other settings of other seeds.
    let other = fs::read_to_string(file("B")).unwrap();
    let steps = other.split("\"warmup_steps\":").nth(1).unwrap();
    let steps = &steps[..steps.find(',').unwrap()];
    let longer = other.replace(&format!("\"warmup_steps\":{steps}"), "\"warmup_steps\":999");
    fs::write(file("B"), longer).unwrap();
    let said = fail(&mut report(), 1);
    assert!(
        said.contains("A/arm.json begins after") && said.contains("B/arm.json after 999"),
        "{said}"
    );
    // All that is there began with another warm-up than is there.
    let [arm, warm] = [file("A"), out.join("quick/seed_1/gaps.json")];
    let [of_arm, of_gaps] = [&arm, &warm].map(|file| fs::read_to_string(file).unwrap());
    for (file, text) in [(&arm, &of_arm), (&warm, &of_gaps)] {
        let longer = text.replace(&format!("\"warmup_steps\":{steps}"), "\"warmup_steps\":999");
        assert_ne!(&longer, text);
        fs::write(file, longer).unwrap();
    }
    let said = fail(&mut tiny(&out, &["--arms", "C", "--dry-run"]), 1);
    let expected = format!("A/arm.json begins after 999 steps of a warm-up, and {}", out.display());
    assert!(
        said.contains(&expected) && said.contains(&format!("took {steps}: another one")),
        "{said}"
    );
    fs::write(arm, of_arm).unwrap();
    fs::write(warm, of_gaps).unwrap();
    let mut answers: ArmFile = serde_json::from_str(&other).unwrap();
    answers
        .run
        .start
        .high
        .0
        .iter_mut()
        .step_by(4)
        .for_each(|right| *right = !*right);
    files::write(&file("B"), &answers).unwrap();
    let said = fail(&mut report(), 1);
    assert!(said.contains("answer 64 of 256 problems differently"), "{said}");
    fs::write(file("B"), other).unwrap();
    let [seed_1, seed_2] = [1, 2].map(|seed| out.join(format!("quick/seed_{seed}")));
    copy(&seed_1, &seed_2);
    let said = fail(&mut report(), 1);
    assert!(
        said.contains("seed_2/A/arm.json: made with seed 1, where that of seed 2 is expected"),
        "{said}"
    );
    fs::remove_dir_all(seed_2).unwrap();
    let options = ["--arms", "A", "--seeds", "3-3", "--set", "trainer.learning_rate=2e-3"];
    let said = fail(&mut tiny(&out, &options), 1);
    assert!(
        said.contains("quick was made with other settings: trainer.learning_rate was 0.001, and is 0.002"),
        "{said}"
    );
    assert!(!out.join("quick/seed_3").exists() && !out.join("warmups/quick/seed_3").exists());

    // The short run in the folder of a full one.
    let said = fail(program().args(["report", "--out"]).arg(&out), 1);
    assert!(
        said.contains("warmups/quick is of a short run; use another --out"),
        "{said}"
    );

    // A policy of another arm is not this arm's.
    let of = |arm: &str| file(arm).parent().unwrap().join("checkpoints");
    fs::remove_file(file("B")).unwrap();
    fs::remove_dir_all(of("B")).unwrap();
    copy(&of("A"), &of("B"));
    let said = fail(&mut tiny(&out, &["--arms", "A,B"]), 1);
    assert!(
        said.contains("B/config.toml is not the one that this run was made with"),
        "{said}"
    );
    assert!(!file("B").exists());
}

fn copy(from: &std::path::Path, to: &std::path::Path) {
    let copied = std::process::Command::new("cp").arg("-r").arg(from).arg(to).status();
    assert!(copied.unwrap().success());
}

/// Starts the arms A and E, and waits until A has taken some steps.
#[cfg(target_os = "linux")]
fn begin(out: &std::path::Path) -> std::process::Child {
    let child = tiny(out, &["--arms", "A,E", "--jobs", "1"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let run = out.join("quick/seed_1/A");
    wait_for("steps of arm A", || lines(&run) >= 5);
    child
}

#[cfg(target_os = "linux")]
fn undisturbed() -> Results {
    let out = folder("undisturbed");
    succeed(&mut tiny(&out, &["--arms", "A,E"]));
    results(&out)
}

#[cfg(target_os = "linux")]
#[test]
fn interruptions_and_crashes_change_no_number() {
    let whole = undisturbed();
    let again = |out: &std::path::Path| {
        succeed(&mut tiny(out, &["--arms", "A,E"]));
        assert_eq!(results(out), whole);
    };

    // A worker that is killed is recorded, the others are run.
    let out = folder("killed_worker");
    let mut child = begin(&out);
    let run = out.join("quick/seed_1/A");
    if let Some(worker) = worker(&child, &run) {
        send(worker, "KILL");
        assert_eq!(child.wait().unwrap().code(), Some(1));
        let file: ArmFile = files::read(&run.join("arm.json")).unwrap().unwrap();
        assert!(!file.complete);
        let seed = &results(&out).series[0].seeds[0];
        let stopped = seed.arms[0].stopped.as_deref().unwrap();
        assert!(stopped.contains("signal: 9") && stopped.contains("A.log"), "{stopped}");
        assert_eq!((seed.arms[1].arm.as_str(), &seed.arms[1].stopped), ("E", &None));
    } else {
        // It was done before it could be killed.
        child.wait().unwrap();
    }
    again(&out);

    // A worker alone that is told to stop is no success, and nothing is lost.
    let out = folder("stopped_worker");
    let mut child = begin(&out);
    if let Some(worker) = worker(&child, &out.join("quick/seed_1/A")) {
        send(worker, "TERM");
        let code = child.wait().unwrap().code();
        let left = text(&succeed(&mut tiny(&out, &["--arms", "A,E", "--dry-run"])));
        match left.starts_with("0 to run") {
            // It was past its last step.
            true => assert_eq!(code, Some(0)),
            false => assert_eq!((code, left.contains("arm A (goes on)")), (Some(1), true), "{left}"),
        }
    } else {
        child.wait().unwrap();
    }
    again(&out);

    // Ctrl-C, as kill sends it: to the one process. What goes on elsewhere needs no more than the last checkpoint.
    let out = folder("interrupted");
    let mut child = begin(&out);
    send(child.id(), "INT");
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let moved = folder("moved").join("elsewhere");
    fs::rename(&out, &moved).unwrap();
    let first = moved.join("quick/seed_1/A/checkpoints/step_0000");
    if first.exists() {
        fs::remove_dir_all(first).unwrap();
    }
    again(&moved);

    // All of it is gone at once: the workers notice.
    let out = folder("killed");
    let mut child = begin(&out);
    let worker = worker(&child, &out.join("quick/seed_1/A"));
    send(child.id(), "KILL");
    child.wait().unwrap();
    if let Some(worker) = worker {
        let status = format!("/proc/{worker}/status");
        wait_for("the worker to end", || !std::path::Path::new(&status).exists());
    }
    again(&out);
}

#[cfg(target_os = "linux")]
#[test]
fn an_arm_that_another_process_works_on_is_waited_for() {
    let whole = undisturbed();
    let out = folder("held");
    let mut killed = begin(&out);
    let run = out.join("quick/seed_1/A");
    let Some(worker) = worker(&killed, &run) else {
        // It was done before it could be held.
        killed.wait().unwrap();
        return;
    };
    // The worker is there, and holds its run, when its parent is gone.
    send(worker, "STOP");
    send(killed.id(), "KILL");
    killed.wait().unwrap();
    if lines(&run) >= 8 {
        // It was past its last step, and may hold the run no more.
        send(worker, "CONT");
        return;
    }
    let said = out.join("said");
    let mut again = tiny(&out, &["--arms", "A,E"])
        .stdout(Stdio::null())
        .stderr(fs::File::create(&said).unwrap())
        .spawn()
        .unwrap();
    let told = || fs::read_to_string(&said).unwrap();
    wait_for("what is said of the arm", || {
        told().contains("quick, seed 1, arm A: another process still works on its run")
    });
    // The others are not held up by it.
    wait_for("arm E", || out.join("quick/seed_1/E/arm.json").is_file());
    assert!(!run.join("arm.json").exists() && again.try_wait().unwrap().is_none());
    send(worker, "CONT");
    assert_eq!(again.wait().unwrap().code(), Some(0), "{}", told());
    assert_eq!(results(&out), whole);
    assert_eq!(told().matches("another process").count(), 1, "{}", told());
}

#[cfg(target_os = "linux")]
#[test]
fn an_arm_that_cannot_go_on_says_how_it_is_run_anew() {
    let out = folder("damaged_arm");
    let mut child = begin(&out);
    send(child.id(), "INT");
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let run = out.join("quick/seed_1/A");
    // In case that it was done before it could be interrupted.
    let _ = fs::remove_file(run.join("arm.json"));
    let [config, elsewhere] = [run.join("config.toml"), out.join("config.toml")];
    fs::rename(&config, &elsewhere).unwrap();
    let said = fail(&mut tiny(&out, &["--arms", "A"]), 1);
    assert!(said.contains("seed_1/A has checkpoints and no config.toml"), "{said}");
    fs::rename(&elsewhere, &config).unwrap();
    for checkpoint in fs::read_dir(run.join("checkpoints")).unwrap() {
        fs::write(checkpoint.unwrap().path().join("model.safetensors"), "x").unwrap();
    }
    let said = fail(&mut tiny(&out, &["--arms", "A"]), 1);
    let expected = format!(
        "{} has no whole checkpoint to go on from. Put it back as it was, or remove {}: the same command then runs it anew",
        run.display(),
        run.display()
    );
    assert!(said.contains(&expected) && !said.contains("--config"), "{said}");
    fs::remove_dir_all(&run).unwrap();
    succeed(&mut tiny(&out, &["--arms", "A"]));

    // A warm-up that is damaged is named before its arms start from it.
    let warmup = out.join("warmups/quick/seed_1");
    for checkpoint in fs::read_dir(warmup.join("checkpoints")).unwrap() {
        fs::write(checkpoint.unwrap().path().join("model.safetensors"), "x").unwrap();
    }
    let said = fail(&mut tiny(&out, &["--arms", "A,B", "--jobs", "2"]), 1);
    let expected = format!("or remove {}: the same command then runs it anew", warmup.display());
    assert!(said.contains(&expected) && !said.contains("--config"), "{said}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_warm_up_that_fails_takes_its_arms_with_it_and_nothing_else() {
    let out = folder("failed_warmup");
    // A file where the folder of a warm-up should be.
    fs::create_dir_all(out.join("warmups/quick")).unwrap();
    fs::write(out.join("warmups/quick/seed_1"), "").unwrap();
    let said = fail(&mut tiny(&out, &["--arms", "A", "--seeds", "1,2"]), 1);
    assert!(said.contains("failed: warm-up quick, seed 1: "), "{said}");
    assert!(
        said.contains("failed: quick, seed 1, arm A: what it starts from is not there"),
        "{said}"
    );
    let results = results(&out);
    let seeds: Vec<_> = results.series[0].seeds.iter().map(|seed| seed.seed).collect();
    assert_eq!(seeds, [2]);

    // The same where the arms of a seed should be.
    fs::write(out.join("quick/seed_3"), "").unwrap();
    let said = fail(&mut tiny(&out, &["--arms", "A", "--seeds", "2,3,4"]), 1);
    assert!(
        said.contains("failed: quick, seed 3, arm A: cannot make the folder"),
        "{said}"
    );
    assert!(said.contains("quick, seed 4, arm A: "), "{said}");
}

/// On the real model: what must hold of the gaps at the end of its warm-up.
#[test]
fn the_gaps_of_the_quick_run_are_in_order() {
    let out = folder("gaps");
    succeed(
        program()
            .args(["--quick", "--arms", "A", "--set", "grpo.steps=1", "--out"])
            .arg(&out),
    );
    let results = results(&out);
    let checks = checks(&results.series[0]).unwrap();
    let of_gaps: Vec<_> = checks
        .iter()
        .filter(|check| !check.says.starts_with("the aim"))
        .collect();
    assert_eq!(of_gaps.len(), 6);
    for check in of_gaps {
        assert_eq!(check.holds(), Some(true), "{}: {}", check.says, check.numbers());
    }
}
