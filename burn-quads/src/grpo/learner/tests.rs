use burn::{
    backend::{Autodiff, Flex},
    optim::{GradientsParams, Optimizer},
    tensor::activation::log_softmax,
};

use super::*;
use crate::{
    grpo::{
        Correction, CorrectionMode, LossConfig, LrSchedule, OptimizerConfig, Overlong, ScaleRewards,
        test_model::{TinyLm, VOCAB, batch},
    },
    token_log_probs::{CompletionRows, RowRouting, TokenRow},
};

type B = Autodiff<Flex>;
type TinyLearner = Learner<B, TinyLm<B>>;

const KINDS: [LossKind; 6] = [
    LossKind::Grpo,
    LossKind::Bnpo,
    LossKind::DrGrpo,
    LossKind::Dapo,
    LossKind::Cispo,
    LossKind::Gspo,
];

/// With ε = 1 a first move of AdamW is g / (|g| + 1): close to linear, so that it shows differences of gradients.
fn config(kind: LossKind) -> GrpoConfig {
    GrpoConfig {
        group_size: 4,
        loss: LossConfig::new(kind),
        max_completion_length: 5,
        optimizer: OptimizerConfig {
            schedule: LrSchedule::constant(0.5),
            epsilon: 1.0,
            max_grad_norm: None,
            max_skipped_steps: 2,
            ..OptimizerConfig::default()
        },
        ..GrpoConfig::default()
    }
}

fn learner(config: GrpoConfig) -> TinyLearner {
    Learner::new(TinyLm::new(1), config).unwrap()
}

fn bits(learner: &TinyLearner) -> Vec<u32> {
    learner.model().values().into_iter().map(f32::to_bits).collect()
}

