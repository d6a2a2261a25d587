use super::*;
use crate::{layer_backend::LayerBackend, modules::rotary::RotaryEmbeddingConfig};
use burn::{
    backend::{Autodiff, Flex},
    tensor::{Distribution, TensorData, Tolerance},
};

type B = Flex;
const HIDDEN: usize = 24;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
// One block of channels and a rest.
const HEAD_DIM: usize = 40;
// More than one block of keys.
const MAX_SEQ_LEN: usize = 40;

fn attention<B: Backend>(device: &B::Device) -> QuadsAttention<B> {
    B::seed(device, 7);
    let mut attention = QuadsAttentionConfig::new(HIDDEN, HEADS, KV_HEADS, HEAD_DIM)
        .with_attention_bias(true)
        .with_precision(Precision::High)
        .init::<B>(device);
    // Norm weights that differ by channel, so that their order relative to the rotation is seen.
    for norm in [&mut attention.q_norm, &mut attention.k_norm] {
        norm.gamma = norm
            .gamma
            .clone()
            .map(|g| g.random_like(Distribution::Uniform(0.5, 2.0)));
    }
    attention
}

fn rope<B: Backend>(device: &B::Device) -> RotaryEmbedding<B> {
    RotaryEmbeddingConfig::new(MAX_SEQ_LEN, HEAD_DIM).init(device)
}

fn assert_close<const D: usize>(a: Tensor<B, D>, b: Tensor<B, D>, tolerance: f32) {
    a.into_data()
        .assert_approx_eq::<f32>(&b.into_data(), Tolerance::absolute(tolerance));
}

/// The definition, one query head and one pair of positions at a time, on f64.
fn by_definition(attention: &QuadsAttention<B>, x: Tensor<B, 3>) -> Vec<f64> {
    let [_, seq, _] = x.dims();
    let list = |t: Tensor<B, 3>| -> Vec<f64> { t.into_data().iter::<f64>().collect() };
    let (q, k, v) = (
        list(attention.q_proj.forward(x.clone())),
        list(attention.k_proj.forward(x.clone())),
        list(attention.v_proj.forward(x)),
    );
    let norm_rotate = |row: &[f64], norm: &RmsNorm<B>, position: usize| -> Vec<f64> {
        let gamma: Vec<f64> = norm.gamma.val().into_data().iter::<f64>().collect();
        let mean = row.iter().map(|x| x * x).sum::<f64>() / HEAD_DIM as f64;
        let n: Vec<f64> = (0..HEAD_DIM)
            .map(|i| row[i] / (mean + 1e-6).sqrt() * gamma[i])
            .collect();
        let half = HEAD_DIM / 2;
        (0..HEAD_DIM)
            .map(|i| {
                let angle = position as f64 * 10000f64.powf(-2.0 * (i % half) as f64 / HEAD_DIM as f64);
                let pair = if i < half { -n[i + half] } else { n[i - half] };
                n[i] * angle.cos() + pair * angle.sin()
            })
            .collect()
    };
    let mut out = vec![0.0; seq * HEADS * HEAD_DIM];
    for h in 0..HEADS {
        let g = h / (HEADS / KV_HEADS);
        let query = |t: usize| {
            let start = (t * HEADS + h) * HEAD_DIM;
            norm_rotate(&q[start..start + HEAD_DIM], &attention.q_norm, t)
        };
        let key = |t: usize| {
            let start = (t * KV_HEADS + g) * HEAD_DIM;
            norm_rotate(&k[start..start + HEAD_DIM], &attention.k_norm, t)
        };
        for t in 0..seq {
            let weights: Vec<f64> = (0..=t)
                .map(|s| {
                    let dot: f64 = query(t).iter().zip(key(s)).map(|(a, b)| a * b).sum();
                    (dot / (HEAD_DIM as f64).sqrt()).exp()
                })
                .collect();
            let total: f64 = weights.iter().sum();
            for (s, w) in weights.iter().enumerate() {
                for i in 0..HEAD_DIM {
                    out[(t * HEADS + h) * HEAD_DIM + i] += w / total * v[(s * KV_HEADS + g) * HEAD_DIM + i];
                }
            }
        }
    }
    out
}

#[test]
fn equals_the_definition() {
    let device = Default::default();
    let attention = attention::<B>(&device);
    let x = Tensor::random([1, 9, HIDDEN], Distribution::Default, &device);
    let expected = by_definition(&attention, x.clone());
    let mixed = Tensor::<B, 3>::from_data(
        TensorData::new(expected, [1, 9, HEADS * HEAD_DIM]).convert::<f32>(),
        &device,
    );
    let context = AttentionContext::new(&rope(&device), 9, None, None);
    assert_close(attention.forward(x, &context), attention.o_proj.forward(mixed), 2e-6);
}

