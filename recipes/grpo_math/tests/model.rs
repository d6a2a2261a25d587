//! `--model DIR --data FILE`: a Hugging Face folder is trained on problems in free text, and handed back as one.
mod tiny_run;
use burn::backend::Flex;
use burn_nvfp4::Nvfp4;
use burn_quads::checkpoint::ModelFolder;
use std::{
    fs,
    ops::Range,
    path::{Path, PathBuf},
    process::Command,
};
use tiny_run::{
    TEXT_SETTINGS, checkpoint_file, folder, lines, metrics, resume, succeed, text, text_model, text_problems,
};

fn data(folder: &Path, name: &str, questions: Range<usize>) -> PathBuf {
    let path = folder.join(name);
    text_problems(&path, questions);
    path
}

fn command(folder: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_grpo_math"));
    let model = folder.join("model");
    text_model(&model);
    command.arg("--name").arg("run").arg("--model").arg(model);
    let directory = format!("run.directory={}", folder.display());
    let directory = [directory.as_str()];
    for setting in directory.iter().chain(TEXT_SETTINGS).chain(more) {
        command.arg("--set").arg(setting);
    }
    command
}

#[test]
fn a_model_is_trained_and_handed_back_in_its_own_form() {
    let folder = folder("model_trained");
    let (train, held_out) = (data(&folder, "train.jsonl", 0..20), data(&folder, "test.jsonl", 15..40));
    let said = text(&succeed(
        command(&folder, &[])
            .arg("--data")
            .arg(train)
            .arg("--held-out")
            .arg(held_out),
    ));
    let run = folder.join("run");
    // 5 of the training file's 20 are in the other one, of which 4 are evaluated on.
    assert!(said.contains("15 training problems, 4 held out"), "{said}");
    assert!(
        said.contains("5 training problems are left out: they are among the held-out ones"),
        "{said}"
    );
    assert!(
        said.contains("the first 4 of 25 held-out problems are evaluated on"),
        "{said}"
    );
    assert!(said.contains("sampled (pass@4)"), "{said}");
    let exported = run.join("model-2");
    assert!(said.contains(exported.to_str().unwrap()), "{said}");

    let lines = lines(&run);
    assert_eq!(lines.len(), 3, "steps 0, 1, 2 and no warm-up");
    let number = |line: usize, name: &str| lines[line][name].as_f64().unwrap();
    assert!(
        number(1, "reward/mean") + number(2, "reward/mean") > 0.0,
        "nothing was right: nothing was learnt"
    );
    assert!(number(2, "eval/pass@4") >= number(2, "eval/pass@1"));

    let parameters = |path: &Path| {
        let folder = ModelFolder::open(path).unwrap();
        let model = folder.load::<Nvfp4<Flex>>(&Default::default(), |_| {}).unwrap();
        (
            folder,
            model.embed_tokens.weight.val().into_data(),
            model.norm.gamma.val().into_data(),
        )
    };
    let (before, embedding_before, _) = parameters(&folder.join("model"));
    let (after, embedding_after, norm_after) = parameters(&exported);
    assert_ne!(embedding_before, embedding_after, "it has learnt");
    assert_eq!(after.config_text(), before.config_text());
    let types = |folder: &ModelFolder| -> Vec<_> {
        let tensors = folder.files().tensors();
        tensors
            .map(|tensor| (tensor.name().to_string(), tensor.dtype()))
            .collect()
    };
    assert_eq!(types(&after), types(&before));
    for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        let read = |folder: &Path| fs::read(folder.join(file)).unwrap();
        assert_eq!(read(&exported), read(&folder.join("model")), "{file}");
    }
    // A checkpoint is such a folder as well, in f32.
    let (_, embedding, norm) = parameters(&run.join("checkpoints/step_0002"));
    assert_eq!((embedding, norm), (embedding_after, norm_after));
    assert!(run.join("checkpoints/step_0002/tokenizer.json").exists());
}