fn distance(a: &TinyLearner, b: &TinyLearner) -> f32 {
    let pairs = a.model().values().into_iter().zip(b.model().values());
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn metric(output: &StepOutput, name: &str) -> f64 {
    output.metrics.get(name).unwrap_or_else(|| panic!("no metric {name}"))
}

#[test]
fn a_step_equals_plain_autodiff_over_all_rows() {
    let sources = [OldLogProbs::Trainer, OldLogProbs::Rollout];
    for (kind, old_log_probs) in KINDS.into_iter().flat_map(|kind| sources.map(|source| (kind, source))) {
        let config = GrpoConfig {
            temperature: 0.7,
            old_log_probs,
            ..config(kind)
        };
        let mut batch = batch(3);
        // A group without variance, which the learner does not compute.
        batch.rewards[4..8].fill(0.5);
        let mut learner = learner(config);
        let output = learner.step(&batch).unwrap();

        let model = TinyLm::<B>::new(1);
        let rows = (0..batch.rows()).map(|row| batch.row(row, false)).collect::<Vec<_>>();
        let layout = CompletionRows::new(&rows);
        let device = Default::default();
        let hidden = layout.predicting_states(model.hidden_states(&layout.input(&device)).hidden);
        let targets = layout.targets(&device).unsqueeze_dim::<2>(1);
        let log_probs = log_softmax(hidden.matmul(model.head_weight()) / 0.7, 1)
            .gather(1, targets)
            .squeeze_dim::<1>(1);
        let values = log_probs.clone().into_data().to_vec::<f32>().unwrap();
        let rollout = batch.rollout_log_probs.concat();
        let loss_batch = LossBatch {
            lengths: layout.lengths(),
            mask: &vec![true; values.len()],
            advantages: &output.advantages,
            log_probs: &values,
            old_log_probs: (old_log_probs == OldLogProbs::Rollout).then_some(&rollout),
            reference_log_probs: None,
            rollout_log_probs: None,
            weights: None,
        };
        let loss = config.loss.evaluate(&loss_batch, &Normalizer::of(&loss_batch, 5));
        let gradients = GradientsParams::from_grads(loss.attach(log_probs).backward(), &model);
        let model = config.optimizer.init::<B, TinyLm<B>>().step(0.5, model, gradients);

        assert!((metric(&output, "actor/pg_loss") - loss.loss).abs() < 1e-5, "{kind:?}");
        let expected = Learner::new(model, config).unwrap();
        assert!(distance(&learner, &expected) < 1e-5, "{kind:?}");
        assert!(distance(&learner, &self::learner(config)) > 1e-3, "{kind:?}: it moved");
    }
}

#[test]
fn the_rollouts_log_probs_are_the_old_ones_where_asked_and_the_gap_is_measured_as_before() {
    for minibatches in [1, 2] {
        let run = |old_log_probs, batch: &RolloutBatch| {
            let mut learner = learner(GrpoConfig {
                minibatches,
                old_log_probs,
                ..config(LossKind::Grpo)
            });
            let output = learner.step(batch).unwrap();
            (bits(&learner), output)
        };
        let mut batch = batch(3);
        let (by_trainer, of_trainer) = run(OldLogProbs::Trainer, &batch);
        let (by_rollout, of_rollout) = run(OldLogProbs::Rollout, &batch);
        assert_ne!(by_trainer, by_rollout, "{minibatches}");
        assert_eq!(of_trainer.mismatch, of_rollout.mismatch);
        assert_eq!(
            of_trainer.old_log_probs, of_rollout.old_log_probs,
            "the trainer's either way"
        );
        assert!(metric(&of_rollout, "actor/pg_clipfrac") > metric(&of_trainer, "actor/pg_clipfrac"));
        // Without a gap there is no difference, but for a ratio of 1 that is computed.
        batch.rollout_log_probs = of_trainer.old_log_probs;
        let values = |old| run(old, &batch).0.into_iter().map(f32::from_bits).collect::<Vec<_>>();
        let (trainer, rollout) = (values(OldLogProbs::Trainer), values(OldLogProbs::Rollout));
        for (trainer, rollout) in trainer.into_iter().zip(rollout) {
            assert!((trainer - rollout).abs() < 1e-5, "{trainer} and {rollout}");
        }
    }
}

#[test]
fn micro_batches_equal_the_whole_minibatch_for_every_loss() {
    for kind in KINDS {
        for (beta, overlong) in [(0.0, OverlongMode::Keep), (0.1, OverlongMode::Mask)] {
            let mut config = config(kind);
            config.loss.beta = beta;
            config.loss.epsilon_high = (kind == LossKind::Gspo).then_some(0.28);
            config.loss.kl_times_ratio = true;
            config.overlong.mode = overlong;
            config.correction = Correction::new(CorrectionMode::Tis);
            // Several updates, so that the ratios are not 1.
            (config.minibatches, config.epochs) = (2, 2);
            let updated = |micro_batch_rows| {
                let mut learner = learner(GrpoConfig {
                    micro_batch_rows,
                    ..config
                });
                let output = learner.step(&batch(5)).unwrap();
                assert_eq!(metric(&output, "actor/updates"), 4.0);
                (learner, output)
            };
            let (whole, output) = updated(None);
            for micro in [1, 3, 8] {
                let (parts, parts_output) = updated(Some(micro));
                assert!(distance(&parts, &whole) < 1e-5, "{kind:?} {beta} {micro}");
                for (name, value) in output.metrics.iter() {
                    let difference = (metric(&parts_output, name) - value).abs();
                    assert!(difference < 1e-4 * (1.0 + value.abs()), "{kind:?} {name}");
                }
            }
        }
    }
}

#[test]
fn one_update_a_rollout_has_ratio_one() {
    for kind in KINDS {
        for micro_batch_rows in [None, Some(3)] {
            let mut learner = learner(GrpoConfig {
                micro_batch_rows,
                ..config(kind)
            });
            for seed in 0..3 {
                let output = learner.step(&batch(seed)).unwrap();
                assert!(metric(&output, "actor/ppo_kl").abs() < 1e-8);
                assert_eq!(metric(&output, "actor/pg_clipfrac"), 0.0);
            }
        }
    }
}

#[test]
fn old_log_probs_are_the_trainers_own_before_the_update() {
    let mut learner = learner(GrpoConfig {
        minibatches: 4,
        ..config(LossKind::Dapo)
    });
    let batch = batch(2);
    let policy = learner.model().valid();
    let rows = (0..batch.rows()).map(|row| batch.row(row, false)).collect::<Vec<_>>();
    let expected = score::<Flex, _>(&policy, &rows, &ScoreOptions::default());
    let output = learner.step(&batch).unwrap();
    assert_eq!(output.old_log_probs, expected.log_probs);
    assert_eq!(
        output.mismatch,
        Mismatch::new(&expected.log_probs.concat(), &batch.rollout_log_probs.concat())
    );
}

#[test]
fn zero_variance_groups_teach_nothing_without_kl_and_pull_to_the_reference_with_it() {
    let mut equal = batch(1);
    equal.rewards.fill(1.0);
    let mut plain = learner(config(LossKind::Dapo));
    // Momentum from an earlier step must not move the parameters either.
    plain.step(&batch(1)).unwrap();
    let before = bits(&plain);
    let output = plain.step(&equal).unwrap();
    assert_eq!(metric(&output, "frac_reward_zero_std"), 1.0);
    assert_eq!(
        (metric(&output, "actor/updates"), metric(&output, "actor/empty_updates")),
        (0.0, 1.0)
    );
    assert_eq!(bits(&plain), before);

    let mut config = config(LossKind::Dapo);
    config.loss.beta = 0.5;
    config.optimizer.beta_1 = 0.0;
    let mut with_kl = learner(config);
    with_kl.step(&batch(1)).unwrap();
    let first = metric(&with_kl.step(&equal).unwrap(), "actor/kl");
    let second = metric(&with_kl.step(&equal).unwrap(), "actor/kl");
    assert!(first > 0.0 && second < first, "{first} {second}");
}

#[test]
fn fully_masked_rows_and_batches_are_skipped() {
    let mut config = config(LossKind::Grpo);
    config.overlong.mode = OverlongMode::Mask;
    let mut batch = batch(1);
    batch.truncated.fill(true);
    let mut all_masked = learner(config);
    let before = bits(&all_masked);
    let output = all_masked.step(&batch).unwrap();
    assert_eq!(bits(&all_masked), before);
    assert_eq!(metric(&output, "actor/empty_updates"), 1.0);
    assert!(output.metrics.iter().all(|(_, value)| value.is_finite()));

    // A masked row leaves the token denominators: the same as if its completion were empty.
    batch.truncated.fill(false);
    batch.truncated[2] = true;
    let mut masked = learner(config);
    masked.step(&batch).unwrap();
    batch.truncated.fill(false);
    batch.completions[2].clear();
    batch.rollout_log_probs[2].clear();
    let mut empty = learner(config);
    empty.step(&batch).unwrap();
    assert!(distance(&masked, &empty) < 1e-6);
}

#[test]
fn soft_overlong_lowers_the_reward_of_long_completions_only() {
    let mut config = config(LossKind::Dapo);
    config.scale_rewards = ScaleRewards::None;
    config.overlong = Overlong {
        mode: OverlongMode::Soft,
        cache: 2,
    };
    let mut batch = batch(1);
    batch.rewards.fill(0.0);
    let output = learner(config).step(&batch).unwrap();
    let penalty = |row: usize| [0.0, 0.0, 0.0, 0.0, -0.5, -1.0][batch.completions[row].len()];
    for row in 0..16 {
        let group = row / 4 * 4;
        let mean = (group..group + 4).map(penalty).sum::<f32>() / 4.0;
        assert!((output.advantages[row] - (penalty(row) - mean)).abs() < 1e-6);
    }
    assert_eq!(metric(&output, "reward/mean"), 0.0, "the logged reward is the task's");
}

#[test]
fn missing_reward_does_not_move_the_policy() {
    let mut with = batch(1);
    with.rewards[2] = f32::NAN;
    let mut learner = learner(config(LossKind::Bnpo));
    let output = learner.step(&with).unwrap();
    assert_eq!(output.advantages[2], 0.0);
    assert_eq!(metric(&output, "reward/missing"), 1.0);
    assert!(output.metrics.iter().all(|(_, value)| value.is_finite()));
}

#[test]
fn nan_rollout_log_prob_is_neutralised_and_counted() {
    let mut config = config(LossKind::Dapo);
    config.correction = Correction::new(CorrectionMode::Icepop);
    let mut batch = batch(1);
    batch.rollout_log_probs[0][0] = f32::NAN;
    let output = learner(config).step(&batch).unwrap();
    assert_eq!(metric(&output, "rollout_corr/unscored_tokens"), 1.0);
    assert_eq!(metric(&output, "skipped_steps"), 0.0);
    assert!(output.metrics.iter().all(|(_, value)| value.is_finite()));
}

#[test]
fn a_batch_that_the_correction_rejects_makes_no_update() {
    let mut config = config(LossKind::Dapo);
    config.correction = Correction::new(CorrectionMode::Icepop);
    let mut batch = batch(1);
    batch.rollout_log_probs.iter_mut().for_each(|row| row.fill(-50.0));
    let mut learner = learner(config);
    let before = bits(&learner);
    let output = learner.step(&batch).unwrap();
    assert_eq!(metric(&output, "rollout_corr/rejected_fraction"), 1.0);
    assert_eq!(bits(&learner), before);
}

#[test]
fn a_loss_that_is_not_finite_is_skipped_counted_and_ends_the_training_after_n() {
    let mut learner = learner(config(LossKind::Grpo));
    let mut model = learner.model.take().unwrap();
    model.head = model.head.map(|head| head * f32::NAN);
    learner.model = Some(model);
    let before = bits(&learner);
    for skipped in 1..=2 {
        let output = learner.step(&batch(1)).unwrap();
        assert_eq!(metric(&output, "skipped_steps"), skipped as f64);
        assert_eq!(metric(&output, "actor/updates"), 0.0);
    }
    let error = learner.step(&batch(1)).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("training diverged: 3 updates in a row had a loss")
    );
    assert_eq!(bits(&learner), before, "parameters stay");
    assert!(learner.optimizer().to_record().is_empty(), "moments stay");
}

