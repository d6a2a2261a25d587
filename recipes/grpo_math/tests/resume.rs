//! A run that was stopped and resumed ends with the bits of one that never was.
mod tiny_run;
use grpo_math::{
    config::Config,
    metrics::Position,
    run::{Outcome, run},
    start::Start,
};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};
use tiny_run::{SETTINGS, checkpoint_file, command, folder, metrics, resume, send, succeed, text, wait_for_lines};

/// Starts a run and sends signals when `metrics.jsonl` has `lines` lines. The run may get a few steps further.
fn stop_after(command: &mut Command, run: &Path, lines: usize, signals: &[&str]) -> String {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for_lines(&child, run, lines);
    for signal in signals {
        send(&child, signal);
    }
    let output = child.wait_with_output().unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(130), "{said}");
    said
}

/// Presses Ctrl-C.
fn interrupt_after(command: &mut Command, run: &Path, lines: usize) -> String {
    stop_after(command, run, lines, &["INT"])
}

/// The run that the others are compared with; long enough to be interrupted in the middle.
const LONGER: &[&str] = &["warmup.max_steps=60", "grpo.steps=30", "checkpoint.keep=100"];

fn assert_same(one: &Path, other: &Path) {
    let (one, other) = (one.join("run"), other.join("run"));
    assert_eq!(metrics(&one), metrics(&other));
    for file in ["model.safetensors", "optimizer.safetensors"] {
        let bytes = |run| checkpoint_file(run, "step_0030", file);
        assert!(bytes(&one) == bytes(&other), "{file} differs");
    }
    let results = |run: &Path| {
        let text = fs::read_to_string(run.join("results.json")).unwrap();
        text[..text.find("\"machine\"").unwrap()].to_string()
    };
    assert_eq!(results(&one), results(&other));
}

#[test]
fn ctrl_c_saves_and_resuming_ends_with_the_same_bits() {
    let (whole, parts) = (folder("whole"), folder("parts"));
    succeed(&mut command(&whole, LONGER));
    let run = parts.join("run");
    // In the warm-up, then in GRPO beyond the end of several passes over the problems.
    let said = interrupt_after(&mut command(&parts, LONGER), &run, 20);
    assert!(
        said.contains("--resume") && said.contains(run.to_str().unwrap()),
        "{said}"
    );
    assert!(fs::read_to_string(run.join("report.html")).unwrap().contains("Stopped"));
    let in_warmup = fs::read_dir(run.join("checkpoints")).unwrap();
    let in_warmup = in_warmup
        .into_iter()
        .any(|entry| entry.unwrap().file_name().to_string_lossy().starts_with("warmup_"));
    assert!(in_warmup, "the first stop was in the warm-up:\n{said}");
    interrupt_after(&mut resume(&parts, &[]), &run, 61 + 8);
    interrupt_after(&mut resume(&parts, &[]), &run, 61 + 19);
    succeed(&mut resume(&parts, &[]));
    assert_same(&whole, &parts);
}

#[test]
fn a_run_stops_after_its_first_evaluation_and_within_its_last_table() {
    let (whole, parts) = (folder("table_whole"), folder("table_parts"));
    succeed(&mut command(&whole, &[]));
    let mut settings: Vec<String> = SETTINGS.iter().map(|setting| setting.to_string()).collect();
    settings.push(format!("run.directory={}", parts.display()));
    settings.push("run.name=run".into());
    let stop = |start: Start, at: usize| {
        let outcome = run(&start, &|position| position == Position::Grpo(at)).unwrap();
        assert!(matches!(outcome, Outcome::Stopped(position) if position == Position::Grpo(at)));
        assert!(!start.folder.results().exists(), "the run is not complete");
    };
    let path = parts.join("run");
    stop(Start::new(Config::load(None, &settings).unwrap()).unwrap(), 0);
    stop(Start::resume(&path, &[]).unwrap(), 6);
    succeed(&mut resume(&parts, &[]));
    let results = |folder: &Path| {
        let text = fs::read_to_string(folder.join("run/results.json")).unwrap();
        text[..text.find("\"machine\"").unwrap()].to_string()
    };
    assert_eq!(results(&whole), results(&parts));
    assert_eq!(metrics(&whole.join("run")), metrics(&path));
}

