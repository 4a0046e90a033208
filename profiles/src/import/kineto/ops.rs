//! [`Shapes`]: ops of PyTorch with their recorded shapes, as keys.
//!
//! | op | key |
//! |---|---|
//! | `mm`, `addmm` | `gemm` |
//! | `bmm`, `_grouped_mm` | `grouped_gemm`, one group a matrix |
//! | `scaled_dot_product_attention` and its kernels, `flash_attn::_flash_attn_*` | `attention` |
//! | `layer_norm`, `rms_norm`, `native_layer_norm_backward`, `_fused_rms_norm_backward` | `rms_norm` |
//! | `embedding`, `embedding_dense_backward` | `embedding` |
//! | `cross_entropy_loss`, `_log_softmax_backward_data` | `cross_entropy` |
//! | `add`, `add_` of two tensors alike | `add` |
//! | `copy_`, `zero_`, `fill_`, `mul_` by a number, `index_select` | a sweep |
//! | `_fused_adam_`, `_fused_adamw_` | `adamw` |
//! | `_foreach_norm` | `grad_norm` |
//!
//! A product in the backward pass is a dgrad or a wgrad of a forward product: of the one that its node of
//! the graph belongs to (they share a sequence number), else of any in the trace. Where both
//! fit, as for square layers, the order in which autograd runs the two decides. A product that
//! fits neither is left out. fp16 counts as bf16, whose width and rate it has; lists of tensors have no
//! type in a trace, and optimizers are taken to work on f32.

use std::collections::{BTreeSet, HashMap};

use serde_json::Value;

use super::text::Event;
use super::tree::Tree;
use crate::dtype::Dtype;
use crate::op::{Op, Pass, SweepKind, is_shape};

/// An op's key.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Named {
    pub(super) op: Op,
    /// Whether attention is called causal without having said so.
    pub(super) assumed_causal: bool,
}

impl From<Op> for Named {
    fn from(op: Op) -> Self {
        Self {
            op,
            assumed_causal: false,
        }
    }
}

/// Sizes of a product: groups, rows of a group, columns, contracted.
type Product = [u64; 4];

/// Forward products of a trace.
#[derive(Debug, Default)]
pub(super) struct Shapes {
    forward: BTreeSet<Product>,
    by_sequence: HashMap<u64, Product>,
}

/// What is wrong with an op that might have a key.
type Found = Result<Option<Named>, &'static str>;