#[test]
fn a_skipped_update_does_not_stop_the_next() {
    let mut learner = learner(config(LossKind::Grpo));
    let good = learner.model().clone();
    let mut bad = learner.model.take().unwrap();
    bad.experts[0] = bad.experts[0].clone().map(|expert| expert * f32::INFINITY);
    learner.model = Some(bad);
    learner.step(&batch(1)).unwrap();
    learner.model = Some(good);
    let output = learner.step(&batch(1)).unwrap();
    assert_eq!(
        (metric(&output, "actor/updates"), metric(&output, "skipped_steps")),
        (1.0, 1.0)
    );
    assert_eq!(
        learner.skipped_steps(),
        SkippedSteps {
            total: 1,
            consecutive: 0
        }
    );
}

#[test]
fn a_restored_learner_goes_on_bit_for_bit() {
    let mut config = config(LossKind::Dapo);
    (config.minibatches, config.epochs) = (4, 2);
    config.loss.beta = 0.05;
    config.optimizer.schedule.warmup_steps = 3;
    let mut uninterrupted = learner(config);
    for seed in 0..2 {
        uninterrupted.step(&batch(seed)).unwrap();
    }
    let record = uninterrupted.optimizer().to_record();
    let mut resumed = Learner::new(uninterrupted.model().clone(), config).unwrap();
    resumed.restore(
        config.optimizer.init().load_record(record),
        uninterrupted.steps(),
        uninterrupted.skipped_steps(),
    );
    resumed.set_reference(uninterrupted.reference().unwrap().clone());
    for seed in 2..4 {
        let expected = uninterrupted.step(&batch(seed)).unwrap();
        let got = resumed.step(&batch(seed)).unwrap();
        assert_eq!(got.metrics, expected.metrics);
    }
    assert_eq!(bits(&resumed), bits(&uninterrupted));
}

