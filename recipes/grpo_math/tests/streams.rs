//! A run is not lost to whoever reads its lines, and a full disk ends it with the name of the file.
#![cfg(unix)]
mod tiny_run;

use std::{
    fs::{self, OpenOptions},
    path::Path,
    process::{Command, Stdio},
};
use tiny_run::{checkpoint_file, command, folder, metrics, resume, send, succeed, text, wait_for_lines};

fn full_disk() -> Stdio {
    OpenOptions::new().write(true).open("/dev/full").unwrap().into()
}

/// A pipe that nobody reads from.
fn closed_pipe() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

fn assert_whole(run: &Path, expected: &str) {
    assert_eq!(metrics(run), expected);
    assert!(run.join("results.json").is_file());
    assert!(
        fs::read_to_string(run.join("report.html"))
            .unwrap()
            .contains("Complete")
    );
    assert!(!checkpoint_file(run, "step_0006", "model.safetensors").is_empty());
}

#[test]
fn a_run_survives_readers_that_go_away_and_a_full_disk_behind_them() {
    let read = folder("streams_read");
    succeed(&mut command(&read, &[]));
    let expected = metrics(&read.join("run"));
    type Stream = fn() -> Stdio;
    let streams: [(&str, Stream, Stream); 4] = [
        ("no_reader", closed_pipe, closed_pipe),
        ("no_reader_of_errors", Stdio::null, closed_pipe),
        ("full", full_disk, full_disk),
        ("full_and_no_reader", full_disk, closed_pipe),
    ];
    for (name, out, err) in streams {
        let folder = folder(&format!("streams_{name}"));
        let status = command(&folder, &[])
            .arg("--verbose")
            .env("RUST_LOG", "trace")
            .stdout(out())
            .stderr(err())
            .status()
            .unwrap();
        assert_eq!(status.code(), Some(0), "{name}");
        assert_whole(&folder.join("run"), &expected);
    }
}

#[test]
fn a_run_without_readers_still_saves_when_it_is_stopped() {
    let folder = folder("streams_stopped");
    let run = folder.join("run");
    let mut child = command(&folder, &["grpo.steps=2000", "checkpoint.every=0", "eval.every=0"])
        .stdout(closed_pipe())
        .stderr(closed_pipe())
        .spawn()
        .unwrap();
    wait_for_lines(&child, &run, 15);
    send(&child, "INT");
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(fs::read_to_string(run.join("report.html")).unwrap().contains("Stopped"));
    // A warning of a warm-up below its target, and every line of progress, went nowhere.
    assert!(fs::read_dir(run.join("checkpoints")).unwrap().count() >= 2);
}

#[test]
fn what_a_command_was_asked_to_print_is_not_lost_silently() {
    let folder = folder("streams_commands");
    succeed(&mut command(&folder, &["grpo.steps=1"]));
    let run = folder.join("run");
    let run = run.to_str().unwrap();
    for arguments in [
        &["--print-config"][..],
        &["report", "--run", run],
        &["gap", "--run", run, "--completions", "4"],
        &["gap", "--run", run, "--completions", "4", "--json"],
    ] {
        let with = |out: Stdio| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_grpo_math"));
            command
                .args(arguments)
                .stdout(out)
                .stderr(Stdio::piped())
                .output()
                .unwrap()
        };
        let closed = with(closed_pipe());
        assert_eq!(
            (closed.status.code(), text(&closed).as_str()),
            (Some(0), ""),
            "{arguments:?}"
        );
        let full = with(full_disk());
        assert_eq!(full.status.code(), Some(1), "{arguments:?}");
        let said = text(&full);
        assert!(
            said.contains("error: cannot write to standard output: No space left"),
            "{said}"
        );
        assert!(!said.contains("panicked"), "{said}");
    }
}

/// Runs a command that can write no file beyond some blocks of 512 bytes: as on a full disk, `write` fails.
fn limited(command: &Command, blocks: usize) -> Command {
    let mut limited = Command::new("sh");
    limited
        .args(["-c", "trap '' XFSZ; ulimit -f \"$0\"; exec \"$@\""])
        .arg(blocks.to_string())
        .arg(command.get_program())
        .args(command.get_args());
    limited
}

#[test]
fn a_checkpoint_that_cannot_be_written_ends_the_run_and_leaves_the_last_one() {
    let (whole, full) = (folder("disk_whole"), folder("disk_checkpoint"));
    succeed(&mut command(&whole, &[]));
    succeed(&mut command(&full, &["grpo.steps=3"]));
    let run = full.join("run");
    let size = checkpoint_file(&run, "step_0003", "model.safetensors").len();
    let output = limited(&resume(&full, &["grpo.steps=6"]), size / 512 / 2)
        .output()
        .unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    for part in [
        "cannot save the checkpoint",
        "step_0004",
        "model.safetensors",
        "File too large",
        "--resume",
    ] {
        assert!(said.contains(part), "{part} is missing:\n{said}");
    }
    assert!(!said.contains("panicked"), "{said}");
    let left: Vec<_> = fs::read_dir(run.join("checkpoints"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !name.starts_with("step_"))
        .collect();
    assert_eq!(left, Vec::<String>::new(), "nothing half written stays");
    // There is room again.
    succeed(&mut resume(&full, &[]));
    assert_eq!(metrics(&run), metrics(&whole.join("run")));
    let weights = |folder: &Path| checkpoint_file(&folder.join("run"), "step_0006", "model.safetensors");
    assert!(weights(&full) == weights(&whole));
}

#[test]
fn metrics_that_cannot_be_written_end_the_run_and_leave_the_last_checkpoint() {
    let (whole, full) = (folder("disk_metrics_whole"), folder("disk_metrics"));
    let long = &["grpo.steps=400", "checkpoint.every=50", "eval.every=0"];
    succeed(&mut command(&whole, long));
    let size = fs::metadata(whole.join("run/metrics.jsonl")).unwrap().len() as usize;
    let run = full.join("run");
    let output = limited(&command(&full, long), size / 512 / 2).output().unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    for part in ["cannot write", "metrics.jsonl", "File too large", "--resume"] {
        assert!(said.contains(part), "{part} is missing:\n{said}");
    }
    assert!(run.join("checkpoints/step_0150").is_dir(), "{said}");
    let written = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    assert!(!written.ends_with('\n'), "the last line is torn");
    succeed(&mut resume(&full, &[]));
    assert_eq!(metrics(&run), metrics(&whole.join("run")));
}
