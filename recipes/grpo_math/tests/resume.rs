//! A run that was stopped and resumed ends with the bits of one that never was.
mod tiny_run;
use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};
use tiny_run::{checkpoint_file, command, folder, metrics, resume, succeed, text};

/// Starts a run and presses Ctrl-C when `metrics.jsonl` has `lines` lines. The run may get a few steps further.
fn interrupt_after(command: &mut Command, run: &Path, lines: usize) -> String {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for_lines(&child, run, lines);
    let killed = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status()
        .unwrap();
    assert!(killed.success());
    let output = child.wait_with_output().unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(130), "{said}");
    said
}

fn wait_for_lines(child: &Child, run: &Path, lines: usize) {
    let started = Instant::now();
    let written = || {
        fs::read_to_string(run.join("metrics.jsonl"))
            .unwrap_or_default()
            .lines()
            .count()
    };
    while written() < lines {
        assert!(
            started.elapsed() < Duration::from_secs(120),
            "process {} wrote {} lines",
            child.id(),
            written()
        );
        sleep(Duration::from_millis(2));
    }
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
        said.contains("step_0001") && said.contains("step_0000") && said.contains("no checkpoint"),
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
