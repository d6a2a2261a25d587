//! Which tensors of a file make up a parameter, and how their elements lie in it.
use burn::tensor::{bf16, f16};
use burn_nvfp4::safetensors_file::{Dtype, FileTensor};

use super::param_path::ParamPath;
use crate::modules::moe_config::QuadsMoeConfig;

/// A tensor of the file, as a part of a parameter.
#[derive(Debug)]
pub(super) struct Part {
    /// In the file.
    pub name: String,
    /// In the file.
    pub shape: Vec<usize>,
    place: Place,
}

/// Where a part lies in its parameter.
#[derive(Debug)]
enum Place {
    /// It is the parameter.
    Whole,
    /// Matrices `[columns, rows]` of the file are columns of as many matrices `[rows, width]` of the parameter.
    Transposed {
        first_matrix: usize,
        first_column: usize,
        width: usize,
    },
}

/// How the experts of a layer are named in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertNaming {
    /// A matrix for each expert and projection: `experts.E.gate_proj.weight` and so on. What the Hub's files have.
    PerExpert,
    /// All experts in `experts.gate_up_proj` `[experts, 2 · ff, hidden]` (gate first) and `experts.down_proj`
    /// `[experts, hidden, ff]`, as version 5 of transformers holds them in memory.
    Fused,
}

/// The tensors that make up the parameter at `path`. `naming` is asked with the fused name of experts.
pub(super) fn parts(
    config: &QuadsMoeConfig,
    path: &ParamPath,
    shape: &[usize],
    naming: impl Fn(&str) -> ExpertNaming,
) -> Vec<Part> {
    let names = path.names();
    let module = |names: &[&str]| format!("model.{}", names.join("."));
    match (names.as_slice(), shape) {
        (["lm_head"], &[hidden, vocab]) => vec![transposed("lm_head.weight".into(), [hidden, vocab])],
        // Hugging Face calls the scale of a norm its weight.
        ([norm @ .., "gamma"], _) => vec![whole(format!("{}.weight", module(norm)), shape)],
        ([.., "embed_tokens", "weight"] | [.., "bias"], _) => vec![whole(module(&names), shape)],
        (["layers", layer, "mlp", "experts", projection], _) => {
            let layer: usize = layer.parse().expect("layers are numbered");
            let mlp = format!("model.layers.{layer}.mlp");
            expert_parts(config.is_moe_layer(layer), &mlp, projection, shape, naming)
        }
        (_, &[d_in, d_out]) => vec![transposed(module(&names), [d_in, d_out])],
        _ => vec![whole(module(&names), shape)],
    }
}

fn expert_parts(
    moe: bool,
    mlp: &str,
    projection: &str,
    shape: &[usize],
    naming: impl Fn(&str) -> ExpertNaming,
) -> Vec<Part> {
    let &[experts, rows, width] = shape else {
        panic!("experts are stacks of matrices, not {shape:?}")
    };
    let fused = format!("{mlp}.experts.{projection}");
    if moe && naming(&fused) == ExpertNaming::Fused {
        return vec![Part {
            name: fused,
            shape: vec![experts, width, rows],
            place: Place::Transposed {
                first_matrix: 0,
                first_column: 0,
                width,
            },
        }];
    }
    let names: &[&str] = match projection {
        "gate_up_proj" => &["gate_proj", "up_proj"],
        _ => &["down_proj"],
    };
    let columns = width / names.len();
    let part = |expert: usize, (index, name): (usize, &&str)| Part {
        name: match moe {
            true => format!("{mlp}.experts.{expert}.{name}.weight"),
            false => format!("{mlp}.{name}.weight"),
        },
        shape: vec![columns, rows],
        place: Place::Transposed {
            first_matrix: expert,
            first_column: index * columns,
            width,
        },
    };
    (0..experts)
        .flat_map(|expert| names.iter().enumerate().map(move |name| part(expert, name)))
        .collect()
}

fn whole(name: String, shape: &[usize]) -> Part {
    Part {
        name,
        shape: shape.to_vec(),
        place: Place::Whole,
    }
}

