//! Products of dense f32 matrices: experts that are not packed, the gradients of all of them, and one weight for all rows.
use crate::{Client, Random, client, download, upload};
use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels_cubecl::device::{
    Element, Matrix, MatrixStack, dense_products_use_bf16, grouped_matmul_dense, grouped_outer_product, matmul_dense,
    outer_product_dense,
};

/// Of `Σ|x · w|`, for sums of `k` products.
fn tolerance(client: &Client, k: usize) -> f64 {
    let split = if dense_products_use_bf16(client) { 3.0 } else { 0.0 };
    split * 2f64.powi(-16) + (k + 8) as f64 * 2f64.powi(-23)
}

/// Where the values of a matrix lie.
#[derive(Clone, Copy, Debug)]
enum Layout {
    Rows,
    Columns,
    /// With so many words between rows.
    GappedRows(usize),
    /// With so many words between columns.
    GappedColumns(usize),
    /// Every so many words.
    Spread(usize),
}

const LAYOUTS: [Layout; 7] = [
    Layout::Rows,
    Layout::Columns,
    Layout::GappedRows(4),
    Layout::GappedRows(3),
    Layout::GappedColumns(8),
    Layout::GappedColumns(1),
    Layout::Spread(2),
];

impl Layout {
    fn strides(self, rows: usize, columns: usize) -> [usize; 2] {
        match self {
            Self::Rows => [columns, 1],
            Self::Columns => [1, rows],
            Self::GappedRows(gap) => [columns + gap, 1],
            Self::GappedColumns(gap) => [1, rows + gap],
            Self::Spread(each) => [columns * each, each],
        }
    }
}

/// Row-major matrices on the device in another layout, each behind the one before; NaN between the values.
fn stack(client: &Client, values: &[f32], shape: [usize; 3], layout: Layout) -> MatrixStack {
    let [count, rows, columns] = shape;
    let [row, column] = layout.strides(rows, columns);
    let group = (rows * row).max(columns * column);
    let mut words = vec![f32::NAN; (count * group).max(4)];
    for (i, value) in values.iter().enumerate() {
        words[i / (rows * columns) * group + i / columns % rows * row + i % columns * column] = *value;
    }
    MatrixStack {
        handle: client.create_from_slice(f32::as_bytes(&words)),
        shape,
        strides: [group, row, column],
    }
}

fn matrix(client: &Client, values: &[f32], rows: usize, columns: usize, layout: Layout) -> Matrix {
    let stack = stack(client, values, [1, rows, columns], layout);
    Matrix {
        strides: [stack.strides[1], stack.strides[2]],
        ..Matrix::contiguous(stack.handle, Element::F32, rows, columns)
    }
}

fn upload_counts(client: &Client, counts: &[u32]) -> Handle {
    client.create_from_slice(u32::as_bytes(counts))
}

/// The next buffer of so many words is likely to hold NaN.
fn poison(client: &Client, words: usize) {
    drop(client.create_from_slice(f32::as_bytes(&vec![f32::NAN; words.max(4)])));
}

fn multiply(client: &Client, x: &Matrix, w: &MatrixStack, counts: &[u32]) -> Vec<f32> {
    poison(client, x.rows * w.shape[2]);
    let y = grouped_matmul_dense(client, x, w, &upload_counts(client, counts)).unwrap();
    assert_eq!((y.rows, y.columns), (x.rows, w.shape[2]));
    download(client, &y)
}

/// `[experts, m, n]`.
fn outer(client: &Client, x: &Matrix, g: &Matrix, counts: &[u32]) -> Vec<f32> {
    let (rows, columns) = (counts.len() * x.columns, g.columns);
    poison(client, rows * columns);
    let dw = grouped_outer_product(client, x, g, &upload_counts(client, counts), counts.len()).unwrap();
    download(client, &Matrix::contiguous(dw, Element::F32, rows, columns))
}

/// Compares with `Σ x(d) · w(d)` over depths, within a bound.
fn assert_sum(
    client: &Client,
    actual: f32,
    depths: usize,
    product: impl Fn(usize) -> (f32, f32),
    what: impl Fn() -> String,
) {
    let (mut sum, mut size) = (0.0, 0.0);
    for depth in 0..depths {
        let (x, w) = product(depth);
        let product = f64::from(x) * f64::from(w);
        sum += product;
        size += product.abs();
    }
    let (error, bound) = ((f64::from(actual) - sum).abs(), tolerance(client, depths) * size);
    assert!(error <= bound, "{}: {actual} for {sum}, bound {bound:e}", what());
}

