//! Flex's single passes equal the definitions in Burn's operations, and gradients equal Autodiff's through these.
use super::*;
use crate::modules::{
    attention::{KvCacheConfig, PrefixCopy, TokenPlace},
    rotary::RotaryEmbeddingConfig,
    seeded_init::normal,
};
use burn::{
    backend::{Autodiff, Flex},
    tensor::{TensorData, Tolerance, backend::AutodiffBackend},
};
use burn_nvfp4::Nvfp4;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::cell::RefCell;

type A = Autodiff<Flex>;

/// Standard normal, and the same in every run: an absolute tolerance is a matter of the largest value that is drawn.
fn random<B: Backend, const D: usize>(shape: [usize; D]) -> Tensor<B, D> {
    thread_local!(static RNG: RefCell<ChaCha8Rng> = RefCell::new(ChaCha8Rng::seed_from_u64(1)));
    let count = shape.iter().product();
    let values = RNG.with_borrow_mut(|rng| (0..count).map(|_| normal(rng)).collect::<Vec<_>>());
    Tensor::from_data(TensorData::new(values, shape), &Default::default())
}

fn assert_close<const D: usize>(a: Tensor<Flex, D>, b: Tensor<Flex, D>, tolerance: f32) {
    a.into_data()
        .assert_approx_eq::<f32>(&b.into_data(), Tolerance::absolute(tolerance));
}

fn leaf<const D: usize>(x: &Tensor<Flex, D>) -> Tensor<A, D> {
    Tensor::from_inner(x.clone()).require_grad()
}

#[test]
fn a_dense_product_has_the_gradients_of_a_matmul() {
    let (x, w, up) = (random([7, 5]), random([5, 3]), random::<Flex, 2>([7, 3]));
    let gradients = |product: fn(Tensor<A, 2>, Tensor<A, 2>) -> Tensor<A, 2>| {
        let (x, w) = (leaf(&x), leaf(&w));
        let y = product(x.clone(), w.clone());
        let grads = (y.clone() * Tensor::from_inner(up.clone())).sum().backward();
        [y.inner(), x.grad(&grads).unwrap(), w.grad(&grads).unwrap()].map(Tensor::into_data)
    };
    assert_eq!(gradients(A::dense_product), gradients(Tensor::matmul));
    // A frozen weight gets none, and costs none.
    let (x, w) = (leaf(&x), Tensor::<A, 2>::from_inner(w));
    let grads = A::dense_product(x.clone(), w.clone()).sum().backward();
    assert!(x.grad(&grads).is_some() && w.grad(&grads).is_none());
}

#[test]
fn rms_norm_and_its_gradient_equal_the_definition() {
    for (rows, d) in [(1, 16), (5, 40), (300, 64), (1300, 24), (0, 16)] {
        let (x, gamma, up) = (random([rows, d]), random([d]), random([rows, d]));
        assert_close(
            Flex::rms_norm(x.clone(), gamma.clone(), 1e-6),
            composite::rms_norm(x.clone(), gamma.clone(), 1e-6),
            2e-6,
        );
        if rows == 0 {
            continue;
        }
        // Of sums over so many rows, each with a rounding.
        let sums = (1e-7 * rows as f32).max(5e-5);
        let (ax, agamma) = (leaf(&x), leaf(&gamma));
        let loss = composite::rms_norm(ax.clone(), agamma.clone(), 1e-6) * Tensor::from_inner(up.clone());
        let grads = loss.sum().backward();
        for (dx, d_gamma) in [
            Flex::rms_norm_backward(x.clone(), gamma.clone(), 1e-6, up.clone()),
            composite::rms_norm_backward(x.clone(), gamma.clone(), 1e-6, up.clone()),
        ] {
            assert_close(dx, ax.grad(&grads).unwrap(), 5e-6);
            assert_close(d_gamma, agamma.grad(&grads).unwrap(), sums);
        }
        // The node on Autodiff.
        let (nx, ngamma) = (leaf(&x), leaf(&gamma));
        let loss = A::rms_norm(nx.clone(), ngamma.clone(), 1e-6) * Tensor::from_inner(up);
        let node = loss.sum().backward();
        assert_close(nx.grad(&node).unwrap(), ax.grad(&grads).unwrap(), 5e-6);
        assert_close(ngamma.grad(&node).unwrap(), agamma.grad(&grads).unwrap(), sums);
    }
}