#[test]
fn a_killed_run_goes_on_from_its_last_checkpoint() {
    let (whole, killed) = (folder("not_killed"), folder("killed"));
    succeed(&mut command(&whole, LONGER));
    let run = killed.join("run");
    let mut child = command(&killed, LONGER)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_for_lines(&child, &run, 61 + 10);
    child.kill().unwrap();
    child.wait().unwrap();
    // A line cut short by the crash, and the newest checkpoint damaged.
    let torn = fs::read_to_string(run.join("metrics.jsonl")).unwrap() + "{\"stage\":\"grpo\",\"step\":";
    fs::write(run.join("metrics.jsonl"), torn).unwrap();
    let mut checkpoints: Vec<_> = fs::read_dir(run.join("checkpoints"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    checkpoints.retain(|path| path.file_name().unwrap().to_string_lossy().starts_with("step_"));
    checkpoints.sort();
    let newest = checkpoints.pop().unwrap();
    let model = newest.join("model.safetensors");
    let mut bytes = fs::read(&model).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&model, bytes).unwrap();

    let said = text(&succeed(&mut resume(&killed, &[])));
    let name = newest.file_name().unwrap().to_str().unwrap();
    assert!(
        said.contains(name) && said.contains("model.safetensors is not what was written"),
        "{said}"
    );
    assert_same(&whole, &killed);
}

#[test]
fn a_run_without_a_whole_checkpoint_says_so() {
    let folder = folder("no_checkpoint");
    succeed(&mut command(&folder, &["grpo.steps=1"]));
    for entry in fs::read_dir(folder.join("run/checkpoints")).unwrap() {
        fs::write(entry.unwrap().path().join("state.json"), "").unwrap();
    }
    let output = resume(&folder, &[]).output().unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("step_0001") && said.contains("step_0000") && said.contains("no whole checkpoint"),
        "{said}"
    );
}

#[test]
fn settings_changed_behind_a_runs_back_are_noticed() {
    let folder = folder("changed");
    succeed(&mut command(&folder, &["grpo.steps=1"]));
    let config = folder.join("run/config.toml");
    let changed = fs::read_to_string(&config)
        .unwrap()
        .replace("\nclip_high = 0.0\n", "\nclip_high = 0.3\n");
    fs::write(&config, changed).unwrap();
    let output = resume(&folder, &[]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output).contains("config.toml is not the one that this run was made with"),
        "{}",
        text(&output)
    );
}

#[test]
fn a_run_killed_before_its_second_checkpoint_ends_the_same() {
    let (whole, killed) = (folder("only_the_first_whole"), folder("only_the_first"));
    succeed(&mut command(&whole, LONGER));
    succeed(&mut command(&killed, LONGER));
    for entry in fs::read_dir(killed.join("run/checkpoints")).unwrap() {
        let path = entry.unwrap().path();
        if !path.ends_with("step_0000") {
            fs::remove_dir_all(path).unwrap();
        }
    }
    succeed(&mut resume(&killed, &[]));
    assert_same(&whole, &killed);
}

#[test]
fn fewer_steps_than_a_run_has_reached_are_refused() {
    let folder = folder("fewer_steps");
    succeed(&mut command(&folder, &[]));
    let output = resume(&folder, &["grpo.steps=3"]).output().unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("grpo.steps = 3: the run has reached step 6"), "{said}");
    assert!(
        fs::read_to_string(folder.join("run/config.toml"))
            .unwrap()
            .contains("steps = 6")
    );
}

/// Every file in a folder, with its bytes.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(files(&path)),
            false => drop(found.insert(path.clone(), fs::read(path).unwrap())),
        }
    }
    found
}

