//! RMS norm, SwiGLU, softmax and rotary positions against sums in f64.
use crate::{Client, Random, client, download, upload};
use kernels_cubecl::device::{
    Element, Matrix, RotaryRows, log_softmax_parts, rms_norm, rms_norm_backward, rotate_heads, softmax,
    softmax_backward, swiglu, swiglu_backward,
};

/// Rows, one value, a warp's worth, neither, more than a cube has units; more rows than a line of the grid.
const SHAPES: [(usize, usize); 7] = [(1, 1), (3, 2), (64, 64), (5, 100), (7, 1024), (2, 1500), (33_000, 2)];
const EPSILON: f64 = 1e-5;

#[track_caller]
fn assert_close(actual: &[f32], expected: &[f64], scale: f64) {
    assert_eq!(actual.len(), expected.len());
    for (i, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        let difference = (*actual as f64 - expected).abs();
        assert!(difference <= 1e-5 * scale, "{i}: {actual}, expected {expected}");
    }
}

fn normal(random: &mut Random, len: usize) -> Vec<f32> {
    (0..len).map(|_| random.normal()).collect()
}

/// The values of a row-major matrix, on the device with gaps between rows and columns.
fn upload_strided(client: &Client, values: &[f32], rows: usize, columns: usize) -> Matrix {
    let (row, column) = (3 * columns + 2, 3);
    let mut gaps = vec![f32::NAN; rows * row];
    for (i, value) in values.iter().enumerate() {
        gaps[i / columns * row + i % columns * column] = *value;
    }
    Matrix {
        strides: [row, column],
        ..upload(client, Element::F32, &gaps, rows, columns)
    }
}

fn inverse_rms(row: &[f32]) -> f64 {
    let squares: f64 = row.iter().map(|x| (*x as f64).powi(2)).sum();
    1.0 / (squares / row.len() as f64 + EPSILON).sqrt()
}

#[test]
fn rows_are_normed() {
    let Some(client) = client() else { return };
    let mut random = Random::new(10);
    for (rows, columns) in SHAPES {
        let x = normal(&mut random, rows * columns);
        let gamma = normal(&mut random, columns);
        let expected: Vec<f64> = x
            .chunks(columns)
            .flat_map(|row| {
                let inverse = inverse_rms(row);
                let products = row
                    .iter()
                    .zip(&gamma)
                    .map(move |(x, g)| *x as f64 * inverse * *g as f64);
                products.collect::<Vec<_>>()
            })
            .collect();
        let gamma = upload(&client, Element::F32, &gamma, 1, columns);
        for x in [
            upload(&client, Element::F32, &x, rows, columns),
            upload_strided(&client, &x, rows, columns),
        ] {
            let y = rms_norm(&client, &x, &gamma, EPSILON as f32).unwrap();
            assert_close(&download(&client, &y), &expected, 4.0);
        }
    }
}