#[test]
fn sums_over_rows_miss_none_of_them() {
    for rows in [1, 255, 511, 512, 513, 1024, 66_000, 131_072 + 7] {
        // Of whole numbers sums are exact, whatever their order.
        let values = (0..rows * 3).map(|i| (i % 11) as f32 - 4.0).collect::<Vec<_>>();
        let expected: Vec<f32> = (0..3)
            .map(|column| values.iter().skip(column).step_by(3).sum())
            .collect();
        let x = Tensor::<Flex, 2>::from_data(TensorData::new(values, [rows, 3]), &Default::default());
        assert_eq!(
            composite::column_sums(x).into_data().to_vec::<f32>().unwrap(),
            expected,
            "{rows} rows"
        );
    }
}

#[test]
fn swiglu_and_its_gradient_equal_the_definition() {
    for (rows, d) in [(1, 16), (7, 48), (300, 33), (0, 16)] {
        let (x, up) = (random([rows, 2 * d]) * 4.0, random([rows, d]));
        assert_close(Flex::swiglu(x.clone()), composite::swiglu(x.clone()), 1e-5);
        if rows == 0 {
            continue;
        }
        let ax = leaf(&x);
        let loss = composite::swiglu(ax.clone()) * Tensor::from_inner(up.clone());
        let expected = ax.grad(&loss.sum().backward()).unwrap();
        assert_close(Flex::swiglu_backward(x.clone(), up.clone()), expected.clone(), 1e-5);
        assert_close(
            composite::swiglu_backward(x.clone(), up.clone()),
            expected.clone(),
            1e-5,
        );
        let nx = leaf(&x);
        let loss = A::swiglu(nx.clone()) * Tensor::from_inner(up);
        assert_close(nx.grad(&loss.sum().backward()).unwrap(), expected, 1e-5);
    }
    let extreme = Tensor::<Flex, 2>::from_data([[-200.0, 200.0, 0.0, 2.0, 2.0, 2.0]], &Default::default());
    assert_close(
        Flex::swiglu(extreme),
        Tensor::from_data([[0.0, 400.0, 0.0]], &Default::default()),
        1e-6,
    );
}

#[test]
fn rows_of_one_expert_stay_in_token_order() {
    let ids = Tensor::from_data([2, 0, 0, 2, 2, 1], &Default::default());
    let order = Flex::order_by_expert(ids, 4);
    let list = |t: Tensor<Flex, 1, Int>| -> Vec<i64> { t.into_data().iter::<i64>().collect() };
    // Rows 1 2 | 5 | 0 3 4, of two for each token.
    assert_eq!(list(composite::tokens_of_rows(&order, 3)), [0, 1, 2, 0, 1, 2]);
    assert_eq!(list(order.order), [1, 2, 5, 0, 3, 4]);
    assert_eq!(list(order.inverse), [3, 0, 1, 4, 5, 2]);
    assert_eq!(list(order.counts), [2, 1, 3, 0]);
}

#[test]
fn rows_are_permuted_and_their_gradients_are_those_of_burn() {
    for (tokens, top_k, d) in [(1, 1, 3), (7, 2, 5), (40, 3, 16), (0, 2, 4)] {
        let rows = tokens * top_k;
        let ids: Vec<i32> = (0..rows as i32).map(|i| (i * i + 3 * i) % 5).collect();
        let ids = Tensor::from_data(TensorData::new(ids, [rows]), &Default::default());
        let order = Flex::order_by_expert(ids, 5);
        let tracked = ExpertOrder::<A> {
            order: Tensor::from_inner(order.order.clone()),
            inverse: Tensor::from_inner(order.inverse.clone()),
            counts: Tensor::from_inner(order.counts.clone()),
        };
        let (x, up): (Tensor<Flex, 2>, Tensor<Flex, 2>) = (random([tokens, d]), random([rows, d]));
        let permuted = Flex::permute_rows(x.clone(), &order);
        if tokens == 0 {
            assert_eq!(Flex::unpermute_rows(permuted, &order).dims(), [0, d]);
            continue;
        }
        // Back in the order of tokens, each has its row once for each expert.
        let repeated = x
            .clone()
            .reshape([tokens, 1, d])
            .expand([tokens, top_k, d])
            .reshape([rows, d]);
        assert_close(Flex::unpermute_rows(permuted, &order), repeated, 0.0);
        let of_rows = Tensor::from_inner(composite::tokens_of_rows(&order, tokens));
        let gradient = |run: &dyn Fn(Tensor<A, 2>) -> Tensor<A, 2>, at: &Tensor<Flex, 2>| {
            let x = leaf(at);
            let loss = run(x.clone()) * Tensor::from_inner(up.clone());
            x.grad(&loss.sum().backward()).unwrap()
        };
        let expected = gradient(&|x| x.select(0, of_rows.clone()), &x);
        assert_close(gradient(&|x| A::permute_rows(x, &tracked), &x), expected, 0.0);
        let expected = gradient(&|x| x.select(0, tracked.inverse.clone()), &up);
        assert_close(gradient(&|x| A::unpermute_rows(x, &tracked), &up), expected, 0.0);
    }
}

