//! Wrong requests: one clear line, no panic, nothing left behind.
mod tiny_run;
use std::{fs, process::Command};
use tiny_run::{command, folder, resume, succeed, text};

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
        &["--set", "eval.problems=1000000"],
        &[
            "eval.problems = 1000000 (from --set): expected at most 12",
            "all held-out problems of addition",
        ],
    );
    refused(
        &["--seed", "18446744073709551615"],
        &[
            "run.seed = 18446744073709551615",
            "a whole number",
            "at most 9223372036854775807",
        ],
    );
    refused(
        &["--set", "trainer.learning_rate=1e300"],
        &["trainer.learning_rate = 1e300", "that f32 can hold"],
    );
}

#[test]
fn printing_settings_checks_them_too() {
    for setting in [
        "rollout.temperature=0",
        "grpo.minibatches=7",
        "grpo.clip_low=2",
        "eval.problems=900000",
    ] {
        let key = setting.split('=').next().unwrap();
        refused(&["--print-config", "--set", setting], &[key, "(from --set): expected"]);
    }
}

#[test]
fn the_settings_of_a_run_can_be_printed() {
    let folder = folder("print_of_a_run");
    succeed(&mut command(&folder, &["grpo.steps=1", "run.seed=5"]));
    let written = fs::read_to_string(folder.join("run/config.toml")).unwrap();
    let output = succeed(resume(&folder, &[]).arg("--print-config"));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), written);
    let output = succeed(resume(&folder, &["grpo.steps=3"]).arg("--print-config"));
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        written.replace("\nsteps = 1\n", "\nsteps = 3\n")
    );
    assert_eq!(fs::read_to_string(folder.join("run/config.toml")).unwrap(), written);
    let refusal = resume(&folder, &["run.seed=6"]).arg("--print-config").output().unwrap();
    assert_eq!(refusal.status.code(), Some(1));
}

#[cfg(unix)]
#[test]
fn a_current_folder_that_is_gone_is_named() {
    let folder = folder("gone");
    for arguments in ["--print-config", "", "report --run x"] {
        let script = format!("mkdir here && cd here && rmdir ../here && exec \"$0\" {arguments}");
        let output = Command::new("sh")
            .args(["-c", &script, env!("CARGO_BIN_EXE_grpo_math")])
            .current_dir(&folder)
            .output()
            .unwrap();
        let said = text(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(
            said.contains("error: the current folder cannot be used") && !said.contains("panicked"),
            "{said}"
        );
    }
}

#[test]
fn a_run_without_its_metrics_or_checkpoints_says_so() {
    let folder = folder("parts_missing");
    succeed(&mut command(&folder, &["grpo.steps=1"]));
    let run = folder.join("run");
    let path = run.to_str().unwrap();
    refused(
        &["gap", "--run", path, "--step", "7"],
        &["there is no checkpoint", "step_0007: the run has step_0000, step_0001"],
    );
    refused(
        &["gap", "--run", path, "--completions", "5000"],
        &[
            "error: --completions 5000: expected at most ",
            "all held-out problems of addition",
        ],
    );
    let damaged = run.join("checkpoints/step_0001/model.safetensors");
    fs::write(&damaged, "x").unwrap();
    refused(
        &["gap", "--run", path, "--step", "1"],
        &[
            "cannot use the checkpoint",
            "step_0001: model.safetensors is not what was written",
        ],
    );
    fs::remove_dir_all(run.join("checkpoints")).unwrap();
    refused(&["gap", "--run", path], &["step_0000: the run has none"]);
    refused(
        &["--resume", path],
        &["has no whole checkpoint to go on from", "start a new run with --config"],
    );
    fs::remove_file(run.join("metrics.jsonl")).unwrap();
    refused(
        &["report", "--run", path],
        &["metrics.jsonl is missing: without it there is nothing to report"],
    );
}

#[test]
fn a_report_of_absurd_numbers_ends() {
    let folder = folder("absurd");
    succeed(&mut command(&folder, &["grpo.steps=3"]));
    let run = folder.join("run");
    let path = run.join("metrics.jsonl");
    let whole = fs::read_to_string(&path).unwrap();
    let reward = whole.lines().last().unwrap().split("\"reward/mean\":").nth(1).unwrap();
    let reward = reward.split(',').next().unwrap();
    for value in ["1e308", "-1e308", "1e-320", "1e39"] {
        let of = |name: &str| format!("\"{name}\":{value},\"x\":");
        let absurd = whole
            .replace(
                &format!("\"reward/mean\":{reward}"),
                &format!("\"reward/mean\":{value}"),
            )
            .replace("\"actor/grad_norm\":", &of("actor/grad_norm"))
            .replace("\"eval/pass@1\":", &of("eval/pass@1"));
        assert_ne!(absurd, whole);
        fs::write(&path, absurd).unwrap();
        let (code, said) = grpo_math(&["report", "--run", run.to_str().unwrap()]);
        assert_eq!(code, Some(0), "{said}");
        let page = fs::read_to_string(run.join("report.html")).unwrap();
        assert!(!page.contains("NaN") && !page.contains("inf\""), "{value}");
    }
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
    let (code, said) = grpo_math(&["gap", "--run", "x", "--completions", "0"]);
    assert_eq!(code, Some(2));
    assert!(said.contains("--completions") && said.contains("1..=1000000"), "{said}");
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