#[test]
fn gradients_of_the_norm_are_those_of_its_definition() {
    let Some(client) = client() else { return };
    let mut random = Random::new(11);
    for (rows, columns) in SHAPES {
        let x = normal(&mut random, rows * columns);
        let grad = normal(&mut random, rows * columns);
        let gamma = normal(&mut random, columns);
        let (mut dx, mut products) = (Vec::new(), Vec::new());
        for (x, grad) in x.chunks(columns).zip(grad.chunks(columns)) {
            let inverse = inverse_rms(x);
            let slope = |i: usize| grad[i] as f64 * gamma[i] as f64;
            let normed = |i: usize| x[i] as f64 * inverse;
            let along = (0..columns).map(|i| slope(i) * normed(i)).sum::<f64>() / columns as f64;
            dx.extend((0..columns).map(|i| (slope(i) - normed(i) * along) * inverse));
            products.extend((0..columns).map(|i| grad[i] as f64 * normed(i)));
        }
        let gamma = upload(&client, Element::F32, &gamma, 1, columns);
        let gradients = rms_norm_backward(
            &client,
            &upload_strided(&client, &x, rows, columns),
            &gamma,
            EPSILON as f32,
            &upload_strided(&client, &grad, rows, columns),
        )
        .unwrap();
        // A row of tiny values has a large inverse.
        let scale = dx.iter().fold(1.0f64, |largest, d| largest.max(d.abs()));
        assert_close(&download(&client, &gradients.x), &dx, scale);
        assert_close(&download(&client, &gradients.gamma_rows), &products, 4.0);
    }
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

#[test]
fn swiglu_and_its_gradient() {
    let Some(client) = client() else { return };
    let mut random = Random::new(12);
    for (rows, d) in SHAPES {
        let mut gate_up: Vec<f32> = normal(&mut random, rows * 2 * d).iter().map(|x| 3.0 * x).collect();
        // Where the exponential overflows.
        gate_up[0] = -200.0;
        let grad = normal(&mut random, rows * d);
        let (mut expected, mut slopes) = (Vec::new(), Vec::new());
        for (row, grad) in gate_up.chunks(2 * d).zip(grad.chunks(d)) {
            let (gate, up) = row.split_at(d);
            let both = || gate.iter().zip(up).map(|(gate, up)| (*gate as f64, *up as f64));
            expected.extend(both().map(|(gate, up)| silu(gate) * up));
            slopes.extend(both().zip(grad).map(|((gate, up), grad)| {
                let sigmoid = 1.0 / (1.0 + (-gate).exp());
                *grad as f64 * up * (sigmoid + gate * sigmoid * (1.0 - sigmoid))
            }));
            slopes.extend(both().zip(grad).map(|((gate, _), grad)| *grad as f64 * silu(gate)));
        }
        for gate_up in [
            upload(&client, Element::F32, &gate_up, rows, 2 * d),
            upload_strided(&client, &gate_up, rows, 2 * d),
        ] {
            assert_close(&download(&client, &swiglu(&client, &gate_up).unwrap()), &expected, 30.0);
            let grad = upload_strided(&client, &grad, rows, d);
            let slopes_here = swiglu_backward(&client, &gate_up, &grad).unwrap();
            assert_close(&download(&client, &slopes_here), &slopes, 30.0);
        }
    }
}

/// `exp(x − largest)` of a row, and the largest.
fn exponentials(row: &[f32]) -> (Vec<f64>, f32) {
    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exponentials = row.iter().map(|x| (*x as f64 - largest as f64).exp());
    (exponentials.collect(), largest)
}

#[test]
fn softmax_its_gradient_and_the_parts_of_its_logarithm() {
    let Some(client) = client() else { return };
    let mut random = Random::new(14);
    for (rows, columns) in SHAPES.into_iter().chain([(3, 40_000)]) {
        let mut x: Vec<f32> = normal(&mut random, rows * columns).iter().map(|x| 5.0 * x).collect();
        // What masks write, and what overflows without the largest taken off.
        for (i, value) in x.iter_mut().enumerate().filter(|(i, _)| i % columns > 0) {
            match i % 7 {
                0 => *value = -1e30,
                1 if i % 5 == 0 && i / columns % 3 == 1 => *value = 300.0,
                2 if i % 11 == 0 => *value = f32::NEG_INFINITY,
                _ => {}
            }
        }
        let grad = normal(&mut random, rows * columns);
        let (mut y, mut dx, mut largest, mut log_sum) = (vec![], vec![], vec![], vec![]);
        for (row, grad) in x.chunks(columns).zip(grad.chunks(columns)) {
            let (exponentials, of_row) = exponentials(row);
            let sum: f64 = exponentials.iter().sum();
            let along: f64 = exponentials.iter().zip(grad).map(|(e, g)| e / sum * *g as f64).sum();
            y.extend(exponentials.iter().map(|e| e / sum));
            dx.extend(
                exponentials
                    .iter()
                    .zip(grad)
                    .map(|(e, g)| e / sum * (*g as f64 - along)),
            );
            largest.push(of_row);
            log_sum.push(sum.ln());
        }
        let grad = upload_strided(&client, &grad, rows, columns);
        for x in [
            upload(&client, Element::F32, &x, rows, columns),
            upload_strided(&client, &x, rows, columns),
        ] {
            let weights = softmax(&client, &x).unwrap();
            // Of many columns each has little.
            let largest_weight = y.iter().copied().fold(0.0, f64::max);
            assert_close(&download(&client, &weights), &y, largest_weight);
            let slopes = softmax_backward(&client, &weights, &grad).unwrap();
            assert_close(&download(&client, &slopes), &dx, 4.0 * largest_weight);
            let parts = log_softmax_parts(&client, &x).unwrap();
            assert_eq!(download(&client, &parts.largest), largest);
            assert_close(&download(&client, &parts.log_sum), &log_sum, 4.0);
        }
    }
}

#[test]
fn a_row_with_nan_is_nan_and_its_neighbours_are_not() {
    let Some(client) = client() else { return };
    let mut values = vec![0.5; 3 * 700];
    values[700 + 650] = f32::NAN;
    let x = upload(&client, Element::F32, &values, 3, 700);
    let weights = download(&client, &softmax(&client, &x).unwrap());
    let log_sums = download(&client, &log_softmax_parts(&client, &x).unwrap().log_sum);
    let gamma = upload(&client, Element::F32, &[1.0; 700], 1, 700);
    let normed = download(&client, &rms_norm(&client, &x, &gamma, 1e-6).unwrap());
    for (row, log_sum) in log_sums.iter().enumerate() {
        let is_nan = row == 1;
        assert_eq!(log_sum.is_nan(), is_nan);
        assert!(weights[row * 700..][..700].iter().all(|w| w.is_nan() == is_nan));
        assert!(normed[row * 700..][..700].iter().all(|n| n.is_nan() == is_nan));
    }
}

#[test]
fn heads_are_rotated_by_the_position_of_their_token() {
    let Some(client) = client() else { return };
    let mut random = Random::new(13);
    // Sequences, tokens of each, heads, channels.
    for (sequences, tokens, heads, d) in [(1, 1, 1, 2), (2, 5, 3, 8), (1, 7, 4, 64), (3, 33, 16, 6)] {
        let rows = sequences * tokens * heads;
        let x = normal(&mut random, rows * d);
        let angle = |token: usize, i: usize| (token * (i % (d / 2) + 1)) as f64 * 0.37;
        let table = |f: fn(f64) -> f64, sign: f64| -> Vec<f32> {
            let value = |at: usize| match at % d < d / 2 {
                true => sign * f(angle(at / d, at % d)),
                false => f(angle(at / d, at % d)),
            };
            (0..tokens * d).map(|at| value(at) as f32).collect()
        };
        let rotary = RotaryRows {
            cos: upload(&client, Element::F32, &table(f64::cos, 1.0), tokens, d),
            sin: upload(&client, Element::F32, &table(f64::sin, -1.0), tokens, d),
        };
        let expected: Vec<f64> = (0..rows * d)
            .map(|at| {
                let (row, i) = (at / d, at % d);
                let (sin, cos) = angle(row / heads % tokens, i).sin_cos();
                let pair = |i: usize| x[row * d + i] as f64;
                match i < d / 2 {
                    true => pair(i) * cos - pair(i + d / 2) * sin,
                    false => pair(i) * cos + pair(i - d / 2) * sin,
                }
            })
            .collect();
        for x in [
            upload(&client, Element::F32, &x, rows, d),
            upload_strided(&client, &x, rows, d),
        ] {
            let y = rotate_heads(&client, &x, heads, &rotary).unwrap();
            assert_close(&download(&client, &y), &expected, 1.0);
        }
    }
}

#[test]
fn no_rows_give_no_rows() {
    let Some(client) = client() else { return };
    let none = upload(&client, Element::F32, &[], 0, 8);
    let gamma = upload(&client, Element::F32, &[1.0; 8], 1, 8);
    let table = RotaryRows {
        cos: none.clone(),
        sin: none.clone(),
    };
    assert_eq!(rms_norm(&client, &none, &gamma, 1e-6).unwrap().rows, 0);
    assert_eq!(
        rms_norm_backward(&client, &none, &gamma, 1e-6, &none).unwrap().x.rows,
        0
    );
    assert_eq!(swiglu(&client, &none).unwrap().columns, 4);
    assert_eq!(softmax(&client, &none).unwrap().rows, 0);
    assert_eq!(softmax_backward(&client, &none, &none).unwrap().rows, 0);
    assert_eq!(log_softmax_parts(&client, &none).unwrap().log_sum.rows, 0);
    assert_eq!(rotate_heads(&client, &none, 2, &table).unwrap().rows, 0);
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let Some(client) = client() else { return };
    let f32s = |rows, columns| upload(&client, Element::F32, &vec![0.0; rows * columns], rows, columns);
    let (x, gamma) = (f32s(2, 6), f32s(1, 4));
    let error = rms_norm(&client, &x, &gamma, 1e-6).unwrap_err();
    assert_eq!(error.to_string(), "values of gamma: expected 6, got 4");
    let error = rms_norm_backward(&client, &x, &f32s(1, 6), 1e-6, &f32s(3, 6)).unwrap_err();
    assert_eq!(error.to_string(), "rows of the gradient: expected 2, got 3");
    let apart = Matrix {
        strides: [12, 2],
        ..f32s(1, 6)
    };
    let error = rms_norm(&client, &x, &apart, 1e-6).unwrap_err();
    assert_eq!(
        error.to_string(),
        "elements from one value of gamma to the next: expected 1, got 2"
    );
    let error = swiglu(&client, &f32s(2, 5)).unwrap_err();
    assert_eq!(error.to_string(), "columns of gate and up: expected 4, got 5");
    let error = swiglu_backward(&client, &x, &x).unwrap_err();
    assert_eq!(error.to_string(), "columns of the gradient: expected 3, got 6");
    let table = |rows, columns| RotaryRows {
        cos: f32s(rows, columns),
        sin: f32s(rows, columns),
    };
    let refusal = |x: &Matrix, heads, table: RotaryRows| {
        let error = rotate_heads(&client, x, heads, &table).unwrap_err();
        error.to_string()
    };
    assert_eq!(
        refusal(&f32s(2, 5), 1, table(1, 5)),
        "channels of a head: expected 6, got 5"
    );
    assert_eq!(
        refusal(&x, 1, table(1, 4)),
        "channels of the rotary table: expected 6, got 4"
    );
    assert_eq!(refusal(&f32s(5, 6), 2, table(1, 6)), "rows of heads: expected 6, got 5");
    assert_eq!(refusal(&f32s(6, 6), 2, table(2, 6)), "tokens: expected 4, got 3");
    assert_eq!(
        refusal(&x, 1, table(0, 6)),
        "rows of the rotary table, at least: expected 1, got 0"
    );
    assert_eq!(
        refusal(&x, 0, table(1, 6)),
        "heads of a token, at least: expected 1, got 0"
    );
    let huge = Matrix::contiguous(x.handle.clone(), Element::F32, 1 << 20, 1 << 12);
    let error = softmax(&client, &huge).unwrap_err();
    assert_eq!(
        error.to_string(),
        "a softmax over 4294967296 values is not available on this device: kernels count values in 32 bits"
    );
    let error = softmax_backward(&client, &x, &f32s(2, 5)).unwrap_err();
    assert_eq!(error.to_string(), "columns of the gradient: expected 6, got 5");
    let half = upload(&client, Element::F16, &[0.0; 12], 2, 6);
    let error = rms_norm(&client, &half, &f32s(1, 6), 1e-6).unwrap_err();
    assert_eq!(
        error.to_string(),
        "an RMS norm of F16 is not available on this device: it is made for f32"
    );
}
