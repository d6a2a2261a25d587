//! Wrong requests: one clear line, no panic, nothing left behind.
mod tiny_run;
use std::{fs, process::Command};
use tiny_run::{command, folder, succeed, text};

fn grpo_math(arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_grpo_math"))
        .args(arguments)
        .output()
        .unwrap();
    (output.status.code(), text(&output))
}

fn refused(arguments: &[&str], said: &[&str]) {
    let (code, output) = grpo_math(arguments);
    assert_eq!(code, Some(1), "{arguments:?}: {output}");
    assert!(!output.contains("panicked"), "{output}");
    for part in said {
        assert!(output.contains(part), "{arguments:?} said:\n{output}\nwithout {part:?}");
    }
}

#[test]
fn wrong_settings_are_refused_with_the_key() {
    refused(
        &["--set", "grpo.step=5"],
        &["unknown setting grpo.step", "did you mean grpo.steps?"],
    );
    refused(&["--set", "grpo.steps=0.5"], &["grpo.steps = 0.5", "a whole number"]);
    refused(
        &["--precision", "int4"],
        &["rollout.precision = \"int4\"", "high, w4a16, w4a4, w4a4_rac, fp8"],
    );
    refused(&["--device", "cuda:0"], &["run.device = \"cuda:0\"", "cpu"]);
    refused(
        &["--config", "/nowhere/x.toml"],
        &["cannot read the configuration /nowhere/x.toml"],
    );
    refused(
        &["--set", "eval.problems=100000000"],
        &["asked for 100000000 different held-out problems of addition"],
    );
}

#[test]
fn a_file_with_a_mistake_names_itself() {
    let folder = folder("bad_config");
    let file = folder.join("mine.toml");
    fs::write(&file, "[grpo]\nsteps = 5\nlearning_rate = 1e-3\n").unwrap();
    let path = file.to_str().unwrap();
    refused(
        &["--config", path],
        &["grpo.learning_rate", "mine.toml", "did you mean trainer.learning_rate?"],
    );
    fs::write(&file, "[grpo\nsteps = 5\n").unwrap();
    refused(&["--config", path], &["mine.toml is not TOML", "line 1"]);
}

#[test]
fn folders_that_do_not_work_are_named() {
    let folder = folder("bad_folders");
    refused(
        &["--resume", folder.to_str().unwrap()],
        &["bad_folders is not the folder of a run"],
    );
    let file = folder.join("file");
    fs::write(&file, "").unwrap();
    let directory = format!("run.directory={}", file.join("runs").display());
    refused(
        &["--set", &directory],
        &["cannot make the folder", "--set run.directory=DIR"],
    );
    refused(
        &["gap", "--run", folder.to_str().unwrap()],
        &["is not the folder of a run"],
    );
}

#[test]
fn wrong_arguments_have_their_own_exit_code() {
    assert_eq!(grpo_math(&["--no-such-option"]).0, Some(2));
    assert_eq!(grpo_math(&["--resume", "x", "--seed", "1"]).0, Some(2));
}

#[test]
fn help_and_settings_can_be_read() {
    let (code, help) = grpo_math(&["--help"]);
    assert_eq!(code, Some(0));
    for part in ["--resume", "--set", "--print-config", "Examples:", "Exit code"] {
        assert!(help.contains(part), "{part}");
    }
    let (code, config) = grpo_math(&["--seed", "7", "--print-config"]);
    assert_eq!(code, Some(0));
    assert!(config.contains("\nseed = 7\n") && config.contains("# Everything random follows from it"));
}

#[test]
fn a_printed_configuration_can_be_used() {
    let folder = folder("printed");
    let output = succeed(command(&folder, &["grpo.steps=1"]).arg("--print-config"));
    let file = folder.join("mine.toml");
    fs::write(&file, output.stdout).unwrap();
    assert!(!folder.join("run").exists(), "printing starts nothing");
    let run = Command::new(env!("CARGO_BIN_EXE_grpo_math"))
        .arg("--config")
        .arg(&file)
        .output()
        .unwrap();
    assert!(run.status.success(), "{}", text(&run));
    assert!(folder.join("run/report.html").is_file());
}

#[test]
fn a_report_can_be_written_anew() {
    let folder = folder("report");
    succeed(&mut command(&folder, &["grpo.steps=2"]));
    let run = folder.join("run");
    let written = fs::read_to_string(run.join("report.html")).unwrap();
    fs::remove_file(run.join("report.html")).unwrap();
    fs::remove_dir_all(run.join("plots")).unwrap();
    let (code, said) = grpo_math(&["report", "--run", run.to_str().unwrap()]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(fs::read_to_string(run.join("report.html")).unwrap(), written);
    assert!(run.join("plots/reward.svg").is_file());
}