/// Sizes that exercise groups of query heads, whole blocks and rests of channels and keys.
const SIZES: [(usize, usize, usize, usize, usize); 4] =
    [(1, 1, 1, 1, 8), (3, 7, 4, 2, 16), (2, 45, 2, 1, 40), (4, 33, 3, 3, 6)];

fn norms(d: usize) -> HeadNorms<Flex> {
    HeadNorms {
        query: random([d]),
        key: random([d]),
        epsilon: 1e-6,
    }
}

fn input(
    (batch, seq, heads, kv_heads, d): (usize, usize, usize, usize, usize),
    padding: Option<Tensor<Flex, 2, Bool>>,
    positions: bool,
    normed: bool,
) -> AttentionInput<Flex> {
    let rope = RotaryEmbeddingConfig::new(2 * seq, d).init::<Flex>(&Default::default());
    let rotation = match positions {
        true => {
            let offsets = Tensor::arange(0..batch as i64, &Default::default()).reshape([batch, 1]);
            let positions = Tensor::arange(0..seq as i64, &Default::default()).reshape([1, seq]);
            rope.rotation(positions.repeat_dim(0, batch) + offsets)
        }
        false => rope.first(seq),
    };
    AttentionInput {
        query: random([batch, seq, heads * d]),
        key: random([batch, seq, kv_heads * d]),
        value: random([batch, seq, kv_heads * d]),
        norms: normed.then(|| norms(d)),
        cos: rotation.cos,
        sin: rotation.sin,
        padding,
        heads,
    }
}

/// Some keys are padding; the first sequence of several is padding altogether, the last starts with it. Also gives 1 for
/// the tokens that see any key, 0 for the others, whose results mean nothing: `[batch, seq, 1]`.
fn padding(batch: usize, seq: usize) -> (Tensor<Flex, 2, Bool>, Tensor<Flex, 3>) {
    let padded = |row: usize, t: usize| match row {
        0 if batch > 1 => true,
        row if row == batch - 1 => t < seq / 3,
        _ => (row * 7 + t * 5) % 4 == 1,
    };
    let tokens = || (0..batch * seq).map(|i| (i / seq, i % seq));
    let mask: Vec<bool> = tokens().map(|(row, t)| padded(row, t)).collect();
    let sees: Vec<f32> = tokens()
        .map(|(row, t)| f32::from((0..=t).any(|key| !padded(row, key))))
        .collect();
    (
        Tensor::from_data(TensorData::new(mask, [batch, seq]), &Default::default()),
        Tensor::from_data(TensorData::new(sees, [batch, seq, 1]), &Default::default()),
    )
}

/// Runs the definition of causal attention under autodiff, `A`, and takes its gradients.
fn differentiated<A: AutodiffBackend + LayerBackend>(
    input: AttentionInput<A::InnerBackend>,
    grad: Tensor<A::InnerBackend, 3>,
) -> AttentionGradients<A::InnerBackend> {
    let leaf = |x| Tensor::<A, 3>::from_inner(x).require_grad();
    let norm = |x| Tensor::<A, 1>::from_inner(x).require_grad();
    let (query, key, value) = (leaf(input.query), leaf(input.key), leaf(input.value));
    let norms = input.norms.map(|norms| HeadNorms {
        query: norm(norms.query),
        key: norm(norms.key),
        epsilon: norms.epsilon,
    });
    let output = composite::causal_attention(AttentionInput {
        query: query.clone(),
        key: key.clone(),
        value: value.clone(),
        norms: norms.clone(),
        cos: Tensor::from_inner(input.cos),
        sin: Tensor::from_inner(input.sin),
        padding: input.padding.map(Tensor::from_inner),
        heads: input.heads,
    });
    let grads = (output * Tensor::from_inner(grad)).sum().backward();
    let reached = "every input of attention reaches its output";
    AttentionGradients {
        query: query.grad(&grads).expect(reached),
        key: key.grad(&grads).expect(reached),
        value: value.grad(&grads).expect(reached),
        norms: norms.map(|norms| [norms.query, norms.key].map(|norm| norm.grad(&grads).expect(reached))),
    }
}