#[test]
fn the_order_of_rows_is_a_function_of_seed_step_and_epoch() {
    let order = row_order(7, 3, 1, 32);
    assert_eq!(order, row_order(7, 3, 1, 32));
    for other in [row_order(8, 3, 1, 32), row_order(7, 4, 1, 32), row_order(7, 3, 0, 32)] {
        assert_ne!(order, other);
    }
    let mut sorted = order;
    sorted.sort_unstable();
    assert_eq!(sorted, (0..32).collect::<Vec<_>>());
}

#[test]
fn log_probs_do_not_depend_on_padding() {
    let policy = TinyLm::<Flex>::new(4);
    let row = |prompt, completion| TokenRow {
        prompt,
        completion,
        routing: None,
    };
    let short = row(&[1, 2][..], &[3, 4, 5][..]);
    let long = row(&[6, 5, 4, 3, 2, 1, 0][..], &[1, 2, 3, 4, 5, 6][..]);
    let alone = score::<Flex, _>(&policy, &[short], &ScoreOptions::default());
    let padded = score::<Flex, _>(&policy, &[long, short], &ScoreOptions::default());
    for (alone, padded) in alone.log_probs[0].iter().zip(&padded.log_probs[1]) {
        assert!((alone - padded).abs() < 1e-6);
    }
}

