"""The operations of a program as records, one frozen dataclass each.

A record's fields are the words of the op in a program, in their order; `csrc/format/program.h` has a struct of the same name. The type of a
field gives the kind of its word, see `KIND_OF_TYPE`; a field of another type is no word. `OP_SCHEMA` and the words derive from the records,
and loading the compiled library compares its structs with `OP_SCHEMA`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, ClassVar

from torch import Tensor

from exl2nb.core.errors import FormatError
from exl2nb.ops import blob as layout
from exl2nb.ops._library import OP_KERNELS, check_argument
from exl2nb.ops.kv_codes import STORAGE_NUMBERS
from exl2nb.ops.reference import ACTIVATION_NAMES

Blob = Tensor  # uint8 1-D: a packed matrix
Vector = Tensor  # f32: a norm, a bias, cos or sin
Table = Tensor  # f32, f16 or bf16 `(rows, H)`
Address = int  # known to the program alone; 0 in the record
Activation = str  # one of ACTIVATION_NAMES; the word is its index
ADDRESS_KIND = "address"
INTEGER_KIND = "integer"
REAL_KIND = "real"
KIND_OF_TYPE = {
    "Blob": ADDRESS_KIND, "Vector": ADDRESS_KIND, "Table": ADDRESS_KIND, "Address": ADDRESS_KIND,
    "int": INTEGER_KIND, "bool": INTEGER_KIND, "Activation": INTEGER_KIND,
    "float": REAL_KIND,
}  # fmt: skip
OP_RECORDS: dict[str, type[Op]] = {}
"""Name of an op -> its record, in the order of their codes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Op:
    """An op of a program. name: in the schema. code: its first word."""

    name: ClassVar[str]
    code: ClassVar[int]

    def __init_subclass__(cls, *, name: str = "", code: int = 0) -> None:
        if name:
            cls.name, cls.code = name, code
            OP_RECORDS[name] = cls

    def arguments(self, *inputs: Any) -> tuple[Any, ...]:
        """The arguments of the single op, in its order. inputs: the tensors of a step that it takes, in that order too."""
        return inputs

    def __call__(self, *inputs: Any) -> Any:
        """Compute the op by itself. inputs: as `arguments` takes them."""
        return OP_KERNELS[self.name](*self.arguments(*inputs))

    def check(self, hidden: int) -> None:
        """Raise ValueError where a matrix does not fit the residual stream of `hidden` numbers, or a vector does not fit its matrix."""

    def _derive(self, **values: int) -> None:
        """Set the fields that follow from others."""
        for key, value in values.items():
            object.__setattr__(self, key, value)


@dataclass(frozen=True, kw_only=True, eq=False)
class NormedOp(Op):
    """An op that begins with a norm of the residual stream and a matrix.

    norm: f32 `(H,)`; None: no norm. eps: of every norm in front of the matrix. norm_bias: f32 `(H,)`, added after the norm. layer_norm:
    the norms subtract the mean (LayerNorm); else they are RMS norms. blob: the matrix.
    """

    norm: Vector | None = None
    eps: float = 0.0
    norm_bias: Vector | None = None
    layer_norm: bool = False
    blob: Blob


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbedOp(Op, name="embed", code=1):
    """Start the step: table[ids] * scale (+ position_table[positions]) -> x f32 `(T, H)`.

    Its inputs are ids and positions, int32 `(T,)`. An id or a position outside its table raises.
    """

    table: Table
    dtype: int = field(init=False)
    vocab: int = field(init=False)
    width: int = field(init=False)
    scale: float = 1.0
    position_table: Table | None = None
    position_dtype: int = field(init=False)
    max_positions: int = field(init=False)

    def __post_init__(self) -> None:
        table, places = self.table, self.position_table
        check_argument(
            table.dtype in layout.DENSE_DTYPES, f"Program.{self.name}", "table dtype", table.dtype, "float32, float16 or bfloat16"
        )
        fits = places is None or (places.dtype in layout.DENSE_DTYPES and places.shape[1:] == table.shape[1:])
        found = places is not None and (places.dtype, places.shape)
        check_argument(fits, f"Program.{self.name}", "position_table", found, f"float (*, {table.shape[1]})")
        self._derive(dtype=layout.DENSE_DTYPES.index(table.dtype), vocab=table.shape[0], width=table.shape[1])
        self._derive(
            position_dtype=0 if places is None else layout.DENSE_DTYPES.index(places.dtype),
            max_positions=0 if places is None else places.shape[0],
        )

    def arguments(self, *inputs: Any) -> tuple[Any, ...]:
        """As `Op.arguments`."""
        ids, *positions = inputs
        return self.table, ids, self.scale, self.position_table, *positions