#[test]
fn the_future_is_not_seen() {
    let device = Default::default();
    let attention = attention::<B>(&device);
    let context = AttentionContext::new(&rope(&device), 6, None, None);
    let x = Tensor::random([1, 6, HIDDEN], Distribution::Default, &device);
    let other = Tensor::cat(
        vec![x.clone().narrow(1, 0, 4), x.clone().narrow(1, 4, 2) * 3.0 - 1.0],
        1,
    );
    let (a, b) = (attention.forward(x, &context), attention.forward(other, &context));
    assert_close(a.clone().narrow(1, 0, 4), b.clone().narrow(1, 0, 4), 0.0);
    let moved: f32 = (a - b).narrow(1, 4, 2).abs().max().into_scalar();
    assert!(moved > 1e-2);
}

#[test]
fn padding_on_either_side_changes_nothing_for_real_tokens() {
    let device = Default::default();
    let attention = attention::<B>(&device);
    let rope = rope(&device);
    let x = Tensor::random([1, 5, HIDDEN], Distribution::Default, &device);
    let pad = Tensor::random([1, 3, HIDDEN], Distribution::Uniform(-9.0, 9.0), &device);
    let plain = attention.forward(x.clone(), &AttentionContext::new(&rope, 5, None, None));

    let right = attention.forward(
        Tensor::cat(vec![x.clone(), pad.clone()], 1),
        &AttentionContext::new(
            &rope,
            8,
            None,
            Some(Tensor::from_data(
                [[false, false, false, false, false, true, true, true]],
                &device,
            )),
        ),
    );
    assert_close(right.narrow(1, 0, 5), plain.clone(), 1e-6);

    let left = attention.forward(
        Tensor::cat(vec![pad, x], 1),
        &AttentionContext::new(
            &rope,
            8,
            Some(Tensor::from_data([[0, 0, 0, 0, 1, 2, 3, 4]], &device)),
            Some(Tensor::from_data(
                [[true, true, true, false, false, false, false, false]],
                &device,
            )),
        ),
    );
    assert_close(left.narrow(1, 3, 5), plain, 1e-6);
}

#[test]
fn rows_without_any_key_are_finite_and_leave_gradients_finite() {
    type A = Autodiff<B>;
    let device = Default::default();
    let attention = attention::<A>(&device);
    // The first row is all padding; the second starts with padding.
    let context = AttentionContext::new(
        &rope(&device),
        3,
        None,
        Some(Tensor::from_data([[true, true, true], [true, false, false]], &device)),
    );
    let x = Tensor::<A, 3>::random([2, 3, HIDDEN], Distribution::Default, &device).require_grad();
    let y = attention.forward(x.clone(), &context);
    let grads = y.clone().narrow(0, 1, 1).narrow(1, 1, 2).sum().backward();
    let finite = |t: Tensor<B, 3>| t.into_data().iter::<f32>().all(f32::is_finite);
    assert!(finite(y.inner()));
    let dx = x.grad(&grads).expect("x has a gradient");
    assert!(finite(dx.clone()));
    let reaches_padding: f32 = dx.clone().narrow(0, 0, 1).abs().max().into_scalar();
    assert_eq!(reaches_padding, 0.0);
    let reaches_tokens: f32 = dx.narrow(0, 1, 1).abs().max().into_scalar();
    assert!(reaches_tokens > 0.0);
}

/// Runs `x` `[1, seq, hidden]` through the cache in pieces of the given lengths.
fn in_pieces<B: QuadsBackend>(
    attention: &QuadsAttention<B>,
    x: Tensor<B, 3>,
    slot: usize,
    cache: &mut KvCache<B>,
    pieces: &[usize],
) -> Tensor<B, 3> {
    let rope = rope(&x.device());
    let mut start = 0;
    let outputs = pieces
        .iter()
        .map(|&n| {
            let step = CacheStep {
                tokens: (start..start + n)
                    .map(|position| TokenPlace { slot, position })
                    .collect(),
                copies: vec![],
            };
            let piece = x.clone().narrow(1, start, n).reshape([n, HIDDEN]);
            start += n;
            attention.forward_cached(piece, &rope, &mut cache.layers[0], &step)
        })
        .collect();
    Tensor::cat(outputs, 0).unsqueeze()
}

fn cache<B: Backend>(device: &B::Device) -> KvCache<B> {
    KvCacheConfig {
        num_layers: 1,
        slots: 3,
        num_key_value_heads: KV_HEADS,
        max_seq_len: MAX_SEQ_LEN,
        head_dim: HEAD_DIM,
    }
    .init(device)
}