fn check_matmul(client: &Client, counts: &[u32], k: usize, n: usize, x_layout: Layout, w_layout: Layout) {
    let rows = counts.iter().sum::<u32>() as usize;
    let x = Random::new(1).activations(rows, k);
    let w = Random::new(2).weights(counts.len() * k, n);
    let x_device = matrix(client, &x, rows, k, x_layout);
    let w_device = stack(client, &w, [counts.len(), k, n], w_layout);
    let y = multiply(client, &x_device, &w_device, counts);
    let mut t = 0;
    for (e, count) in counts.iter().enumerate() {
        for _ in 0..*count {
            for c in 0..n {
                let product = |i| (x[t * k + i], w[(e * k + i) * n + c]);
                assert_sum(client, y[t * n + c], k, product, || {
                    format!("{counts:?}, k {k}, {x_layout:?} · {w_layout:?}, row {t}, column {c} of {n}")
                });
            }
            t += 1;
        }
    }
}

fn check_outer(client: &Client, counts: &[u32], m: usize, n: usize, x_layout: Layout, g_layout: Layout) {
    let rows = counts.iter().sum::<u32>() as usize;
    let x = Random::new(3).activations(rows, m);
    let g = Random::new(4).weights(rows, n);
    let x_device = matrix(client, &x, rows, m, x_layout);
    let g_device = matrix(client, &g, rows, n, g_layout);
    let dw = outer(client, &x_device, &g_device, counts);
    let mut first = 0;
    for (e, count) in counts.iter().enumerate() {
        let count = *count as usize;
        for r in 0..m {
            for c in 0..n {
                let product = |i| (x[(first + i) * m + r], g[(first + i) * n + c]);
                assert_sum(client, dw[(e * m + r) * n + c], count, product, || {
                    format!("{counts:?}, {x_layout:?}ᵀ · {g_layout:?}, expert {e}, [{r}, {c}] of [{m}, {n}]")
                });
            }
        }
        first += count;
    }
}

/// Experts without rows at the start, in the middle and at the end; tiles of tokens that are full, and not.
const GROUPS: [&[u32]; 6] = [
    &[1],
    &[0, 5, 0, 40, 16, 0],
    &[0, 0, 131],
    &[33, 8, 0, 1],
    &[128, 64],
    &[1, 1, 1, 1, 1, 1],
];

#[test]
fn each_row_meets_its_expert() {
    let Some(client) = client() else { return };
    for counts in GROUPS {
        for (k, n) in [
            (1, 1),
            (3, 5),
            (16, 8),
            (20, 36),
            (31, 64),
            (64, 66),
            (100, 132),
            (97, 129),
        ] {
            check_matmul(&client, counts, k, n, Layout::Rows, Layout::Rows);
            check_matmul(&client, counts, k, n, Layout::Rows, Layout::Columns);
        }
    }
    let large: &[(usize, usize, u32)] = match cfg!(feature = "cuda") {
        true => &[(1024, 768, 300), (384, 1024, 150), (2048, 40, 700)],
        false => &[(256, 136, 130)],
    };
    for (k, n, rows) in large {
        check_matmul(&client, &[*rows, 0, 77], *k, *n, Layout::Rows, Layout::Rows);
        check_matmul(&client, &[*rows, 0, 77], *k, *n, Layout::Rows, Layout::Columns);
    }
}

#[test]
fn matrices_may_lie_in_any_way() {
    let Some(client) = client() else { return };
    for counts in [GROUPS[1], GROUPS[2]] {
        for (k, n) in [(36, 68), (35, 67)] {
            for x in LAYOUTS {
                for w in LAYOUTS {
                    check_matmul(&client, counts, k, n, x, w);
                }
            }
        }
        for (m, n) in [(36, 132), (131, 67)] {
            for x in LAYOUTS {
                for g in LAYOUTS {
                    check_outer(&client, counts, m, n, x, g);
                }
            }
        }
    }
}