fn transposed(name: String, [rows, width]: [usize; 2]) -> Part {
    Part {
        name,
        shape: vec![width, rows],
        place: Place::Transposed {
            first_matrix: 0,
            first_column: 0,
            width,
        },
    }
}

/// Rows and columns that are moved together, so that neither side is read with a large stride.
const TILE: usize = 32;

impl Part {
    /// Copies the part from a file, whose tensor was found to fit, into its parameter.
    pub(super) fn read(&self, tensor: &FileTensor<'_>, parameter: &mut [f32]) {
        match tensor.dtype() {
            Dtype::F32 => self.decode(tensor.bytes, f32::from_le_bytes, parameter),
            Dtype::BF16 => self.decode(tensor.bytes, |b| bf16::from_le_bytes(b).to_f32(), parameter),
            Dtype::F16 => self.decode(tensor.bytes, |b| f16::from_le_bytes(b).to_f32(), parameter),
            other => unreachable!("{other} was refused before"),
        }
    }

    fn decode<const N: usize>(&self, bytes: &[u8], element: impl Fn([u8; N]) -> f32, parameter: &mut [f32]) {
        let (file, _) = bytes.as_chunks::<N>();
        self.for_each(|in_file, in_parameter| parameter[in_parameter] = element(file[in_file]));
    }

    /// The part's bytes in a file.
    ///
    /// # Errors
    /// The first finite value that overflows `dtype`.
    pub(super) fn write(&self, parameter: &[f32], dtype: Dtype) -> Result<Vec<u8>, f32> {
        match dtype {
            Dtype::F32 => self.encode(parameter, |x| (x.to_le_bytes(), x)),
            Dtype::BF16 => self.encode(parameter, |x| {
                let rounded = bf16::from_f32(x);
                (rounded.to_le_bytes(), rounded.to_f32())
            }),
            Dtype::F16 => self.encode(parameter, |x| {
                let rounded = f16::from_f32(x);
                (rounded.to_le_bytes(), rounded.to_f32())
            }),
            other => unreachable!("weights are never written as {other}"),
        }
    }

    fn encode<const N: usize>(
        &self,
        parameter: &[f32],
        element: impl Fn(f32) -> ([u8; N], f32),
    ) -> Result<Vec<u8>, f32> {
        let mut bytes = vec![0; N * self.shape.iter().product::<usize>()];
        let mut overflow = None;
        let (file, _) = bytes.as_chunks_mut::<N>();
        self.for_each(|in_file, in_parameter| {
            let value = parameter[in_parameter];
            let (bytes, rounded) = element(value);
            if rounded.is_infinite() && value.is_finite() {
                overflow.get_or_insert(value);
            }
            file[in_file] = bytes;
        });
        match overflow {
            None => Ok(bytes),
            Some(value) => Err(value),
        }
    }