#[test]
fn causal_attention_and_its_gradient_equal_the_definition() {
    for sizes in SIZES {
        for (padded, positions, normed) in [
            (false, false, true),
            (true, false, true),
            (true, true, true),
            (true, true, false),
        ] {
            let (batch, seq, ..) = sizes;
            let (mask, sees) = padding(batch, seq);
            let input = input(sizes, padded.then_some(mask), positions, normed);
            let sees = if padded { sees } else { sees.ones_like() };
            let output = composite::causal_attention(input.clone()) * sees.clone();
            let actual = Flex::causal_attention(input.clone());
            assert!(actual.clone().into_data().iter::<f32>().all(f32::is_finite));
            assert_close(actual * sees.clone(), output.clone(), 2e-5);

            let up = random::<Flex, 3>(output.dims()) * sees;
            let expected = differentiated::<A>(input.clone(), up.clone());
            let written_out = composite::causal_attention_backward(input.clone(), up.clone());
            assert_gradients(written_out, expected.clone());
            let actual = Flex::causal_attention_backward(input.clone(), up.clone());
            assert_gradients(actual, expected.clone());

            // The node on Autodiff, on the decorated backend.
            type N = Nvfp4<Flex>;
            type AN = Autodiff<N>;
            let node =
                |x: &Tensor<Flex, 3>| Tensor::<AN, 3>::from_data(x.to_data(), &Default::default()).require_grad();
            let norm =
                |x: &Tensor<Flex, 1>| Tensor::<AN, 1>::from_data(x.to_data(), &Default::default()).require_grad();
            let tracked = AttentionInput::<AN> {
                query: node(&input.query),
                key: node(&input.key),
                value: node(&input.value),
                norms: input.norms.as_ref().map(|norms| HeadNorms {
                    query: norm(&norms.query),
                    key: norm(&norms.key),
                    epsilon: norms.epsilon,
                }),
                cos: Tensor::from_data(input.cos.to_data(), &Default::default()),
                sin: Tensor::from_data(input.sin.to_data(), &Default::default()),
                padding: input
                    .padding
                    .as_ref()
                    .map(|p| Tensor::from_data(p.to_data(), &Default::default())),
                heads: input.heads,
            };
            let up = Tensor::<AN, 3>::from_data(up.to_data(), &Default::default());
            let grads = (AN::causal_attention(tracked.clone()) * up).sum().backward();
            let plain = |x: Tensor<N, 3>| Tensor::<Flex, 3>::from_data(x.into_data(), &Default::default());
            let plain_norm = |x: Tensor<N, 1>| Tensor::<Flex, 1>::from_data(x.into_data(), &Default::default());
            assert_gradients(
                AttentionGradients {
                    query: plain(tracked.query.grad(&grads).unwrap()),
                    key: plain(tracked.key.grad(&grads).unwrap()),
                    value: plain(tracked.value.grad(&grads).unwrap()),
                    norms: tracked
                        .norms
                        .map(|norms| [norms.query, norms.key].map(|norm| plain_norm(norm.grad(&grads).unwrap()))),
                },
                expected,
            );
        }
    }
}

fn assert_gradients(actual: AttentionGradients<Flex>, expected: AttentionGradients<Flex>) {
    assert_close(actual.query, expected.query, 1e-4);
    assert_close(actual.key, expected.key, 1e-4);
    assert_close(actual.value, expected.value, 1e-4);
    assert_eq!(actual.norms.is_some(), expected.norms.is_some());
    for (actual, expected) in actual
        .norms
        .into_iter()
        .flatten()
        .zip(expected.norms.into_iter().flatten())
    {
        assert_close(actual, expected, 5e-4);
    }
}