#[test]
fn a_prolonged_run_ends_with_the_bits_of_a_longer_one() {
    let (short, long) = (folder("model_short"), folder("model_long"));
    let run = |folder: &Path, more: &[&str]| {
        let train = data(folder, "train.jsonl", 0..20);
        succeed(command(folder, more).arg("--data").arg(train));
    };
    run(&short, &[]);
    succeed(&mut resume(&short, &["grpo.steps=4"]));
    run(&long, &["grpo.steps=4"]);
    let (short, long) = (short.join("run"), long.join("run"));
    assert!(metrics(&short) == metrics(&long), "metrics.jsonl differs");
    for file in ["model.safetensors", "optimizer.safetensors"] {
        assert!(
            checkpoint_file(&short, "step_0004", file) == checkpoint_file(&long, "step_0004", file),
            "{file}"
        );
    }
    let exported = |run: &Path| fs::read(run.join("model-4/model.safetensors")).unwrap();
    assert!(exported(&short) == exported(&long));

    // Other problems, another chat template, another model are another run.
    let folder = short.parent().unwrap();
    let refused = |file: &Path, from: &str, to: &str| {
        let before = fs::read_to_string(file).unwrap();
        assert!(before.contains(from), "{}", file.display());
        fs::write(file, before.replace(from, to)).unwrap();
        let output = resume(folder, &["grpo.steps=5"]).output().unwrap();
        assert!(!output.status.success());
        let said = text(&output);
        assert!(
            said.contains("train.jsonl: the problems have changed since the run began"),
            "{said}"
        );
        fs::write(file, before).unwrap();
    };
    refused(&folder.join("train.jsonl"), "letter 3?", "letter three?");
    let template = "set content = message.content %}";
    let other = "set content = message.content + '!' %}";
    refused(&folder.join("model/tokenizer_config.json"), template, other);
    refused(&folder.join("model/generation_config.json"), "127", "126");
    refused(
        &folder.join("model/config.json"),
        "\"rms_norm_eps\": 1e-06",
        "\"rms_norm_eps\": 1e-05",
    );
    fs::rename(folder.join("train.jsonl"), folder.join("moved.jsonl")).unwrap();
    let output = resume(folder, &["grpo.steps=5"]).output().unwrap();
    let said = text(&output);
    assert!(
        !output.status.success() && said.contains("train.jsonl: No such file"),
        "{said}"
    );
}

#[test]
fn what_cannot_be_trained_is_refused_by_name() {
    let folder = folder("model_refused");
    let train = data(&folder, "train.jsonl", 0..20);
    let refused = |command: &mut Command| {
        let output = command.output().unwrap();
        assert!(!output.status.success());
        assert!(!folder.join("run").exists(), "nothing is left behind");
        text(&output)
    };
    let with = |more: &[&str]| {
        let mut command = command(&folder, more);
        command.arg("--data").arg(&train);
        refused(&mut command)
    };
    let said = with(&["data.max_prompt_tokens=1"]);
    assert!(said.contains("train.jsonl: no problem is left to train on"), "{said}");
    assert!(said.contains("data.max_prompt_tokens = 1"), "{said}");
    let said = with(&["rollout.max_new_tokens=60000"]);
    assert!(
        said.contains("max_position_embeddings") && said.contains("rollout.max_new_tokens"),
        "{said}"
    );
    let said = with(&["data.prompt=hello"]);
    assert!(said.contains("data.prompt") && said.contains("{question}"), "{said}");
    let said = with(&["data.answer_field=result"]);
    assert!(said.contains("train.jsonl, line 1: no field result"), "{said}");
    let said = with(&["eval.pass_at=9"]);
    assert!(said.contains("eval.pass_at"), "{said}");

    fs::remove_file(folder.join("model/tokenizer.json")).unwrap();
    let mut without_tokenizer = Command::new(env!("CARGO_BIN_EXE_grpo_math"));
    without_tokenizer.args([
        "--set",
        &format!("run.directory={}", folder.display()),
        "--name",
        "run",
        "--model",
    ]);
    without_tokenizer.arg(folder.join("model")).arg("--data").arg(&train);
    let said = refused(&mut without_tokenizer);
    assert!(said.contains("tokenizer.json"), "{said}");
    let mut without_model = Command::new(env!("CARGO_BIN_EXE_grpo_math"));
    let said = refused(without_model.arg("--data").arg(&train));
    assert!(said.contains("model.folder"), "{said}");
    let mut without_data = Command::new(env!("CARGO_BIN_EXE_grpo_math"));
    let said = refused(without_data.arg("--model").arg(folder.join("model")));
    assert!(said.contains("--data"), "{said}");
}