    /// Calls `visit` with the places of each element, in the file and in the parameter.
    fn for_each(&self, mut visit: impl FnMut(usize, usize)) {
        let Place::Transposed {
            first_matrix,
            first_column,
            width,
        } = self.place
        else {
            return (0..self.shape.iter().product()).for_each(|i| visit(i, i));
        };
        let (matrices, columns, rows) = match *self.shape.as_slice() {
            [columns, rows] => (1, columns, rows),
            [matrices, columns, rows] => (matrices, columns, rows),
            ref shape => unreachable!("a part is a matrix or a stack of them, not {shape:?}"),
        };
        for matrix in 0..matrices {
            let in_file = matrix * columns * rows;
            let in_parameter = (first_matrix + matrix) * rows * width + first_column;
            for c0 in (0..columns).step_by(TILE) {
                for r0 in (0..rows).step_by(TILE) {
                    for c in c0..(c0 + TILE).min(columns) {
                        for r in r0..(r0 + TILE).min(rows) {
                            visit(in_file + c * rows + r, in_parameter + r * width + c);
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(names: &str) -> ParamPath {
        let mut path = ParamPath::default();
        names.split('.').for_each(|name| path.enter(name));
        path
    }

    fn tiny() -> QuadsMoeConfig {
        QuadsMoeConfig::new(5, 4, 2, 1, 1, 4, 2, 1, 3)
            .with_mlp_only_layers(vec![1])
            .with_intermediate_size(Some(2))
    }

    /// Reads parts filled with their running numbers into a parameter, and writes it back.
    fn read_and_write_back(parts: &[Part], elements: usize) -> Vec<f32> {
        let mut parameter = vec![f32::NAN; elements];
        let mut next = 0;
        let mut files = vec![];
        for part in parts {
            let n: usize = part.shape.iter().product();
            let bytes: Vec<u8> = (next..next + n).flat_map(|i| (i as f32).to_le_bytes()).collect();
            part.decode(&bytes, f32::from_le_bytes, &mut parameter);
            files.push(bytes);
            next += n;
        }
        for (part, bytes) in parts.iter().zip(files) {
            assert_eq!(part.write(&parameter, Dtype::F32).unwrap(), bytes, "{}", part.name);
        }
        parameter
    }

    #[test]
    fn gate_and_up_of_each_expert_lie_side_by_side() {
        let parts = parts(&tiny(), &path("layers.0.mlp.experts.gate_up_proj"), &[2, 2, 4], |_| {
            ExpertNaming::PerExpert
        });
        let names: Vec<_> = parts.iter().map(|part| part.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "model.layers.0.mlp.experts.0.gate_proj.weight",
                "model.layers.0.mlp.experts.0.up_proj.weight",
                "model.layers.0.mlp.experts.1.gate_proj.weight",
                "model.layers.0.mlp.experts.1.up_proj.weight",
            ]
        );
        assert_eq!(parts[0].shape, [2, 2]);
        // Gate [[0, 1], [2, 3]] and up [[4, 5], [6, 7]], transposed, side by side.
        let expected = [0., 2., 4., 6., 1., 3., 5., 7., 8., 10., 12., 14., 9., 11., 13., 15.];
        assert_eq!(read_and_write_back(&parts, 16), expected);
    }

    #[test]
    fn fused_experts_are_one_tensor() {
        let parts = parts(
            &tiny(),
            &path("layers.0.mlp.experts.gate_up_proj"),
            &[2, 2, 4],
            |name| {
                assert_eq!(name, "model.layers.0.mlp.experts.gate_up_proj");
                ExpertNaming::Fused
            },
        );
        assert_eq!((parts.len(), parts[0].shape.as_slice()), (1, &[2, 4, 2][..]));
        let expected = [0., 2., 4., 6., 1., 3., 5., 7., 8., 10., 12., 14., 9., 11., 13., 15.];
        assert_eq!(read_and_write_back(&parts, 16), expected);
    }

    #[test]
    fn a_dense_layer_has_no_experts_in_its_names() {
        let parts = parts(&tiny(), &path("layers.1.mlp.experts.down_proj"), &[1, 2, 4], |_| {
            ExpertNaming::Fused
        });
        assert_eq!(parts[0].name, "model.layers.1.mlp.down_proj.weight");
        assert_eq!((parts.len(), parts[0].shape.as_slice()), (1, &[4, 2][..]));
    }

    #[test]
    fn large_matrices_are_moved_in_tiles() {
        let parts = [transposed("a".into(), [70, 45])];
        let parameter = read_and_write_back(&parts, 70 * 45);
        let expected: Vec<f32> = (0..70 * 45).map(|i| (i % 45 * 70 + i / 45) as f32).collect();
        assert_eq!(parameter, expected);
    }

    #[test]
    fn a_finite_value_never_becomes_infinite_in_a_file() {
        let part = whole("a".into(), &[2]);
        assert_eq!(part.write(&[1.0, 65520.0], Dtype::F16), Err(65520.0));
        assert_eq!(part.write(&[1.0, f32::MAX], Dtype::BF16), Err(f32::MAX));
        let infinite = part.write(&[1.0, f32::INFINITY], Dtype::BF16).unwrap();
        assert_eq!(infinite, [0x80, 0x3F, 0x80, 0x7F]);
        // Halfway between two neighbours: to the even one.
        let ties = part.write(&[f32::from_bits(0x3F80_8000), f32::from_bits(0x3F81_8000)], Dtype::BF16);
        assert_eq!(ties.unwrap(), [0x80, 0x3F, 0x82, 0x3F]);
    }
}
