//! Which layers of a Hugging Face model get packed, and which share an outer scale.
//!
//! Packed are the projections of attention and MLP, dense or per expert. Embedding, head, router and norms stay as they
//! are: so the tools have it, and so does training. q, k and v of an attention share an outer scale, and so do gate and
//! up of an MLP or expert: engines fuse them into one product.

/// A projection that gets packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Projection {
    Q,
    K,
    V,
    O,
    Gate,
    Up,
    Down,
}

const PROJECTIONS: [(&str, Projection); 7] = [
    ("q_proj", Projection::Q),
    ("k_proj", Projection::K),
    ("v_proj", Projection::V),
    ("o_proj", Projection::O),
    ("gate_proj", Projection::Gate),
    ("up_proj", Projection::Up),
    ("down_proj", Projection::Down),
];

impl Projection {
    /// Last part of the module's path.
    pub fn name(self) -> &'static str {
        let named = PROJECTIONS.into_iter().find(|(_, projection)| *projection == self);
        named.expect("every projection has a name").0
    }

    /// The projections that share its outer scale, itself included.
    pub fn sharing(self) -> &'static [Projection] {
        match self {
            Self::Q | Self::K | Self::V => &[Self::Q, Self::K, Self::V],
            Self::O => &[Self::O],
            Self::Gate | Self::Up => &[Self::Gate, Self::Up],
            Self::Down => &[Self::Down],
        }
    }
}

/// A module that gets packed: `model.layers.0.mlp.experts.3.up_proj`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LayerName {
    /// Path of the module that holds it: `model.layers.0.mlp.experts.3`.
    pub parent: String,
    /// Which of its layers it is.
    pub projection: Projection,
}

impl LayerName {
    /// From the path of a module, if it is one that gets packed.
    pub fn parse(module: &str) -> Option<Self> {
        let (parent, name) = module.rsplit_once('.')?;
        let (_, projection) = PROJECTIONS.into_iter().find(|(known, _)| *known == name)?;
        let parent = parent.to_string();
        Some(Self { parent, projection })
    }

    /// Path of the module.
    pub fn module(&self) -> String {
        format!("{}.{}", self.parent, self.projection.name())
    }

    /// The modules that share its outer scale, itself included.
    pub fn sharing(&self) -> impl Iterator<Item = LayerName> + '_ {
        self.projection.sharing().iter().map(|projection| LayerName {
            parent: self.parent.clone(),
            projection: *projection,
        })
    }

    /// The experts' module and the expert's number, for a layer of an expert.
    pub fn expert(&self) -> Option<(&str, usize)> {
        let (experts, index) = self.parent.rsplit_once('.')?;
        let index = index.parse().ok()?;
        experts.ends_with(".experts").then_some((experts, index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn projections_get_packed_and_nothing_else() {
        let parse = |module| LayerName::parse(module).map(|name| (name.projection, name.module()));
        let q = "model.layers.0.self_attn.q_proj";
        assert_eq!(parse(q), Some((Projection::Q, q.to_string())));
        for other in [
            "lm_head",
            "model.embed_tokens",
            "model.layers.0.mlp.gate",
            "model.layers.0.self_attn.q_norm",
        ] {
            assert_eq!(parse(other), None, "{other}");
        }
    }

    #[test]
    fn layers_that_are_fused_share() {
        let sharing = |module| {
            let name = LayerName::parse(module).unwrap();
            name.sharing().map(|name| name.module()).collect::<Vec<_>>()
        };
        assert_eq!(sharing("a.k_proj"), ["a.q_proj", "a.k_proj", "a.v_proj"]);
        assert_eq!(
            sharing("mlp.experts.3.up_proj"),
            ["mlp.experts.3.gate_proj", "mlp.experts.3.up_proj"]
        );
        assert_eq!(sharing("a.o_proj"), ["a.o_proj"]);
    }

    #[test]
    fn an_expert_knows_its_number() {
        let expert = |module| {
            LayerName::parse(module)
                .unwrap()
                .expert()
                .map(|(path, index)| (path.to_string(), index))
        };
        assert_eq!(
            expert("l.mlp.experts.12.up_proj"),
            Some(("l.mlp.experts".to_string(), 12))
        );
        assert_eq!(expert("l.mlp.up_proj"), None);
        assert_eq!(expert("l.shared_experts.up_proj"), None);
    }
}