impl Shapes {
    pub(super) fn of(events: &[Event<'_>], tree: &Tree) -> Self {
        let mut shapes = Self::default();
        for (index, node) in tree.nodes().enumerate() {
            let call = Call::of(&events[node.event]);
            if let Some((product, _)) = call.product()
                && !is_backward(events, tree, index)
            {
                shapes.forward.insert(product);
                if let Some(sequence) = call.event.args.sequence {
                    shapes.by_sequence.insert(sequence, product);
                }
            }
        }
        shapes
    }

    /// The key of an op; none where it is no op that has one, and why not where it lacks something.
    pub(super) fn key(&self, events: &[Event<'_>], tree: &Tree, node: usize) -> Found {
        let call = Call::of(&events[tree.node(node).event]);
        let name = call.event.name.strip_prefix("aten::");
        if let Some((product, dtype)) = call.product() {
            return self.product(events, tree, node, product, dtype);
        }
        if let Some(kernel) = attention(&call.event.name) {
            return call.attention(kernel);
        }
        let Some(name) = name else { return Ok(None) };
        let found = match name {
            "layer_norm" | "native_layer_norm" | "rms_norm" | "_fused_rms_norm" => {
                call.norm(0, Pass::Forward)
            }
            "native_layer_norm_backward" | "_fused_rms_norm_backward" => {
                call.norm(1, Pass::Backward)
            }
            "embedding" => call.embedding(Pass::Forward),
            "embedding_dense_backward" => call.embedding(Pass::Backward),
            "cross_entropy_loss" => call.cross_entropy(Pass::Forward),
            "_log_softmax_backward_data" => call.cross_entropy(Pass::Backward),
            "add" | "add_" => call.add(),
            "copy_" => call.sweep(SweepKind::Copy).filter(|_| call.same_operands()),
            "zero_" | "fill_" => call.sweep(SweepKind::Fill),
            "mul_" => call.sweep(SweepKind::Scale).filter(|_| call.is_number(1)),
            "index_select" => call.gather(),
            "_fused_adam_" | "_fused_adamw_" => call.listed().map(|len| Op::Adamw {
                len,
                dtype: Dtype::F32,
                moments: Dtype::F32,
                remainders: false,
            }),
            "_foreach_norm" => call.listed().map(|len| Op::GradNorm { len }),
            // Products whose operands are not said.
            "mm" | "bmm" | "addmm" | "_grouped_mm" => None,
            _ => return Ok(None),
        };
        match found {
            Some(op) => Ok(Some(op.into())),
            None if call.has_shapes() => Ok(None),
            None => Err(NO_SHAPES),
        }
    }

    fn product(
        &self,
        events: &[Event<'_>],
        tree: &Tree,
        node: usize,
        product: Product,
        dtype: Option<Dtype>,
    ) -> Found {
        let dtype = dtype.ok_or(NO_DTYPE)?;
        let (forward, pass) = if is_backward(events, tree, node) {
            let backward = tree.upwards(node).skip(1);
            let mut sequences = backward.filter_map(|node| {
                let event = &events[tree.node(node).event];
                event.args.sequence
            });
            let own = sequences.find_map(|sequence| self.by_sequence.get(&sequence));
            let dgrad_first = {
                let mut callers = tree.upwards(node).skip(1);
                callers.any(|node| events[tree.node(node).event].name.contains("Addmm"))
            };
            let earlier = siblings_before(events, tree, node);
            let order = if earlier.is_multiple_of(2) == dgrad_first {
                [Pass::Dgrad, Pass::Wgrad]
            } else {
                [Pass::Wgrad, Pass::Dgrad]
            };
            let fits = |forward: &Product| {
                let pass = order
                    .into_iter()
                    .find(|&pass| of_pass(*forward, pass, product))?;
                Some((*forward, pass))
            };
            let found = own.and_then(fits);
            let found = found.or_else(|| self.forward.iter().find_map(fits));
            found.ok_or("a product of the backward pass that fits no forward product")?
        } else {
            (product, Pass::Forward)
        };
        let [groups, m, n, k] = forward;
        let op = if groups > 1 {
            Op::GroupedGemm {
                groups,
                rows: groups * m,
                n,
                k,
                pass,
                dtype,
            }
        } else {
            // Of dgrad and wgrad a key has the product that is done.
            let (m, n, k) = match pass {
                Pass::Dgrad => (m, k, n),
                Pass::Wgrad => (n, k, m),
                Pass::Forward | Pass::Backward => (m, n, k),
            };
            Op::Gemm {
                m,
                n,
                k,
                pass,
                dtype,
            }
        };
        Ok(Some(op.into()))
    }
}

const NO_SHAPES: &str = "its shapes were not recorded";
const NO_DTYPE: &str = "its type was not recorded, or has no key";

/// Whether a product is the gradient of another's operand in one pass; a weight's gradient may be done
/// either way around.
fn of_pass([groups, m, n, k]: Product, pass: Pass, product: Product) -> bool {
    match pass {
        Pass::Dgrad => product == [groups, m, k, n],
        _ => product == [groups, n, k, m] || product == [groups, k, n, m],
    }
}

/// Whether an op is run by autograd for a gradient. Forward work that is done again there has a sequence
/// number of its own, as it makes nodes.
fn is_backward(events: &[Event<'_>], tree: &Tree, node: usize) -> bool {
    let event = |node| &events[tree.node(node).event];
    let mut callers = tree.upwards(node).skip(1);
    event(node).args.sequence.is_none()
        && callers.any(|caller| {
            let name = &event(caller).name;
            name.starts_with("autograd::engine::evaluate_function") || name.contains("Backward")
        })
}

/// Products that the caller of a product ran before it.
fn siblings_before(events: &[Event<'_>], tree: &Tree, node: usize) -> usize {
    let Some(caller) = tree.upwards(node).nth(1) else {
        return 0;
    };
    let before = tree.children(caller).take_while(|&other| other != node);
    let products = before.filter(|&other| {
        let call = Call::of(&events[tree.node(other).event]);
        call.product().is_some()
    });
    products.count()
}

/// How an attention op lays out its operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kernel {
    pass: Pass,
    /// Operand that is the queries; keys and values follow it.
    query: usize,
    /// Operand that says whether it is causal.
    causal: usize,
    /// Operand that is a mask, where there may be one.
    mask: Option<usize>,
    /// Heads before positions.
    heads_first: bool,
}

fn attention(name: &str) -> Option<Kernel> {
    let (pass, query, causal, mask, heads_first) = match name {
        "aten::scaled_dot_product_attention" => (Pass::Forward, 0, 5, Some(3), true),
        "aten::_scaled_dot_product_flash_attention"
        | "aten::_scaled_dot_product_flash_attention_for_cpu" => (Pass::Forward, 0, 4, None, true),
        "aten::_scaled_dot_product_efficient_attention"
        | "aten::_scaled_dot_product_cudnn_attention" => (Pass::Forward, 0, 6, Some(3), true),
        "aten::_scaled_dot_product_flash_attention_backward" => (Pass::Backward, 1, 11, None, true),
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward" => {
            (Pass::Backward, 1, 7, None, true)
        }
        "aten::_scaled_dot_product_efficient_attention_backward" => {
            (Pass::Backward, 1, 11, Some(4), true)
        }
        "aten::_scaled_dot_product_cudnn_attention_backward" => {
            (Pass::Backward, 1, 14, Some(8), true)
        }
        "flash_attn::_flash_attn_forward" => (Pass::Forward, 0, 5, None, false),
        "flash_attn::_flash_attn_backward" => (Pass::Backward, 1, 11, None, false),
        _ => return None,
    };
    Some(Kernel {
        pass,
        query,
        causal,
        mask,
        heads_first,
    })
}

/// The sizes of a tensor that there may be.
pub(super) fn sizes(dims: &Value) -> Option<Vec<u64>> {
    let dims = dims.as_array()?.iter().map(Value::as_u64);
    let dims: Vec<u64> = dims.collect::<Option<_>>()?;
    is_shape(&dims).then_some(dims)
}

/// An op with its operands.
struct Call<'a, 'e> {
    event: &'a Event<'e>,
}

impl<'a, 'e> Call<'a, 'e> {
    fn of(event: &'a Event<'e>) -> Self {
        Self { event }
    }

    fn has_shapes(&self) -> bool {
        self.event.args.dims.is_some()
    }

    fn operand(&self, index: usize) -> Option<&'a Value> {
        self.event.args.dims.as_ref()?.get(index)
    }

    /// Sizes of a tensor.
    fn dims(&self, index: usize) -> Option<Vec<u64>> {
        sizes(self.operand(index)?)
    }

    fn len(&self, index: usize) -> Option<u64> {
        let dims = self.dims(index).filter(|dims| !dims.is_empty())?;
        let len: u64 = dims.iter().product();
        (len > 0).then_some(len)
    }

    /// Rows and width of a tensor of one or more dimensions.
    fn rows(&self, index: usize) -> Option<[u64; 2]> {
        let width = *self.dims(index)?.last()?;
        let len = self.len(index)?;
        Some([len / width, width])
    }

    fn type_name(&self, index: usize) -> Option<&'a str> {
        self.event.args.types.as_ref()?.get(index)?.as_str()
    }

    fn dtype(&self, index: usize) -> Option<Dtype> {
        let name = self.type_name(index)?;
        match name.strip_prefix("c10::").unwrap_or(name) {
            "float" => Some(Dtype::F32),
            "BFloat16" | "Half" => Some(Dtype::Bf16),
            "int" => Some(Dtype::I32),
            name if name.starts_with("Float8") => Some(Dtype::Fp8),
            _ => None,
        }
    }

    /// Whether an operand is no tensor, or one of a single number.
    fn is_number(&self, index: usize) -> bool {
        self.dims(index).is_some_and(|dims| dims.is_empty())
    }

    /// Whether the first two operands have the same sizes and type.
    fn same_operands(&self) -> bool {
        self.dims(0) == self.dims(1) && self.type_name(0) == self.type_name(1)
    }

    /// The sizes and type of a product, where the op is one.
    fn product(&self) -> Option<(Product, Option<Dtype>)> {
        let (a, plain) = match &*self.event.name {
            "aten::mm" | "aten::bmm" => (0, true),
            "aten::addmm" => (1, true),
            "aten::_grouped_mm" => (0, false),
            _ => return None,
        };
        let (left, right) = (self.dims(a)?, self.dims(a + 1)?);
        let product = match (&left[..], &right[..]) {
            (&[m, k], &[other, n]) if plain && k == other => [1, m, n, k],
            (&[groups, m, k], &[_, other, n]) if plain && k == other => [groups, m, n, k],
            // Rows of all groups by a matrix each.
            (&[rows, k], &[groups, other, n]) if !plain && k == other && groups > 0 => {
                [groups, rows / groups, n, k]
            }
            // The gradient of the matrices: rows are contracted, and the third operand counts groups.
            (&[m, rows], &[other, n]) if !plain && rows == other => {
                let groups = self
                    .dims(2)?
                    .first()
                    .copied()
                    .filter(|&groups| groups > 0)?;
                [groups, m, n, rows / groups]
            }
            _ => return None,
        };
        let positive = product.iter().all(|&size| size > 0);
        positive.then(|| (product, self.dtype(a)))
    }

    fn attention(&self, kernel: Kernel) -> Found {
        let Kernel { query, .. } = kernel;
        let four = |index| {
            let dims = self.dims(index)?;
            let [batch, a, b, width] = dims[..] else {
                return None;
            };
            let (heads, length) = if kernel.heads_first { (a, b) } else { (b, a) };
            Some([batch, heads, length, width])
        };
        let operands = [query, query + 1, query + 2].map(four);
        let [Some(q), Some(k), Some(v)] = operands else {
            return Err(NO_SHAPES);
        };
        let stated = self.event.args.concrete.as_ref();
        let stated = stated.and_then(|inputs| inputs.get(kernel.causal)?.as_str());
        let masked = kernel.mask.and_then(|mask| self.dims(mask));
        let masked = masked.is_some_and(|dims| !dims.is_empty());
        let known = match stated {
            _ if masked => Some(false),
            Some("True" | "true" | "1") => Some(true),
            Some("False" | "false" | "0") => Some(false),
            _ => None,
        };
        let op = Op::Attention {
            batch: q[0],
            heads: q[1],
            kv_heads: k[1],
            q_len: q[2],
            kv_len: k[2],
            qk_dim: q[3],
            v_dim: v[3],
            causal: known.unwrap_or(q[2] == k[2]),
            pass: kernel.pass,
            dtype: self.dtype(query).ok_or(NO_DTYPE)?,
        };
        Ok(Some(Named {
            op,
            assumed_causal: known.is_none() && q[2] == k[2],
        }))
    }

    fn norm(&self, input: usize, pass: Pass) -> Option<Op> {
        let [rows, dim] = self.rows(input)?;
        let dtype = self.dtype(input)?;
        Some(Op::RmsNorm {
            rows,
            dim,
            pass,
            dtype,
        })
    }

    /// Operands are a table of vectors, or their gradients, and the rows that are looked up.
    fn embedding(&self, pass: Pass) -> Option<Op> {
        Some(Op::Embedding {
            rows: self.len(1)?,
            dim: *self.dims(0)?.last()?,
            pass,
            dtype: self.dtype(0)?,
        })
    }

    fn cross_entropy(&self, pass: Pass) -> Option<Op> {
        let [rows, vocab] = self.rows(0)?;
        let dtype = self.dtype(0)?;
        Some(Op::CrossEntropy {
            rows,
            vocab,
            pass,
            dtype,
        })
    }

    fn add(&self) -> Option<Op> {
        let (len, dtype) = (self.len(0)?, self.dtype(0)?);
        self.same_operands().then_some(Op::Add { len, dtype })
    }

    fn sweep(&self, kind: SweepKind) -> Option<Op> {
        let (len, dtype) = (self.len(0)?, self.dtype(0)?);
        Some(Op::Sweep { kind, len, dtype })
    }

    /// Rows of a table by an index, the third operand.
    fn gather(&self) -> Option<Op> {
        let [_, width] = self.rows(0)?;
        Some(Op::Sweep {
            kind: SweepKind::Gather,
            len: self.len(2)?.checked_mul(width)?,
            dtype: self.dtype(0)?,
        })
    }

    /// Elements of the tensors of a list, the first operand.
    fn listed(&self) -> Option<u64> {
        let list = self.operand(0)?.as_array()?;
        let add = |all: u64, dims: &Value| all.checked_add(sizes(dims)?.iter().product());
        list.iter().try_fold(0, add).filter(|&len| len > 0)
    }
}
