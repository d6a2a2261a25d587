//! GRPO on the real model: scoring that does not see padding in any precision, a learner that trains the mixture of
//! experts through its quantization, and rollouts that replay.
use burn::{
    backend::{Autodiff, Flex},
    module::AutodiffModule,
    optim::Optimizer,
};
use burn_nvfp4::{Nvfp4, Precision, Rac};
use burn_quads::{
    grpo::{GrpoConfig, Learner, LossKind, LrSchedule, OptimizerConfig, RolloutBatch, SupervisedLearner},
    mismatch::{Decomposition, Mismatch, RouteFlips},
    modules::{moe::QuadsMoe, moe_config::QuadsMoeConfig},
    rollout::{FinishReason, RolloutEngine, SamplingParams},
    sync::sync,
    token_log_probs::{ScoreOptions, Scores, TokenRow, score},
};

type Inner = Nvfp4<Flex>;
type Trainer = Autodiff<Inner>;

const VOCAB: u32 = 24;

fn model(precision: Precision) -> QuadsMoe<Trainer> {
    QuadsMoeConfig::new(VOCAB as usize, 32, 2, 4, 2, 8, 4, 2, 32)
        .with_precision(precision)
        .init_seeded(3, &Default::default())
}

fn precisions() -> [Precision; 5] {
    [
        Precision::High,
        Precision::W4A16,
        Precision::W4A4,
        Precision::W4A4Rac(Rac::default()),
        Precision::Fp8,
    ]
}

fn row<'a>(prompt: &'a [u32], completion: &'a [u32]) -> TokenRow<'a> {
    TokenRow {
        prompt,
        completion,
        routing: None,
    }
}

/// Four groups of four completions of different lengths; the rollout's log-probs are those of `model`.
fn batch(model: &QuadsMoe<Inner>) -> RolloutBatch {
    let mut batch = RolloutBatch::default();
    let mut state = 1u32;
    let mut draw = move |limit: u32| {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        (state >> 16) % limit
    };
    for group in 0..4 {
        let prompt: Vec<u32> = (0..3 + group).map(|_| draw(VOCAB)).collect();
        for member in 0..4u32 {
            batch.prompts.push(prompt.clone());
            batch.completions.push((0..1 + draw(6)).map(|_| draw(VOCAB)).collect());
            batch.truncated.push(false);
            batch.group.push(group as usize);
            batch.rewards.push((member % 2) as f32);
        }
    }
    let scores = score_batch(model, &batch, true);
    batch.rollout_log_probs = scores.log_probs;
    batch.expert_ids = Some(scores.routing);
    batch
}

fn score_batch(model: &QuadsMoe<Inner>, batch: &RolloutBatch, record_routing: bool) -> Scores {
    let rows: Vec<_> = (0..batch.rows())
        .map(|index| row(&batch.prompts[index], &batch.completions[index]))
        .collect();
    let options = ScoreOptions {
        record_routing,
        ..ScoreOptions::default()
    };
    score(model, &rows, &options)
}

fn config(kind: LossKind) -> GrpoConfig {
    let mut config = GrpoConfig {
        group_size: 4,
        max_completion_length: 6,
        // With ε = 1 AdamW's first moves are nearly linear in the gradient, so that they show differences of it.
        optimizer: OptimizerConfig {
            schedule: LrSchedule::constant(0.5),
            epsilon: 1.0,
            max_grad_norm: None,
            ..OptimizerConfig::default()
        },
        ..GrpoConfig::default()
    };
    config.loss.kind = kind;
    config
}

