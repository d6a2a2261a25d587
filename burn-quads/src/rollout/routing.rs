//! Which experts the rollout chose, kept for routing replay (R3).
use crate::modules::attention::{CacheStep, TokenPlace};

/// Experts of every token that the model saw of one sequence: the prompt and all sampled tokens but the last, which is
/// never fed back. A row of [`RoutingReplay`](crate::causal_lm::RoutingReplay) is [`Self::row`] of its position and
/// layer; positions from [`Self::positions`] on have none and are routed by the live router (-1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertIds {
    /// Mixture-of-experts layers.
    pub num_layers: usize,
    /// Experts of a token in a layer.
    pub top_k: usize,
    /// `[positions, num_layers, top_k]`.
    pub ids: Vec<i32>,
}

impl ExpertIds {
    /// Number of positions, from the first of the prompt on.
    pub fn positions(&self) -> usize {
        self.ids.len() / (self.num_layers * self.top_k).max(1)
    }

    /// Experts of one position in one layer, `top_k` ids in the router's order.
    ///
    /// # Panics
    /// If `position` or `layer` is out of range.
    pub fn row(&self, position: usize, layer: usize) -> &[i32] {
        assert!(
            layer < self.num_layers,
            "expert ids: layer {layer} of {}",
            self.num_layers
        );
        &self.ids[(position * self.num_layers + layer) * self.top_k..][..self.top_k]
    }
}

/// Experts by slot and position: laid out, written and copied like the KV cache.
pub(super) struct RoutingCache {
    max_seq_len: usize,
    num_layers: usize,
    top_k: usize,
    ids: Vec<i32>,
}

impl RoutingCache {
    pub(super) fn new(slots: usize, max_seq_len: usize, num_layers: usize, top_k: usize) -> Self {
        Self {
            max_seq_len,
            num_layers,
            top_k,
            ids: vec![-1; slots * max_seq_len * num_layers * top_k],
        }
    }

    fn start(&self, slot: usize, position: usize) -> usize {
        (slot * self.max_seq_len + position) * self.num_layers * self.top_k
    }

    /// `layers` holds `[tokens, top_k]` ids a layer, in the order of `step.tokens`.
    pub(super) fn write(&mut self, step: &CacheStep, layers: &[Vec<i32>]) {
        for (layer, ids) in layers.iter().enumerate() {
            for (&TokenPlace { slot, position }, row) in step.tokens.iter().zip(ids.chunks_exact(self.top_k)) {
                let start = self.start(slot, position) + layer * self.top_k;
                self.ids[start..start + self.top_k].copy_from_slice(row);
            }
        }
        for copy in &step.copies {
            let (from, to) = (self.start(copy.from, 0), self.start(copy.to, 0));
            let len = copy.len * self.num_layers * self.top_k;
            self.ids.copy_within(from..from + len, to);
        }
    }

    /// The first `positions` of a slot.
    pub(super) fn read(&self, slot: usize, positions: usize) -> ExpertIds {
        ExpertIds {
            num_layers: self.num_layers,
            top_k: self.top_k,
            ids: self.ids[self.start(slot, 0)..self.start(slot, positions)].to_vec(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modules::attention::PrefixCopy;

    #[test]
    fn rows_follow_position_and_layer() {
        let mut cache = RoutingCache::new(2, 4, 2, 1);
        let place = |slot, position| TokenPlace { slot, position };
        cache.write(
            &CacheStep {
                tokens: vec![place(0, 0), place(0, 1), place(1, 1)],
                copies: vec![PrefixCopy { from: 0, to: 1, len: 1 }],
            },
            &[vec![10, 11, 12], vec![20, 21, 22]],
        );
        let read = cache.read(1, 2);
        assert_eq!(read.positions(), 2);
        assert_eq!((read.row(0, 0), read.row(0, 1)), (&[10][..], &[20][..]));
        assert_eq!((read.row(1, 0), read.row(1, 1)), (&[12][..], &[22][..]));
        assert_eq!(cache.read(0, 2).ids, [10, 20, 11, 21]);
    }
}
