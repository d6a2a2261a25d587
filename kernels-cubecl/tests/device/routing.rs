//! The choice of experts, and the order of rows by expert.
use crate::{Client, Random, client, upload, upload_i32};
use cubecl::server::Handle;
use kernels_cubecl::device::{Element, Matrix, order_by_expert, top_experts};

fn read(client: &Client, handle: &Handle, len: usize) -> Vec<i32> {
    let bytes = client.read_one(handle.clone()).unwrap();
    let words = bytes.as_chunks().0.iter();
    words.take(len).map(|word| i32::from_le_bytes(*word)).collect()
}

/// A stable sort, the largest first.
fn top(row: &[f32], k: usize) -> Vec<i32> {
    let key = |expert: &i32| match row[*expert as usize] {
        value if value.is_nan() => -1e38,
        value => value,
    };
    let mut experts: Vec<i32> = (0..row.len() as i32).collect();
    experts.sort_by(|a, b| key(b).partial_cmp(&key(a)).unwrap());
    experts.truncate(k);
    experts
}

#[test]
fn the_largest_logits_are_chosen_in_order() {
    let Some(client) = client() else { return };
    let mut random = Random::new(3);
    // More rows than one line of the grid has cubes; more experts than a cube has units; all experts; one.
    for (rows, experts, k) in [
        (1, 1, 1),
        (5, 8, 8),
        (64, 128, 8),
        (33, 60, 4),
        (3, 300, 16),
        (33_000, 4, 2),
    ] {
        let mut logits: Vec<f32> = (0..rows * experts).map(|_| random.normal()).collect();
        for value in logits.iter_mut() {
            // Ties, and what no model should give.
            match random.bits() % 16 {
                0 => *value = 0.25,
                1 => *value = -0.0,
                2 => *value = 0.0,
                3 => *value = f32::NAN,
                4 => *value = f32::NEG_INFINITY,
                5 => *value = f32::INFINITY,
                _ => {}
            }
        }
        let matrix = upload(&client, Element::F32, &logits, rows, experts);
        let chosen = read(&client, &top_experts(&client, &matrix, k).unwrap(), rows * k);
        for (row, chosen) in logits.chunks(experts).zip(chosen.chunks(k)) {
            assert_eq!(chosen, top(row, k), "{rows} rows, {experts} experts: {row:?}");
        }
    }
}

#[test]
fn logits_may_be_a_strided_view() {
    let Some(client) = client() else { return };
    let mut random = Random::new(4);
    let (rows, experts, k) = (7, 12, 3);
    let by_expert: Vec<f32> = (0..rows * experts).map(|_| random.normal()).collect();
    let matrix = Matrix {
        strides: [1, rows],
        ..upload(&client, Element::F32, &by_expert, rows, experts)
    };
    let chosen = read(&client, &top_experts(&client, &matrix, k).unwrap(), rows * k);
    for (row, chosen) in chosen.chunks(k).enumerate() {
        let logits: Vec<f32> = (0..experts).map(|expert| by_expert[expert * rows + row]).collect();
        assert_eq!(chosen, top(&logits, k));
    }
}

#[test]
fn logits_of_another_type_and_more_choices_than_experts_are_refused() {
    let Some(client) = client() else { return };
    let logits = upload(&client, Element::F32, &[0.0; 8], 2, 4);
    let error = top_experts(&client, &logits, 5).unwrap_err();
    assert_eq!(
        error.to_string(),
        "experts to choose of each token, at most: expected 4, got 5"
    );
    let logits = upload(&client, Element::F16, &[0.0; 8], 2, 4);
    let error = top_experts(&client, &logits, 1).unwrap_err();
    assert_eq!(
        error.to_string(),
        "a choice of experts of F16 is not available on this device: it is made for f32"
    );
}

#[test]
fn rows_of_an_expert_come_together_and_stay_in_order() {
    let Some(client) = client() else { return };
    let mut random = Random::new(5);
    // Fewer rows than units, more, no multiple of them; experts without rows; none at all.
    for (rows, experts) in [(0, 4), (1, 1), (200, 7), (256, 3), (1000, 200), (70_001, 5)] {
        let ids: Vec<i32> = (0..rows)
            .map(|_| (random.bits() % experts as u32) as i32 / 2 * 2)
            .collect();
        let ids: Vec<i32> = ids.into_iter().map(|id| id.min(experts - 1)).collect();
        let sorted = order_by_expert(&client, &upload_i32(&client, &ids), rows, experts as usize);

        let mut order: Vec<i32> = (0..rows as i32).collect();
        order.sort_by_key(|row| ids[*row as usize]);
        let mut inverse = vec![0; rows];
        let mut counts = vec![0; experts as usize];
        for (place, row) in order.iter().enumerate() {
            inverse[*row as usize] = place as i32;
            counts[ids[*row as usize] as usize] += 1;
        }
        assert_eq!(
            read(&client, &sorted.order, rows),
            order,
            "{rows} rows, {experts} experts"
        );
        assert_eq!(read(&client, &sorted.inverse, rows), inverse);
        assert_eq!(read(&client, &sorted.counts, experts as usize), counts);
    }
}

#[test]
fn ids_that_are_no_experts_have_places_too() {
    let Some(client) = client() else { return };
    let ids = upload_i32(&client, &[2, -1, 9, 0, i32::MIN, i32::MAX, 1, 1]);
    let sorted = order_by_expert(&client, &ids, 8, 3);
    assert_eq!(read(&client, &sorted.order, 8), [1, 3, 4, 6, 7, 0, 2, 5]);
    assert_eq!(read(&client, &sorted.inverse, 8), [5, 0, 6, 1, 2, 7, 3, 4]);
    assert_eq!(read(&client, &sorted.counts, 3), [3, 2, 3]);
}
