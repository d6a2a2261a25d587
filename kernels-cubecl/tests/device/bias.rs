//! A bias, and the cast after it.
use crate::{client, download, round_to, upload};
use kernels_cubecl::device::{Element, add_bias};

#[test]
fn a_bias_is_added_in_f32_before_the_one_cast() {
    let Some(client) = client() else { return };
    // More values than one pass of the largest grid takes.
    for (rows, columns) in [(1, 1), (3, 7), (2, 600_000)] {
        let y: Vec<f32> = (0..rows * columns).map(|i| (i % 1013) as f32 * 0.37 - 150.0).collect();
        let bias: Vec<f32> = (0..columns).map(|i| (i % 31) as f32 * 0.011 - 0.1).collect();
        for from in [Element::F32, Element::F16, Element::BF16] {
            for to in [Element::F32, Element::F16, Element::BF16] {
                let (y, b) = (
                    upload(&client, Element::F32, &y, rows, columns),
                    upload(&client, from, &bias, 1, columns),
                );
                if ![from, to].iter().all(|element| element.is_native(&client)) {
                    assert!(add_bias(&client, &y, &b, to).is_err(), "{from:?} to {to:?}");
                    continue;
                }
                let sum = add_bias(&client, &y, &b, to).unwrap();
                let values = download(&client, &y);
                let bias = round_to(from, &bias);
                let expected: Vec<f32> = (0..rows * columns).map(|i| values[i] + bias[i % columns]).collect();
                assert_eq!(download(&client, &sum), round_to(to, &expected), "{from:?} to {to:?}");
            }
        }
    }
    let (y, bias) = (
        upload(&client, Element::F32, &[1.0; 6], 2, 3),
        upload(&client, Element::F32, &[1.0; 2], 1, 2),
    );
    let error = add_bias(&client, &y, &bias, Element::F32).unwrap_err();
    assert_eq!(error.to_string(), "values of a bias: expected 3, got 2");
}
