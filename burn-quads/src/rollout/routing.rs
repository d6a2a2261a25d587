//! Which experts the rollout chose, kept for routing replay (R3).
use crate::{
    modules::attention::{CacheStep, TokenPlace},
    token_log_probs::RowRouting,
};

/// Experts by layer, slot and position: written and copied like the KV cache.
pub(super) struct RoutingCache {
    max_seq_len: usize,
    top_k: usize,
    /// Of each layer, `[slots, max_seq_len, top_k]`.
    layers: Vec<Vec<i32>>,
}

impl RoutingCache {
    pub(super) fn new(slots: usize, max_seq_len: usize, num_layers: usize, top_k: usize) -> Self {
        Self {
            max_seq_len,
            top_k,
            layers: vec![vec![-1; slots * max_seq_len * top_k]; num_layers],
        }
    }

    fn start(&self, slot: usize, position: usize) -> usize {
        (slot * self.max_seq_len + position) * self.top_k
    }

    /// `layers` holds `[tokens, top_k]` ids a layer, in the order of `step.tokens`.
    pub(super) fn write(&mut self, step: &CacheStep, layers: &[Vec<i32>]) {
        for (layer, ids) in layers.iter().enumerate() {
            for (&TokenPlace { slot, position }, row) in step.tokens.iter().zip(ids.chunks_exact(self.top_k)) {
                let start = self.start(slot, position);
                self.layers[layer][start..start + self.top_k].copy_from_slice(row);
            }
            for copy in &step.copies {
                let (from, to) = (self.start(copy.from, 0), self.start(copy.to, 0));
                self.layers[layer].copy_within(from..from + copy.len * self.top_k, to);
            }
        }
    }

    /// The first `positions` of a slot.
    pub(super) fn read(&self, slot: usize, positions: usize) -> RowRouting {
        let range = self.start(slot, 0)..self.start(slot, positions);
        RowRouting {
            top_k: self.top_k,
            layers: self.layers.iter().map(|ids| ids[range.clone()].to_vec()).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modules::attention::PrefixCopy;

    #[test]
    fn rows_follow_slot_and_position() {
        let mut cache = RoutingCache::new(2, 4, 2, 2);
        let place = |slot, position| TokenPlace { slot, position };
        cache.write(
            &CacheStep {
                tokens: vec![place(0, 0), place(0, 1), place(1, 1)],
                copies: vec![PrefixCopy { from: 0, to: 1, len: 1 }],
            },
            &[vec![10, 15, 11, 16, 12, 17], vec![20, 25, 21, 26, 22, 27]],
        );
        assert_eq!(cache.read(1, 2).layers, [[10, 15, 12, 17], [20, 25, 22, 27]]);
        assert_eq!(cache.read(0, 2).layers, [[10, 15, 11, 16], [20, 25, 21, 26]]);
    }
}