#[test]
fn a_damaged_history_is_refused_before_anything_is_changed() {
    let folder = folder("history");
    succeed(&mut command(&folder, &["grpo.steps=4"]));
    let path = folder.join("run/metrics.jsonl");
    let whole = fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = whole.split_inclusive('\n').collect();
    // 12 of the warm-up, 5 of GRPO.
    assert_eq!(lines.len(), 17);
    let without = |number: usize| [&lines[..number - 1], &lines[number..]].concat().concat();
    for (text, expected) in [
        (None, "cannot read".to_string()),
        (
            Some(String::new()),
            "line 1: expected step 1 of the warm-up, found the end of the file".into(),
        ),
        (
            Some(whole.replacen("\"step\":3,", "\"step\":,", 1)),
            "line 3: expected step 3 of the warm-up, found a damaged line".into(),
        ),
        (
            Some(whole.replacen("\"stage\":\"grpo\",\"step\":2", "\0", 1)),
            "line 15: expected step 2 of GRPO, found a damaged line".into(),
        ),
        (
            Some(without(5)),
            "line 5: expected step 5 of the warm-up, found step 6 of the warm-up".into(),
        ),
        (
            Some(without(13)),
            "line 13: expected step 0 of GRPO, found step 1 of GRPO".into(),
        ),
        (
            Some(without(17)),
            "line 17: expected step 4 of GRPO, found the end of the file".into(),
        ),
        (
            Some(whole.trim_end().into()),
            "line 17: expected step 4 of GRPO, found a line without its end".into(),
        ),
    ] {
        match &text {
            None => fs::remove_file(&path).unwrap(),
            Some(text) => fs::write(&path, text).unwrap(),
        }
        let before = files(&folder);
        let output = resume(&folder, &["grpo.steps=6"]).output().unwrap();
        let said = tiny_run::text(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        for part in [
            "metrics.jsonl",
            &expected,
            "Nothing was changed",
            "Put it back",
            "--config",
        ] {
            assert!(said.contains(part), "{part} is missing:\n{said}");
        }
        assert!(files(&folder) == before, "{expected}: the refusal changed something");
    }
    fs::write(&path, &whole).unwrap();
    succeed(&mut resume(&folder, &["grpo.steps=6"]));
}

#[test]
fn sigterm_and_sighup_save_like_ctrl_c() {
    let whole = folder("signals_whole");
    succeed(&mut command(&whole, LONGER));
    for (name, signals) in [
        ("term", &["TERM"][..]),
        // A terminal that closes hangs up by itself and by its shell.
        ("hup", &["HUP", "HUP"]),
        ("shutdown", &["TERM", "HUP"]),
    ] {
        let folder = folder(&format!("signals_{name}"));
        let run = folder.join("run");
        let said = stop_after(&mut command(&folder, LONGER), &run, 61 + 8, signals);
        assert!(said.contains("and saved. To go on"), "{said}");
        succeed(&mut resume(&folder, &[]));
        assert_same(&whole, &folder);
    }
}

#[test]
fn a_run_under_nohup_outlives_the_terminal() {
    let folder = folder("nohup");
    let inner = command(&folder, &["grpo.steps=60"]);
    let mut nohup = Command::new("sh");
    nohup
        .args(["-c", "trap '' HUP; exec \"$0\" \"$@\""])
        .arg(inner.get_program())
        .args(inner.get_args());
    let child = nohup.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for_lines(&child, &folder.join("run"), 15);
    send(&child, "HUP");
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
}

#[test]
fn a_run_killed_in_its_warm_up_goes_on_from_there() {
    let (whole, killed) = (folder("warm_whole"), folder("warm_killed"));
    let settings = [LONGER, &["checkpoint.every=10"]].concat();
    succeed(&mut command(&whole, &settings));
    let run = killed.join("run");
    let mut child = command(&killed, &settings)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_for_lines(&child, &run, 25);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(run.join("checkpoints/warmup_0020").is_dir());
    let said = text(&succeed(&mut resume(&killed, &[])));
    assert!(said.contains("in the warm-up, after step "), "{said}");
    assert_same(&whole, &killed);
    assert!(!run.join("checkpoints/warmup_0020").exists(), "the warm-up is over");
}

#[test]
fn one_process_at_a_time_works_on_a_run() {
    let folder = folder("two_processes");
    let run = folder.join("run");
    // With a checkpoint after the warm-up only.
    let endless = ["grpo.steps=100000", "eval.every=0", "checkpoint.every=0"];
    let mut child = command(&folder, &endless)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_for_lines(&child, &run, 15);
    let second = resume(&folder, &[]).output().unwrap();
    let said = text(&second);
    assert_eq!(second.status.code(), Some(1), "{said}");
    assert!(
        said.contains("another process is working on the run in") && said.contains(run.to_str().unwrap()),
        "{said}"
    );
    // Another run of the same name has a folder of its own.
    succeed(&mut command(&folder, &["grpo.steps=1"]));
    assert!(folder.join("run-2/results.json").is_file());

    let report = || {
        let mut report = Command::new(env!("CARGO_BIN_EXE_grpo_math"));
        succeed(report.arg("report").arg("--run").arg(&run));
        fs::read_to_string(run.join("report.html")).unwrap()
    };
    let page = report();
    assert!(
        page.contains("Running, after step") && !page.contains("Stopped"),
        "it is under way"
    );
    child.kill().unwrap();
    child.wait().unwrap();
    let page = report();
    assert!(
        page.contains("Stopped") && !page.contains("Running, "),
        "the lock went with the process"
    );
    succeed(&mut resume(&folder, &["grpo.steps=3"]));
}
