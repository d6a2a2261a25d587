//! Keys and values of the tokens seen so far, in memory allocated once.
use crate::host::KEY_BLOCK;
use burn::{prelude::Backend, tensor::Tensor};
use std::collections::BTreeMap;

/// Size of a [`KvCache`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvCacheConfig {
    /// Decoder layers.
    pub num_layers: usize,
    /// Sequences held at once.
    pub slots: usize,
    /// Key and value heads.
    pub num_key_value_heads: usize,
    /// Tokens a slot can hold.
    pub max_seq_len: usize,
    /// Channels of one head.
    pub head_dim: usize,
}

impl KvCacheConfig {
    /// Allocates the cache, filled with zeros.
    pub fn init<B: Backend>(&self, device: &B::Device) -> KvCache<B> {
        let (s, h, n, d) = (self.slots, self.num_key_value_heads, self.max_seq_len, self.head_dim);
        // One dimension: GPUs leave gaps between the rows of several, and attention reads the cache as it lies.
        let zeros = |shape: [usize; 4]| Tensor::<B, 1>::zeros([shape.iter().product::<usize>()], device).reshape(shape);
        KvCache {
            layers: (0..self.num_layers)
                .map(|_| LayerCache {
                    keys: zeros([s, h, d, n.next_multiple_of(KEY_BLOCK)]),
                    values: zeros([s, h, n, d]),
                })
                .collect(),
        }
    }
}

/// The cache of a model: one [`LayerCache`] a decoder layer. Slots have lengths of their own, which the caller keeps: a
/// token of position `p` sees columns `0..=p` of its slot, whatever lies beyond.
#[derive(Debug)]
pub struct KvCache<B: Backend> {
    /// In layer order.
    pub layers: Vec<LayerCache<B>>,
}

/// Keys and values of one layer. Its tensors are never shared, so that a backend can write in place.
#[derive(Debug)]
pub struct LayerCache<B: Backend> {
    /// Normed and rotated, `[slots, kv_heads, head_dim, columns]`: neighbouring keys are neighbours in memory, so that
    /// the scores of one query are computed side by side, in blocks. `columns` is `max_seq_len` rounded up to blocks.
    pub(crate) keys: Tensor<B, 4>,
    /// `[slots, kv_heads, max_seq_len, head_dim]`.
    pub(crate) values: Tensor<B, 4>,
}

impl<B: Backend> LayerCache<B> {
    /// Takes the tensors out, leaving empty ones; the taker puts them back with [`Self::restore`].
    pub(crate) fn take(&mut self) -> (Tensor<B, 4>, Tensor<B, 4>) {
        let device = self.keys.device();
        let empty = || Tensor::empty([0, 0, 0, 0], &device);
        (
            core::mem::replace(&mut self.keys, empty()),
            core::mem::replace(&mut self.values, empty()),
        )
    }

    pub(crate) fn restore(&mut self, keys: Tensor<B, 4>, values: Tensor<B, 4>) {
        self.keys = keys;
        self.values = values;
    }

    /// Bytes of keys and values.
    pub fn bytes(&self) -> usize {
        let size = |t: &Tensor<B, 4>| t.shape().num_elements() * t.dtype().size();
        size(&self.keys) + size(&self.values)
    }
}

/// Where one token goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenPlace {
    /// Row of the cache.
    pub slot: usize,
    /// Position in the sequence, and column of the cache.
    pub position: usize,
}

/// Columns `0..len` of one slot, copied to another after the new keys and values are written and before anything is
/// attended to: samples of one prompt compute it once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixCopy {
    /// Source slot.
    pub from: usize,
    /// Destination slot.
    pub to: usize,
    /// Number of columns.
    pub len: usize,
}

/// What one call appends to the cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheStep {
    /// One entry a token, no place twice.
    pub tokens: Vec<TokenPlace>,
    /// Shared prefixes.
    pub copies: Vec<PrefixCopy>,
}

impl CacheStep {
    /// Each column that the copies fill, `(slot, column)`, and the place that holds, before any copy, what it
    /// will hold: a copy may read what an earlier one wrote.
    pub(crate) fn copied_columns(&self) -> BTreeMap<(usize, usize), (usize, usize)> {
        let mut filled = BTreeMap::new();
        for copy in &self.copies {
            for column in 0..copy.len {
                let from = (copy.from, column);
                let origin = filled.get(&from).copied().unwrap_or(from);
                filled.insert((copy.to, column), origin);
            }
        }
        filled
    }

    /// # Panics
    /// If the number of places is not `tokens`, or a place lies outside `cache`.
    pub(crate) fn check<B: Backend>(&self, tokens: usize, cache: &LayerCache<B>) {
        let [slots, _, max_seq_len, _] = cache.values.dims();
        assert_eq!(
            self.tokens.len(),
            tokens,
            "KV cache: the step places {} tokens, the batch has {tokens}",
            self.tokens.len()
        );
        let inside = |slot: usize, end: usize| {
            assert!(
                slot < slots && end <= max_seq_len,
                "KV cache: slot {slot}, {end} tokens, exceeds {slots} slots of {max_seq_len} tokens"
            );
        };
        self.tokens.iter().for_each(|t| inside(t.slot, t.position + 1));
        self.copies.iter().for_each(|c| {
            inside(c.from, c.len);
            inside(c.to, c.len);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_of_a_copy_comes_from_where_the_first_was_made() {
        let copy = |from, to, len| PrefixCopy { from, to, len };
        let step = CacheStep {
            tokens: vec![],
            copies: vec![copy(5, 2, 2), copy(2, 3, 2), copy(0, 2, 1)],
        };
        let columns: Vec<_> = step.copied_columns().into_iter().collect();
        assert_eq!(
            columns,
            [((2, 0), (0, 0)), ((2, 1), (5, 1)), ((3, 0), (5, 0)), ((3, 1), (5, 1)),]
        );
    }
}