#[test]
fn gradients_have_the_same_bits_on_any_number_of_threads() {
    let input = input((9, 20, 4, 2, 16), None, false, true);
    let (up, x, gamma) = (random([9, 20, 64]), random([999, 64]), random([64]));
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let grads = Flex::causal_attention_backward(input.clone(), up.clone());
            let (dx, d_gamma) = Flex::rms_norm_backward(x.clone(), gamma.clone(), 1e-6, x.clone());
            let [query_norm, key_norm] = grads.norms.expect("heads are normed");
            (
                [grads.query.into_data(), grads.key.into_data(), grads.value.into_data()],
                [
                    query_norm.into_data(),
                    key_norm.into_data(),
                    d_gamma.into_data(),
                    dx.into_data(),
                ],
            )
        })
    };
    assert_eq!(run(1), run(3));
}

#[test]
fn cached_attention_equals_the_definition() {
    let (heads, kv_heads, d, max_seq_len) = (4, 2, 40, 40);
    let rope = RotaryEmbeddingConfig::new(max_seq_len, d).init::<Flex>(&Default::default());
    let place = |slot, position| TokenPlace { slot, position };
    let steps = [
        // Slot 0 gets a prompt of 35; slot 2 copies it; slot 1 starts with one token.
        CacheStep {
            tokens: (0..35)
                .map(|p| place(0, p))
                .chain([place(2, 34), place(1, 0)])
                .collect(),
            copies: vec![PrefixCopy {
                from: 0,
                to: 2,
                len: 34,
            }],
        },
        CacheStep {
            tokens: vec![place(1, 1), place(2, 35), place(0, 35)],
            copies: vec![],
        },
        // A copy of a copy.
        CacheStep {
            tokens: vec![place(1, 34), place(3, 30)],
            copies: [(0, 1, 34), (1, 3, 30)]
                .map(|(from, to, len)| PrefixCopy { from, to, len })
                .to_vec(),
        },
    ];
    let cache = || {
        KvCacheConfig {
            num_layers: 1,
            slots: 4,
            num_key_value_heads: kv_heads,
            max_seq_len,
            head_dim: d,
        }
        .init::<Flex>(&Default::default())
        .layers
        .remove(0)
    };
    for norms in [Some(norms(d)), None] {
        let (mut a, mut b) = (cache(), cache());
        for step in &steps {
            let n = step.tokens.len();
            let qkv = CachedQkv {
                query: random([n, heads * d]),
                key: random([n, kv_heads * d]),
                value: random([n, kv_heads * d]),
                norms: norms.clone(),
                rope: rope.clone(),
                heads,
            };
            assert_close(
                Flex::cached_attention(qkv.clone(), &mut a, step),
                composite::cached_attention(qkv, &mut b, step),
                1e-5,
            );
            assert_close(a.keys.clone(), b.keys.clone(), 1e-5);
            assert_close(a.values.clone(), b.values.clone(), 0.0);
        }
    }
}

#[test]
fn decoding_has_the_bits_of_whole_sequences() {
    for normed in [true, false] {
        decoding_equals_whole_sequences(normed);
    }
}

fn decoding_equals_whole_sequences(normed: bool) {
    let (batch, seq, heads, kv_heads, d) = (3, 37, 4, 2, 16);
    let input = input((batch, seq, heads, kv_heads, d), None, false, normed);
    let whole = Flex::causal_attention(input.clone());
    let mut cache = KvCacheConfig {
        num_layers: 1,
        slots: batch,
        num_key_value_heads: kv_heads,
        max_seq_len: seq,
        head_dim: d,
    }
    .init::<Flex>(&Default::default());
    let rope = RotaryEmbeddingConfig::new(2 * seq, d).init::<Flex>(&Default::default());
    for position in 0..seq {
        let column = |x: &Tensor<Flex, 3>| x.clone().narrow(1, position, 1).squeeze_dim::<2>(1);
        let qkv = CachedQkv {
            query: column(&input.query),
            key: column(&input.key),
            value: column(&input.value),
            norms: input.norms.clone(),
            rope: rope.clone(),
            heads,
        };
        let step = CacheStep {
            tokens: (0..batch).map(|slot| TokenPlace { slot, position }).collect(),
            copies: vec![],
        };
        let decoded = Flex::cached_attention(qkv, &mut cache.layers[0], &step);
        assert_eq!(decoded.into_data(), column(&whole).into_data(), "position {position}");
    }
}