@dataclass(frozen=True, kw_only=True, eq=False)
class QkvOp(NormedOp, name="norm_qkv_rope", code=2):
    """The first half of a layer's attention: q of x f32 `(T, H)`, rotated -> f32 `(T, Hq, D)`; K and V go to their slots.

    Its inputs are x, positions, slots, and the pools of K and V of `layer`; they are written. positions, slots: int32 `(T,)`;
    slot = page * P + offset. Pools: f16 or f32 `(num_pages, Hkv, P, D)`, or codes uint8 or float8_e4m3fn `(num_pages, Hkv, row)` of a kind
    each (cache/FORMAT.md; P is 256 then). A slot or position out of range raises, and nothing is written.

    blob: the stacked matrix [q; k; v], K = H, N = (Hq + 2 * Hkv) * D. bias: f32 `(N,)`.
    cos, sin: f32 `(max_pos, rotary_dim / 2)`; dimension i rotates with rotary_dim / 2 + i (interleaved: 2 i with 2 i + 1), those after
    rotary_dim pass through. No columns: nothing rotates.
    q_norm, k_norm: f32 `(D,)`, one row per head `(heads, D)`, or `(heads * D,)` for one norm over all heads together; applied before the
    rotation. clip: q, k and v are cut to [-clip, clip] before anything else; 0 = not.
    """

    bias: Vector | None = None
    cos: Vector
    sin: Vector
    max_positions: int = field(init=False)
    rope_half: int = field(init=False)
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Vector | None = None
    q_norm_stride: int = field(init=False)
    q_norm_whole: bool = field(init=False)
    k_norm: Vector | None = None
    k_norm_stride: int = field(init=False)
    k_norm_whole: bool = field(init=False)
    layer: int = 0
    interleaved: bool = False
    clip: float = 0.0

    def __post_init__(self) -> None:
        shapes = self.cos.shape, self.sin.shape
        check_argument(
            shapes[0] == shapes[1] and len(shapes[0]) == 2, f"Program.{self.name}", "cos, sin", shapes, "(max_pos, rotary_dim / 2)"
        )
        self._derive(max_positions=self.cos.shape[0], rope_half=self.cos.shape[1])
        D = self.head_dim
        for side, norm in (("q", self.q_norm), ("k", self.k_norm)):
            stride = 0 if norm is None or tuple(norm.shape) == (D,) else D
            self._derive(**{f"{side}_norm_stride": stride, f"{side}_norm_whole": bool(stride) and norm is not None and norm.dim() == 1})

    def check(self, hidden: int) -> None:
        """As `Op.check`."""
        op, D = f"Program.{self.name}", self.head_dim
        _check_shapes(op, self.blob, self.norm, self.norm_bias, self.bias, (self.num_heads + 2 * self.num_kv_heads) * D)
        for norm, heads in ((self.q_norm, self.num_heads), (self.k_norm, self.num_kv_heads)):
            fits = norm is None or tuple(norm.shape) in ((D,), (heads, D), (heads * D,))
            check_argument(fits, op, "head norm", norm is not None and norm.shape, f"({D},), ({heads}, {D}) or ({heads * D},)")

    def arguments(self, *inputs: Any) -> tuple[Any, ...]:
        """As `Op.arguments`."""
        x, *cache = inputs
        return (
            x, self.norm, self.eps, self.blob, self.bias, self.cos, self.sin, *cache, self.num_heads, self.num_kv_heads, self.head_dim,
            self.q_norm, self.k_norm, self.norm_bias, self.layer_norm, self.interleaved, self.clip,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionOp(Op, name="paged_attention", code=3):
    """Attention of the last q over the pools of `layer`. Its inputs and numbers are those of `ops.paged_attention`."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    layer: int = 0

    def arguments(self, *inputs: Any) -> tuple[Any, ...]:
        """As `Op.arguments`."""
        return *inputs, self.scale, self.window, self.softcap


@dataclass(frozen=True, kw_only=True, eq=False)
class ResidualOp(Op, name="linear_residual", code=4):
    """X f32 `(T, H)` += scale * norm(y @ matrix + bias), in place.

    Its inputs are x and y f32 `(T, K)`: what attention or an MLP left in the buffer `side`. norm: RMS, f32 `(H,)` or None.
    """

    blob: Blob
    bias: Vector | None = None
    norm: Vector | None = None
    eps: float = 0.0
    scale: float = 1.0
    side: bool = False

    def check(self, hidden: int) -> None:
        """As `Op.check`."""
        op = f"Program.{self.name}"
        _check_shapes(op, self.blob, None, None, self.bias, hidden)
        fits = self.norm is None or tuple(self.norm.shape) == (hidden,)
        check_argument(fits, op, "norm", self.norm is not None and tuple(self.norm.shape), f"({hidden},)")

    def arguments(self, *inputs: Any) -> tuple[Any, ...]:
        """As `Op.arguments`."""
        return *inputs, self.blob, self.bias, self.norm, self.eps, self.scale


@dataclass(frozen=True, kw_only=True, eq=False)
class GateUpOp(NormedOp, name="norm_gate_up", code=5):
    """The MLP's activations of the normed x f32 `(T, H)`, act(gate) * up -> f32 `(T, I)`, left in the buffer `side`.

    blob: [gate; up] (N = 2 * I), or up alone where it is not gated. side: True for a second buffer, so that the activations can be
    computed before attention's output is added; attention leaves its output in the first one.
    """

    bias: Vector | None = None
    activation: Activation = "silu"
    gated: bool = True
    side: bool = False

    def __post_init__(self) -> None:
        names = ", ".join(ACTIVATION_NAMES)
        check_argument(self.activation in ACTIVATION_NAMES, f"Program.{self.name}", "activation", repr(self.activation), f"one of {names}")

    def check(self, hidden: int) -> None:
        """As `Op.check`."""
        _check_shapes(f"Program.{self.name}", self.blob, self.norm, self.norm_bias, self.bias, layout.shape(self.blob)[1])

    def arguments(self, *inputs: Any) -> tuple[Any, ...]:
        """As `Op.arguments`."""
        index = ACTIVATION_NAMES.index(self.activation)
        return *inputs, self.norm, self.eps, self.blob, self.bias, index, self.norm_bias, self.layer_norm, self.gated


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadOp(NormedOp, name="norm_head", code=6):
    """End the step: logits f32 `(R, V)` of the wanted rows of x f32 `(R, H)`."""

    bias: Vector | None = None

    def check(self, hidden: int) -> None:
        """As `Op.check`."""
        _check_shapes(f"Program.{self.name}", self.blob, self.norm, self.norm_bias, self.bias, layout.shape(self.blob)[1])

    def arguments(self, *inputs: Any) -> tuple[Any, ...]:
        """As `Op.arguments`."""
        return *inputs, self.norm, self.eps, self.blob, self.bias, self.norm_bias, self.layer_norm


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutedOp(NormedOp, name="routed_mlp", code=7):
    """Add the MLP of the chosen experts to x f32 `(T, H)`, in place -> int32 `(T, top_k)`: the experts by falling weight.

    With h = norm(x) and p = softmax(h @ router): the `top_k` largest p choose experts and weigh them, of equal ones the first. Each row
    gets x += scale * post_norm(sum of p_e * down_e(act(gate_e(h)) * up_e(h)) + shared). A row's experts are added in the order of their
    numbers, whatever other rows there are.

    blob: the router, an output per expert. up, down: per expert the blobs of [gate; up] (2 * I outputs) and of down.
    top_k: experts per row. renormalize: order of the norm that the chosen weights are divided by (1: they sum to 1); 0 leaves them.
    shared_up, shared_down: an expert for every row, or None. shared_gate: blob with one output; its sigmoid weighs that expert.
    post_norm: f32 `(H,)`, RMS norm of the sum, with post_eps; None: none. scale: factor on what is added.

    Raises:
        ValueError: numbers that contradict one another; named.
    """

    up: Sequence[Blob]
    down: Sequence[Blob]
    table: Address = field(init=False, default=0)
    experts: int = field(init=False)
    top_k: int
    renormalize: float = 0.0
    activation: Activation = "silu"
    shared_up: Blob | None = None
    shared_down: Blob | None = None
    shared_gate: Blob | None = None
    post_norm: Vector | None = None
    post_eps: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        op, count = self.name, len(self.up)
        check_argument(
            self.activation in ACTIVATION_NAMES, op, "activation", repr(self.activation), f"one of {', '.join(ACTIVATION_NAMES)}"
        )
        check_argument(count == len(self.down) > 0, op, "number of up and down matrices", (count, len(self.down)), "one of each per expert")
        check_argument(0 < self.top_k <= count, op, "top_k", self.top_k, f"1 to {count} (the experts)")
        check_argument(self.renormalize >= 0, op, "renormalize", self.renormalize, "0 or more")
        half = (self.shared_up is None) != (self.shared_down is None)
        check_argument(not half, op, "shared expert", "half there", "shared_up and shared_down")
        self._derive(experts=count)

    def check(self, hidden: int) -> None:
        """As `Op.check`."""
        op = f"Program.{self.name}"
        inner, shared = (0 if blob is None else layout.shape(blob)[0] for blob in (self.down[0], self.shared_down))
        _check_shapes(op, self.blob, self.norm, self.norm_bias, None, self.experts)
        for blob, K, N in self._shapes(hidden, inner, shared):
            check_argument(layout.shape(blob) == (K, N), op, "shape of a matrix", layout.shape(blob), str((K, N)))
        fits = self.post_norm is None or tuple(self.post_norm.shape) == (hidden,)
        check_argument(fits, op, "post_norm", self.post_norm is not None and self.post_norm.shape, f"({hidden},)")

    def arguments(self, *inputs: Any) -> tuple[Any, ...]:
        """As `Op.arguments`."""
        return (
            *inputs, self.norm, self.eps, self.blob, list(self.up), list(self.down), self.top_k, self.renormalize,
            ACTIVATION_NAMES.index(self.activation), self.norm_bias, self.layer_norm, self.shared_up, self.shared_down, self.shared_gate,
            self.post_norm, self.post_eps, self.scale,
        )  # fmt: skip

    def _shapes(self, hidden: int, inner: int, shared: int) -> Iterator[tuple[Blob, int, int]]:
        """Every matrix with the rows and columns that it must have; inner, shared: inputs of the second matrices."""
        yield self.blob, hidden, self.experts
        for up, down in zip(self.up, self.down):
            yield up, hidden, 2 * inner
            yield down, inner, hidden
        if self.shared_up is not None and self.shared_down is not None:
            yield self.shared_up, hidden, 2 * shared
            yield self.shared_down, shared, hidden
        if self.shared_gate is not None:
            yield self.shared_gate, hidden, 1


@dataclass(frozen=True, kw_only=True, eq=False)
class ResidualOutOp(Op, name="residual_out", code=8):
    """End a part of a model: what the step returns is the residual stream f32 `(T, H)`."""


MatrixOp = QkvOp | ResidualOp | GateUpOp | HeadOp
"""Ops with one matrix, which adapters may change."""


@cache
def words_of(op: type[Op]) -> list[tuple[str, str]]:
    """The name and the type of every field of an op that is a word, without "| None"."""
    found = ((one.name, str(one.type).removesuffix(" | None")) for one in fields(op))
    return [(name, kind) for name, kind in found if kind in KIND_OF_TYPE]


OP_SCHEMA = {name: (op.code, {field: KIND_OF_TYPE[kind] for field, kind in words_of(op)}) for name, op in OP_RECORDS.items()}
"""Name of an op -> its code, and the kinds of its words by field."""


def check_schema(text: str) -> None:
    """Compare a library's schema with ours.

    Args:
        text: of the op `program_schema`: a line for each op, "name code field:kind ...", and "cache_formats name:number ...".

    Raises:
        FormatError: they differ; names the op, or cache_formats, and the first field.
    """
    theirs = {name: fields for name, *fields in (line.split() for line in text.splitlines())}
    ours = {f"op {name}": [str(code), *(f"{field}:{kind}" for field, kind in kinds.items())] for name, (code, kinds) in OP_SCHEMA.items()}
    ours["cache_formats"] = [f"{name}:{number}" for name, number in STORAGE_NUMBERS.items()]
    for name, expected in ours.items():
        found = theirs.get(name.removeprefix("op "), [])
        if found != expected:
            first = next(pair for pair in itertools.zip_longest(found, expected) if pair[0] != pair[1])
            raise FormatError(
                f"the compiled library's program has {first[0]} in {name} where this package has {first[1]}; "
                "library and package are of different versions: reinstall exl2nb"
            )


def _check_shapes(op: str, blob: Blob, norm: Vector | None, norm_bias: Vector | None, bias: Vector | None, outputs: int) -> None:
    K, N = layout.shape(blob)
    check_argument(outputs == N, op, "outputs of the blob", N, str(outputs))
    for name, vector in (("norm", norm), ("norm_bias", norm_bias)):
        check_argument(vector is None or tuple(vector.shape) == (K,), op, name, vector is not None and tuple(vector.shape), f"({K},)")
    check_argument(bias is None or tuple(bias.shape) == (N,), op, "bias", bias is not None and tuple(bias.shape), f"({N},)")