#[test]
fn any_division_into_steps_equals_the_whole_sequence() {
    let device = Default::default();
    let attention = attention::<B>(&device);
    let x = Tensor::random([1, 37, HIDDEN], Distribution::Default, &device);
    let whole = attention.forward(x.clone(), &AttentionContext::new(&rope(&device), 37, None, None));
    let mut cache = cache(&device);
    for pieces in [vec![37], vec![1; 37], vec![5, 1, 1, 30]] {
        // The same slot again: what an earlier sequence left beyond a token's position is not seen.
        let cached = in_pieces(&attention, x.clone(), 1, &mut cache, &pieces);
        assert_close(cached, whole.clone(), 2e-6);
    }
}

#[test]
fn a_copied_prefix_equals_a_computed_one() {
    let device = Default::default();
    let attention = attention::<B>(&device);
    let rope = rope(&device);
    let x = Tensor::random([1, 6, HIDDEN], Distribution::Default, &device);
    let mut cache = cache(&device);
    let computed = in_pieces(&attention, x.clone(), 0, &mut cache, &[6]).narrow(1, 5, 1);
    // In one step, slot 2 computes the prompt and slot 1 copies all of it but the last token, which it runs itself.
    let rows: Vec<_> = (0..6).map(|position| (2, position)).chain([(1, 5)]).collect();
    let batch = Tensor::cat(vec![x.clone(), x.narrow(1, 5, 1)], 1).reshape([7, HIDDEN]);
    let step = CacheStep {
        tokens: rows
            .into_iter()
            .map(|(slot, position)| TokenPlace { slot, position })
            .collect(),
        copies: vec![PrefixCopy { from: 2, to: 1, len: 5 }],
    };
    let out = attention.forward_cached(batch, &rope, &mut cache.layers[0], &step);
    let computed = computed.reshape([1, HIDDEN]);
    assert_close(out.clone().narrow(0, 5, 1), computed.clone(), 1e-6);
    assert_close(out.narrow(0, 6, 1), computed, 1e-6);
}

#[test]
fn a_token_has_the_same_bits_alone_and_among_others() {
    let device = Default::default();
    let attention = attention::<B>(&device);
    let row = |n: usize| Tensor::<B, 2>::random([n, HEADS * HEAD_DIM], Distribution::Default, &device);
    let run = |rows: &[Tensor<B, 2>], slots: &[usize], cache: &mut KvCache<B>, position: usize| {
        let x = Tensor::cat(rows.to_vec(), 0);
        let kv = x.clone().narrow(1, 0, KV_HEADS * HEAD_DIM);
        let qkv = CachedQkv {
            query: x,
            key: kv.clone(),
            value: kv,
            norms: attention.head_norms(),
            rope: rope(&device),
            heads: HEADS,
        };
        let tokens = slots.iter().map(|&slot| TokenPlace { slot, position }).collect();
        B::cached_attention(qkv, &mut cache.layers[0], &CacheStep { tokens, copies: vec![] })
    };
    let (mut alone, mut among) = (cache(&device), cache(&device));
    for position in 0..7 {
        let mine = row(1);
        let a = run(std::slice::from_ref(&mine), &[2], &mut alone, position);
        let b = run(&[row(1), mine, row(1)], &[0, 1, 2], &mut among, position);
        assert_eq!(a.into_data(), b.narrow(0, 1, 1).into_data());
    }
}

#[test]
fn the_cache_is_written_in_place() {
    let device = Default::default();
    let attention = attention::<B>(&device);
    let mut cache = cache::<B>(&device);
    let address = |t: &Tensor<B, 4>| t.clone().into_primitive().tensor().bytes().as_ptr() as usize;
    let before = (address(&cache.layers[0].keys), address(&cache.layers[0].values));
    let x = Tensor::random([1, 12, HIDDEN], Distribution::Default, &device);
    in_pieces(&attention, x, 1, &mut cache, &[4, 1, 1, 6]);
    let after = (address(&cache.layers[0].keys), address(&cache.layers[0].values));
    assert_eq!(before, after);
}

#[test]
#[should_panic(expected = "slot 1, 41 tokens, exceeds 3 slots of 40 tokens")]
fn a_place_outside_the_cache_is_refused() {
    let device = Default::default();
    let attention = attention::<B>(&device);
    let step = CacheStep {
        tokens: vec![TokenPlace {
            slot: 1,
            position: MAX_SEQ_LEN,
        }],
        copies: vec![],
    };
    attention.forward_cached(
        Tensor::zeros([1, HIDDEN], &device),
        &rope(&device),
        &mut cache(&device).layers[0],
        &step,
    );
}