#[test]
fn replay_routes_the_trainer_like_the_rollout_and_flips_are_counted_without_it() {
    let batch = batch(6);
    let policy = TinyLm::<Flex>::new(1);
    let rows = (0..batch.rows()).map(|row| batch.row(row, false)).collect::<Vec<_>>();
    let options = ScoreOptions {
        record_routing: true,
        ..ScoreOptions::default()
    };
    let own = score::<Flex, _>(&policy, &rows, &options);
    let flipped = own.routing.iter().map(|routing| RowRouting {
        top_k: 1,
        layers: vec![routing.layers[0].iter().map(|id| 1 - id).collect()],
    });
    let flipped = flipped.collect::<Vec<_>>();

    let step = |expert_ids: &[RowRouting], routing_replay: bool| {
        let mut batch = batch.clone();
        batch.expert_ids = Some(expert_ids.to_vec());
        let mut learner = learner(GrpoConfig {
            routing_replay,
            ..config(LossKind::Dapo)
        });
        (learner.step(&batch).unwrap(), learner)
    };
    let (live, live_learner) = step(&flipped, false);
    assert_eq!(metric(&live, "mismatch/route_flip_rate"), 1.0);
    assert_eq!(live.old_log_probs, own.log_probs);
    let (same, same_learner) = step(&own.routing, true);
    assert_eq!(
        same.old_log_probs, own.log_probs,
        "replaying its own choice changes nothing"
    );
    assert_eq!(bits(&same_learner), bits(&live_learner));
    let (other, other_learner) = step(&flipped, true);
    assert_ne!(other.old_log_probs, own.log_probs);
    assert!(
        distance(&other_learner, &live_learner) > 1e-4,
        "the gradient follows the replayed experts"
    );
    assert_eq!(other.metrics.get("mismatch/route_flip_rate"), None);
}

#[test]
fn every_loss_makes_the_rewarded_token_likelier() {
    for kind in KINDS {
        let mut config = GrpoConfig {
            group_size: VOCAB,
            minibatches: 7,
            ..config(kind)
        };
        config.optimizer.schedule.learning_rate = 0.02;
        config.optimizer.epsilon = 1e-8;
        let mut learner = learner(config);
        // Every token once from each of two prompts: the tokens' frequencies are no policy's, which a ratio against the
        // old policy does not mind.
        let mut batch = RolloutBatch::default();
        for prompt in 0..2 {
            for token in 0..VOCAB as u32 {
                batch.prompts.push(vec![prompt]);
                batch.completions.push(vec![token]);
                batch.rollout_log_probs.push(vec![-2.0]);
                batch.truncated.push(false);
                batch.group.push(prompt as usize);
                batch.rewards.push((token == 3 + prompt) as u8 as f32);
            }
        }
        let mut rewarded = Vec::new();
        for _ in 0..15 {
            let output = learner.step(&batch).unwrap();
            rewarded.push((output.old_log_probs[3][0] + output.old_log_probs[VOCAB + 4][0]) / 2.0);
        }
        assert!(rewarded[14] > rewarded[0] + 0.5, "{kind:?} {rewarded:?}");
    }
}

#[test]
fn batches_that_cannot_work_are_refused_by_name_and_leave_the_policy_alone() {
    let mut learner = learner(config(LossKind::Dapo));
    let before = bits(&learner);
    let mut error = |change: fn(&mut RolloutBatch)| {
        let mut batch = batch(1);
        change(&mut batch);
        learner.step(&batch).unwrap_err().to_string()
    };
    assert!(error(|b| b.completions[3] = vec![1; 6]).starts_with("rollout_log_probs[3]"));
    let long = |b: &mut RolloutBatch| {
        b.completions[3] = vec![1; 6];
        b.rollout_log_probs[3] = vec![-1.0; 6];
    };
    assert!(error(long).starts_with("completions[3]: expected at most max_completion_length (5) tokens, got 6"));
    assert!(
        error(|b| b.group[0] = 3)
            .starts_with("group 3: expected rows of one prompt, got different prompts in rows 0 and 12")
    );
    assert!(error(|b| *b = RolloutBatch::default()).starts_with("rows: expected a multiple of group_size (4), got 0"));
    assert!(error(|b| b.completions[3][0] = 7).starts_with("completions[3]: expected token ids below"));
    let routing = |b: &mut RolloutBatch| {
        let routing = RowRouting {
            top_k: 1,
            layers: vec![vec![]; 2],
        };
        b.expert_ids = Some(vec![routing; 16]);
    };
    assert!(error(routing).starts_with("expert_ids[0]: expected (layers, top_k) (1, 1), as the model has"));
    assert_eq!((bits(&learner), learner.steps()), (before, 0));

    let replay = GrpoConfig {
        routing_replay: true,
        ..config(LossKind::Dapo)
    };
    let error = self::learner(replay).step(&batch(1)).unwrap_err().to_string();
    assert!(error.starts_with("expert_ids: expected the rollout's expert ids, for routing_replay"));
    let bad = GrpoConfig {
        group_size: 1,
        ..config(LossKind::Dapo)
    };
    assert!(Learner::<B, _>::new(TinyLm::new(1), bad).is_err());
}
