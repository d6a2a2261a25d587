//! Attention over a cache against sums in f64.
use crate::{Client, Random, client, download, upload, upload_i32};
use cubecl::server::Handle;
use kernels_cubecl::device::{Element, KeyValueCache, Matrix, cached_attention};

/// Slots, heads of keys, heads of queries for each, channels; room for tokens, and columns of the keys.
struct Sizes {
    slots: usize,
    kv_heads: usize,
    group: usize,
    d: usize,
    room: usize,
    columns: usize,
}

struct Case {
    sizes: Sizes,
    keys: Vec<f32>,
    values: Vec<f32>,
    query: Vec<f32>,
    places: Vec<[i32; 2]>,
}

impl Case {
    /// What no token may see is NaN.
    fn new(random: &mut Random, sizes: Sizes, places: Vec<[i32; 2]>) -> Self {
        let Sizes {
            slots,
            kv_heads,
            group,
            d,
            room,
            columns,
        } = sizes;
        let seen: Vec<usize> = (0..slots as i32)
            .map(|slot| {
                places
                    .iter()
                    .filter(|p| p[0] == slot)
                    .map(|p| p[1] as usize + 1)
                    .max()
                    .unwrap_or(0)
            })
            .collect();
        let mut keys = vec![f32::NAN; slots * kv_heads * d * columns];
        let mut values = vec![f32::NAN; slots * kv_heads * room * d];
        for head in 0..slots * kv_heads {
            for column in 0..seen[head / kv_heads] {
                for i in 0..d {
                    keys[(head * d + i) * columns + column] = random.normal() * 2.0;
                    values[(head * room + column) * d + i] = random.normal();
                }
            }
        }
        let query = (0..places.len() * kv_heads * group * d)
            .map(|_| random.normal())
            .collect();
        Self {
            sizes,
            keys,
            values,
            query,
            places,
        }
    }

    fn expected(&self) -> Vec<f64> {
        let Sizes {
            kv_heads,
            group,
            d,
            room,
            columns,
            ..
        } = self.sizes;
        let mut y = Vec::new();
        for (token, [slot, position]) in self.places.iter().enumerate() {
            for head in 0..kv_heads * group {
                let query = &self.query[(token * kv_heads * group + head) * d..][..d];
                let head = *slot as usize * kv_heads + head / group;
                let score = |column: usize| -> f64 {
                    let key = |i: usize| self.keys[(head * d + i) * columns + column] as f64;
                    (0..d).map(|i| query[i] as f64 * key(i)).sum::<f64>() / (d as f64).sqrt()
                };
                let scores: Vec<f64> = (0..=*position as usize).map(score).collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for i in 0..d {
                    let value = |column: usize| self.values[(head * room + column) * d + i] as f64;
                    let mixed = weights.iter().enumerate().map(|(column, w)| w * value(column));
                    y.push(mixed.sum::<f64>() / sum);
                }
            }
        }
        y
    }

    fn upload(&self, client: &Client) -> (Matrix, KeyValueCache, Handle) {
        let Sizes {
            slots,
            kv_heads,
            group,
            d,
            room,
            columns,
        } = self.sizes;
        let buffer = |values: &[f32]| upload(client, Element::F32, values, 1, values.len()).handle;
        let cache = KeyValueCache {
            keys: buffer(&self.keys),
            values: buffer(&self.values),
            slots,
            kv_heads,
            head_dim: d,
            key_columns: columns,
            value_rows: room,
        };
        let query = upload(
            client,
            Element::F32,
            &self.query,
            self.places.len(),
            kv_heads * group * d,
        );
        (query, cache, upload_i32(client, self.places.as_flattened()))
    }

    fn run(&self, client: &Client) -> Vec<f32> {
        let (query, cache, places) = self.upload(client);
        download(client, &cached_attention(client, &query, &cache, &places).unwrap())
    }
}

fn sizes(kv_heads: usize, group: usize, d: usize) -> Sizes {
    Sizes {
        slots: 3,
        kv_heads,
        group,
        d,
        room: 700,
        columns: 704,
    }
}

/// One column, a tile, one more; slots in any order, and several tokens of one.
fn places() -> Vec<[i32; 2]> {
    vec![[2, 0], [0, 127], [1, 128], [0, 126], [2, 1], [1, 699], [0, 300]]
}

#[test]
fn tokens_attend_to_what_came_before_them() {
    let Some(client) = client() else { return };
    let mut random = Random::new(21);
    for (kv_heads, group, d) in [(1, 1, 2), (2, 2, 16), (4, 4, 64), (1, 7, 24), (2, 16, 128), (1, 2, 256)] {
        let case = Case::new(&mut random, sizes(kv_heads, group, d), places());
        let y = case.run(&client);
        for (i, (actual, expected)) in y.iter().zip(case.expected()).enumerate() {
            let difference = (*actual as f64 - expected).abs();
            assert!(
                difference < 2e-5,
                "{kv_heads} × {group} heads of {d}, {i}: {actual}, expected {expected}"
            );
        }
    }
}

#[test]
fn a_token_does_not_depend_on_the_others() {
    let Some(client) = client() else { return };
    let mut case = Case::new(&mut Random::new(22), sizes(2, 4, 64), places());
    let (together, width) = (case.run(&client), 2 * 4 * 64);
    let (query, places) = (case.query.clone(), case.places.clone());
    for (token, place) in places.into_iter().enumerate() {
        case.query = query[token * width..][..width].to_vec();
        case.places = vec![place];
        assert_eq!(case.run(&client), together[token * width..][..width]);
    }
}

#[test]
fn queries_that_do_not_fit_the_cache_are_refused() {
    let Some(client) = client() else { return };
    let case = Case::new(&mut Random::new(23), sizes(2, 2, 8), places());
    let (query, cache, places) = case.upload(&client);
    let refusal = |query: &Matrix, cache: &KeyValueCache| {
        let error = cached_attention(&client, query, cache, &places).unwrap_err();
        error.to_string()
    };
    let wider = Matrix::contiguous(query.handle.clone(), Element::F32, 7, 40);
    assert_eq!(refusal(&wider, &cache), "width of the queries: expected 32, got 40");
    let apart = Matrix {
        strides: [64, 2],
        ..query.clone()
    };
    assert_eq!(
        refusal(&apart, &cache),
        "elements from one query or channel to the next: expected 1, got 2"
    );
    let many = Matrix::contiguous(query.handle.clone(), Element::F32, 7, 17 * 16);
    assert_eq!(
        refusal(&many, &cache),
        "query heads of a key head, at most: expected 16, got 17"
    );
    let wide = KeyValueCache {
        head_dim: 272,
        ..cache.clone()
    };
    let query = Matrix::contiguous(query.handle, Element::F32, 7, 544);
    assert_eq!(
        refusal(&query, &wide),
        "channels of a head, at most: expected 256, got 272"
    );
}