#[test]
fn an_outer_product_sums_over_an_expert_s_rows() {
    let Some(client) = client() else { return };
    for counts in GROUPS {
        for (m, n) in [
            (1, 1),
            (5, 3),
            (8, 16),
            (36, 20),
            (64, 31),
            (66, 64),
            (132, 100),
            (129, 97),
        ] {
            check_outer(&client, counts, m, n, Layout::Rows, Layout::Rows);
        }
    }
    let large: &[(usize, usize, u32)] = match cfg!(feature = "cuda") {
        true => &[(1024, 768, 300), (384, 1024, 1100)],
        false => &[(136, 130, 260)],
    };
    for (m, n, rows) in large {
        check_outer(&client, &[*rows, 0, 77], *m, *n, Layout::Rows, Layout::Rows);
    }
}

/// Integers whose sums f32 holds: whatever the order, there is one result.
#[test]
fn small_integers_multiply_exactly() {
    let Some(client) = client() else { return };
    let counts = [70, 0, 3, 140];
    let (rows, k, n) = (213, 77, 150);
    let integers = |seed, len| -> Vec<f32> {
        let mut random = Random::new(seed);
        (0..len).map(|_| (random.bits() % 513) as f32 - 256.0).collect()
    };
    let (x, w, g) = (integers(1, rows * k), integers(2, 4 * k * n), integers(3, rows * n));
    let x_device = upload(&client, Element::F32, &x, rows, k);
    let y = multiply(
        &client,
        &x_device,
        &stack(&client, &w, [4, k, n], Layout::Rows),
        &counts,
    );
    let dw = outer(&client, &x_device, &upload(&client, Element::F32, &g, rows, n), &counts);
    let mut expected_dw = vec![0.0; 4 * k * n];
    let mut t = 0;
    for (e, count) in counts.into_iter().enumerate() {
        for _ in 0..count {
            for c in 0..n {
                let sum: f32 = (0..k).map(|i| x[t * k + i] * w[(e * k + i) * n + c]).sum();
                assert_eq!(y[t * n + c], sum, "row {t}, column {c}");
                for i in 0..k {
                    expected_dw[(e * k + i) * n + c] += x[t * k + i] * g[t * n + c];
                }
            }
            t += 1;
        }
    }
    assert!(dw == expected_dw);
}