fn values(model: &QuadsMoe<Trainer>) -> Vec<f32> {
    let experts = &model.layers[0].mlp.experts;
    let mut values = model.head_weight().into_data().to_vec().unwrap();
    for weight in [&experts.gate_up_proj, &experts.down_proj] {
        values.extend(weight.val().into_data().iter::<f32>());
    }
    for weight in [&model.layers[1].self_attn.q_proj.weight, &model.embed_tokens.weight] {
        values.extend(weight.val().into_data().iter::<f32>());
    }
    values
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn log_probs_do_not_depend_on_padding_in_any_precision() {
    for precision in precisions() {
        let trainer = model(Precision::W4A16);
        let (packed, _) = sync(&trainer, &precision, None).unwrap();
        let scored = trainer.valid().with_precision(precision.clone()).unwrap();
        for model in [&packed, &scored] {
            let short = row(&[1, 2, 3], &[4, 5, 6, 7]);
            let long = row(&[9, 8, 7, 6, 5, 4, 3, 2, 1], &[11, 12, 13, 14, 15, 16, 17, 18]);
            let alone = score(model, &[short], &ScoreOptions::default()).log_probs.concat();
            let padded = score(model, &[long, short, long], &ScoreOptions::default()).log_probs;
            // An outlier in the padding's neighbours would show here if a scale were shared between tokens.
            let worst = distance(&alone, &padded[1]);
            assert!(worst < 1e-5, "{precision}: {worst}");
        }
    }
}

#[test]
fn micro_batches_equal_the_whole_minibatch_through_the_quantized_model() {
    let start = model(Precision::W4A16);
    let (rollout, _) = sync(&start, &Precision::W4A4Rac(Rac::default()), None).unwrap();
    let batch = batch(&rollout);
    for kind in [LossKind::Grpo, LossKind::Dapo, LossKind::Gspo] {
        let updated = |micro_batch_rows| {
            let config = GrpoConfig {
                micro_batch_rows,
                ..config(kind)
            };
            let mut learner = Learner::new(start.clone(), config).unwrap();
            learner.step(&batch).unwrap();
            values(learner.model())
        };
        let whole = updated(None);
        assert!(distance(&whole, &values(&start)) > 1e-3, "{kind:?}: it moved");
        for micro in [1, 5] {
            let worst = distance(&updated(Some(micro)), &whole);
            assert!(worst < 1e-5, "{kind:?} {micro}: {worst}");
        }
    }
}

#[test]
fn the_gap_of_the_model_splits_into_its_parts() {
    let trainer = model(Precision::High);
    let rac = Precision::W4A4Rac(Rac::default());
    let (rollout, _) = sync(&trainer, &rac, None).unwrap();
    let batch = batch(&rollout);
    let scores = |precision: Precision| {
        let model = trainer.valid().with_precision(precision).unwrap();
        score_batch(&model, &batch, false).log_probs.concat()
    };
    let (high, w4a16, w4a4_rac) = (scores(Precision::High), scores(Precision::W4A16), scores(rac));
    let parts = Decomposition::new(&high, &w4a16, &w4a4_rac, &batch.rollout_log_probs.concat());
    let metrics = parts.metrics();
    let mean = |name: &str| metrics.get(name).unwrap();
    // 4-bit weights without QAT cost far more than compensated activations, and the engine next to nothing.
    assert!(
        mean("mismatch/delta_weight/mean") > 4.0 * mean("mismatch/delta_act/mean"),
        "{metrics:?}"
    );
    assert!(mean("mismatch/delta_num/max") < 1e-5, "{metrics:?}");
    let whole = Mismatch::new(&high, &batch.rollout_log_probs.concat());
    assert!((mean("mismatch/delta/mean") - whole.mean).abs() < 1e-9);
    // A trainer that computes with the rollout's weights has no weight part at all.
    let qat = Decomposition::new(&w4a16, &w4a16, &w4a4_rac, &batch.rollout_log_probs.concat());
    assert!(qat.weight.iter().all(|&part| part == 0.0));
}

#[test]
fn replaying_the_rollouts_experts_leaves_no_flip() {
    let trainer = model(Precision::High);
    let (rollout, _) = sync(&trainer, &Precision::W4A4, None).unwrap();
    let mut batch = batch(&rollout);
    let live = Learner::new(trainer.clone(), config(LossKind::Dapo))
        .unwrap()
        .step(&batch)
        .unwrap();
    assert!(live.metrics.get("mismatch/route_flip_rate").unwrap() > 0.0);
    let replay = GrpoConfig {
        routing_replay: true,
        ..config(LossKind::Dapo)
    };
    let replayed = Learner::new(trainer.clone(), replay).unwrap().step(&batch).unwrap();
    assert_ne!(live.old_log_probs, replayed.old_log_probs);
    let rows: Vec<_> = (0..batch.rows()).map(|row| batch.row(row, true)).collect();
    let options = ScoreOptions {
        record_routing: true,
        ..ScoreOptions::default()
    };
    let scores = score(&trainer.valid(), &rows, &options);
    assert_eq!(scores.log_probs, replayed.old_log_probs);
    let flips = RouteFlips::new(&scores.routing, batch.expert_ids.as_ref().unwrap()).unwrap();
    assert!(flips.decisions > 0 && flips.flip_rate == 0.0, "{flips:?}");
    // The trainer's own choice, replayed, is its own forward pass.
    batch.expert_ids = Some(score_batch(&trainer.valid(), &batch, true).routing);
    let own = Learner::new(trainer, replay).unwrap().step(&batch).unwrap();
    assert_eq!(own.old_log_probs, live.old_log_probs);
}

#[test]
fn a_restored_learner_goes_on_bit_for_bit() {
    let start = model(Precision::W4A16);
    let (rollout, _) = sync(&start, &Precision::W4A4Rac(Rac::default()), None).unwrap();
    let batch = batch(&rollout);
    let config = GrpoConfig {
        minibatches: 4,
        ..config(LossKind::Dapo)
    };
    let mut uninterrupted = Learner::new(start, config).unwrap();
    uninterrupted.step(&batch).unwrap();
    let record = uninterrupted.optimizer().to_record();
    let mut resumed = Learner::new(uninterrupted.model().clone(), config).unwrap();
    resumed.restore(
        config.optimizer.init().load_record(record),
        uninterrupted.steps(),
        uninterrupted.skipped_steps(),
    );
    let expected = uninterrupted.step(&batch).unwrap();
    assert_eq!(resumed.step(&batch).unwrap().metrics, expected.metrics);
    assert_eq!(values(resumed.model()), values(uninterrupted.model()));
}

#[test]
fn supervised_learning_teaches_the_model_a_completion() {
    let config = OptimizerConfig {
        schedule: LrSchedule::constant(1e-2),
        ..OptimizerConfig::default()
    };
    let mut learner = SupervisedLearner::new(model(Precision::W4A16), config).unwrap();
    let rows = [row(&[1, 2], &[3, 4, 5]), row(&[6], &[7, 8])];
    let first = learner.step(&rows, 2).unwrap().loss;
    let last = (0..60).map(|_| learner.step(&rows, 2).unwrap().loss).last().unwrap();
    assert!(first > 2.0 && last < 0.1, "{first} {last}");
}

#[test]
fn the_whole_loop_raises_the_reward_with_packed_rollouts() {
    const EOS: u32 = 0;
    // After the prompt [p], say p + 1 and stop.
    let prompts: Vec<Vec<u32>> = (1..17).flat_map(|prompt| vec![vec![prompt]; 8]).collect();
    let answers: Vec<[u32; 2]> = (1..17).map(|prompt| [prompt + 1, EOS]).collect();
    let rac = Precision::W4A4Rac(Rac::default());
    let mut engine = RolloutEngine::new(32, 8).unwrap();

    let optimizer = OptimizerConfig {
        schedule: LrSchedule::constant(5e-3),
        ..OptimizerConfig::default()
    };
    let mut warm_up = SupervisedLearner::new(model(Precision::W4A16), optimizer).unwrap();
    let rows: Vec<_> = (0..16).map(|index| row(&prompts[8 * index], &answers[index])).collect();
    for _ in 0..14 {
        warm_up.step(&rows, 16).unwrap();
    }
    let config = GrpoConfig {
        group_size: 8,
        minibatches: 4,
        max_completion_length: 3,
        optimizer,
        ..GrpoConfig::default()
    };
    let mut learner = Learner::new(warm_up.into_model(), config).unwrap();

    let mut rewards = Vec::new();
    for step in 0..12 {
        let (rollout, _) = sync(learner.model(), &rac, None).unwrap();
        let params = SamplingParams {
            temperature: 1.0,
            max_new_tokens: 3,
            eos_token_ids: vec![EOS],
            seed: step,
            record_routing: true,
        };
        let mut batch = RolloutBatch::default();
        let mut expert_ids = Vec::new();
        for completion in engine.generate(&rollout, &prompts, &params).unwrap() {
            let group = completion.prompt / 8;
            batch.prompts.push(prompts[completion.prompt].clone());
            batch.truncated.push(completion.finish == FinishReason::Length);
            batch.rewards.push((completion.tokens == answers[group]) as u8 as f32);
            batch.group.push(group);
            batch.completions.push(completion.tokens);
            batch.rollout_log_probs.push(completion.log_probs);
            expert_ids.push(completion.expert_ids.unwrap());
        }
        batch.expert_ids = Some(expert_ids);
        let output = learner.step(&batch).unwrap();
        // The gap that QUADS leaves.
        assert!(output.mismatch.mean < 0.05, "step {step}: {:?}", output.mismatch);
        rewards.push(output.metrics.get("reward/mean").unwrap());
    }
    assert!((0.05..0.7).contains(&rewards[0]), "a middling start: {rewards:?}");
    assert!(rewards[11] > rewards[0] + 0.25, "{rewards:?}");
}