/// However many rows its expert has, wherever it stands among them, and however the operands lie.
#[test]
fn a_row_s_bits_are_its_own() {
    let Some(client) = client() else { return };
    let bits = |y: &[f32]| y.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    for (k, n) in [(100, 132), (67, 131)] {
        let w = Random::new(5).weights(3 * k, n);
        let row = Random::new(6).activations(1, k);
        let alone = multiply(
            &client,
            &upload(&client, Element::F32, &row, 1, k),
            &stack(&client, &w[k * n..2 * k * n], [1, k, n], Layout::Rows),
            &[1],
        );
        for (before, among) in [(0, 1), (3, 1), (0, 9), (17, 40), (1, 130), (150, 300)] {
            let counts = [before, among, 2];
            let rows = counts.iter().sum::<u32>() as usize;
            for at in [before, before + among / 2, before + among - 1] {
                let at = at as usize;
                let mut x = Random::new(7).activations(rows, k);
                x[at * k..][..k].copy_from_slice(&row);
                for (x_layout, w_layout) in [(Layout::Rows, Layout::Rows), (Layout::Columns, Layout::Columns)] {
                    let w = stack(&client, &w, [3, k, n], w_layout);
                    let y = multiply(&client, &matrix(&client, &x, rows, k, x_layout), &w, &counts);
                    assert!(
                        bits(&y[at * n..][..n]) == bits(&alone),
                        "{counts:?}, row {at}, {x_layout:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn what_is_not_finite_stays_in_its_row() {
    let Some(client) = client() else { return };
    let (k, n, counts) = (50, 140, [20, 0, 140, 1]);
    let rows = 161;
    let x = Random::new(8).activations(rows, k);
    let w = stack(&client, &Random::new(9).weights(4 * k, n), [4, k, n], Layout::Rows);
    let finite = multiply(&client, &upload(&client, Element::F32, &x, rows, k), &w, &counts);
    for (row, column, value) in [
        (0, 0, f32::NAN),
        (19, 49, f32::INFINITY),
        (21, 17, f32::NEG_INFINITY),
        (147, 3, f32::from_bits(0x7f80_0001)),
        (159, 33, f32::from_bits(0xffff_ffff)),
        (160, 48, f32::INFINITY),
    ] {
        let mut x = x.clone();
        x[row * k + column] = value;
        let y = multiply(&client, &upload(&client, Element::F32, &x, rows, k), &w, &counts);
        for (i, (y, finite)) in y.iter().zip(&finite).enumerate() {
            match i / n == row {
                true => assert!(!y.is_finite(), "row {row}, column {}: {y} of {value}", i % n),
                false => assert_eq!(y.to_bits(), finite.to_bits(), "row {}, {value} in row {row}", i / n),
            }
        }
    }
}

#[test]
fn nothing_to_sum_is_zero() {
    let Some(client) = client() else { return };
    let w = |k: usize, n: usize| stack(&client, &vec![1.0; 2 * k * n], [2, k, n], Layout::Rows);
    let x = |rows: usize, k: usize| upload(&client, Element::F32, &vec![1.0; rows * k], rows, k);
    assert!(multiply(&client, &x(0, 20), &w(20, 30), &[0, 0]).is_empty());
    assert!(multiply(&client, &x(5, 20), &w(20, 0), &[2, 3]).is_empty());
    assert!(multiply(&client, &x(5, 0), &w(0, 30), &[2, 3]) == [0.0; 150]);
    assert!(outer(&client, &x(0, 20), &x(0, 7), &[0, 0]) == [0.0; 280]);
    // Rows past the counts belong to no expert.
    let dw = outer(&client, &x(9, 20), &x(9, 7), &[2, 0, 3]);
    for (e, sum) in [2.0, 0.0, 3.0].into_iter().enumerate() {
        assert!(dw[e * 140..][..140] == [sum; 140], "expert {e}");
    }
}

/// The bits of a group of all rows, where there are tensor cores for it; otherwise an error that says so.
#[test]
fn one_weight_for_all_rows_is_a_group_of_them() {
    let Some(client) = client() else { return };
    let mut random = Random::new(47);
    let mut normal = |len: usize| -> Vec<f32> { (0..len).map(|_| random.normal()).collect() };
    for (rows, k, n) in [(1, 8, 4), (5, 99, 33), (64, 1024, 32), (300, 64, 130), (129, 256, 512)] {
        let (x, w, g) = (normal(rows * k), normal(k * n), normal(rows * n));
        for layout in LAYOUTS {
            let (x, w) = (matrix(&client, &x, rows, k, layout), matrix(&client, &w, k, n, layout));
            let g = matrix(&client, &g, rows, n, layout);
            if !dense_products_use_bf16(&client) {
                let error = matmul_dense(&client, &x, &w).unwrap_err();
                let expected = "a product of f32 on bf16 tensor cores is not available on this device: it has none";
                assert_eq!(error.to_string(), expected);
                assert_eq!(outer_product_dense(&client, &x, &g).unwrap_err(), error);
                continue;
            }
            let one = MatrixStack {
                handle: w.handle.clone(),
                shape: [1, k, n],
                strides: [0, w.strides[0], w.strides[1]],
            };
            poison(&client, rows * n);
            let y = download(&client, &matmul_dense(&client, &x, &w).unwrap());
            assert_eq!(
                y,
                multiply(&client, &x, &one, &[rows as u32]),
                "{rows} × {k} × {n}, {layout:?}"
            );
            poison(&client, k * n);
            let dw = download(&client, &outer_product_dense(&client, &x, &g).unwrap());
            assert_eq!(
                dw,
                outer(&client, &x, &g, &[rows as u32]),
                "{rows} × {k} × {n}, {layout:?}"
            );
        }
    }
    if dense_products_use_bf16(&client) {
        let (x, w) = (
            matrix(&client, &[1.0; 6], 2, 3, Layout::Rows),
            matrix(&client, &[1.0; 8], 4, 2, Layout::Rows),
        );
        let error = matmul_dense(&client, &x, &w).unwrap_err();
        assert_eq!(
            error.to_string(),
            "contraction length of the activations: expected 4, got 3"
        );
        let error = outer_product_dense(&client, &x, &w).unwrap_err();
        assert_eq!(error.to_string(), "rows of the gradient: expected 2, got 4");
    }
}
