"""A whole step as one op: the model writes its layers down once as a program, each step runs it in one call.

The program is an int64 tensor of op codes, sizes and addresses; `Program` keeps the tensors at those addresses alive. The kernels are
those of the single ops, so the bits are the same too. Knows nothing about models: it only records ops.
"""

from __future__ import annotations

import itertools
import math
import struct
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exl2nb.core.errors import FormatError
from exl2nb.ops import blob as layout
from exl2nb.ops import gpu
from exl2nb.ops._library import REFERENCES, check, define, dynamic_size
from exl2nb.ops.attention import QKVProjection
from exl2nb.ops.kv_codes import FORMATS, page_size
from exl2nb.ops.moe import Experts
from exl2nb.ops.reference import ACTIVATIONS
from exl2nb.ops.weights import pack_concat

if TYPE_CHECKING:
    from exl2nb.ops.peers import Peers

MAGIC, VERSION, HEADER_WORDS = 0x3147525032584558, 4, 5
ADDRESS, INTEGER, REAL = "address", "integer", "real"
_NORMED = "norm:address eps:real norm_bias:address layer_norm:integer blob:address "
SCHEMA: dict[str, tuple[int, dict[str, str]]] = {  # op -> its code, its fields in order; the structs of csrc/format/program.h
    name: (code, dict(field.split(":") for field in fields.split()))  # pyright: ignore[reportAssignmentType]
    for name, code, fields in (
        (
            "embed",
            1,
            "table:address dtype:integer vocab:integer width:integer scale:real position_table:address position_dtype:integer "
            "max_positions:integer",
        ),
        (
            "norm_qkv_rope",
            2,
            _NORMED + "bias:address cos:address sin:address max_positions:integer rope_half:integer num_heads:integer "
            "num_kv_heads:integer head_dim:integer q_norm:address q_norm_stride:integer q_norm_whole:integer k_norm:address "
            "k_norm_stride:integer k_norm_whole:integer layer:integer interleaved:integer clip:real",
        ),
        ("paged_attention", 3, "scale:real window:integer softcap:real layer:integer"),
        ("linear_residual", 4, "blob:address bias:address norm:address eps:real scale:real side:integer"),
        ("norm_gate_up", 5, _NORMED + "bias:address activation:integer gated:integer side:integer"),
        ("norm_head", 6, _NORMED + "bias:address"),
        (
            "routed_mlp",
            7,
            _NORMED + "table:address experts:integer top_k:integer renormalize:real activation:integer shared_up:address "
            "shared_down:address shared_gate:address post_norm:address post_eps:real scale:real",
        ),
        ("residual_out", 8, ""),
    )
}

_programs: weakref.WeakValueDictionary[int, Program] = weakref.WeakValueDictionary()
_ids = itertools.count(1)


def check_schema(text: str) -> None:
    """Compare a library's schema with ours.

    Args:
        text: of the op `program_schema`: a line for each op, "name code field:kind ...", and "cache_formats name:number ...".

    Raises:
        FormatError: they differ; names the op, or cache_formats, and the first field.
    """
    theirs = {name: fields for name, *fields in (line.split() for line in text.splitlines())}
    ours = {f"op {name}": [str(code), *(f"{field}:{kind}" for field, kind in kinds.items())] for name, (code, kinds) in SCHEMA.items()}
    ours["cache_formats"] = [f"{name}:{number}" for name, number in FORMATS.items()]
    for name, expected in ours.items():
        found = theirs.get(name.removeprefix("op "), [])
        if found != expected:
            first = next(pair for pair in itertools.zip_longest(found, expected) if pair[0] != pair[1])
            raise FormatError(
                f"the compiled library's program has {first[0]} in {name} where this package has {first[1]}; "
                "library and package are of different versions: reinstall exl2nb"
            )


def _float_bits(value: float) -> int:
    return struct.unpack("<q", struct.pack("<d", value))[0]


def _text(kind: str, word: int, tensors: Mapping[int, Tensor]) -> str:
    """A word that is not 0, as `Program.dump` writes it."""
    if kind != ADDRESS:
        return f"{struct.unpack('<d', struct.pack('<q', word))[0]:.9g}" if kind == REAL else str(word)
    tensor = tensors[word]
    if tensor.dtype == torch.uint8:
        return f"blob{list(layout.shape(tensor))}".replace(" ", "")
    return f"{tensor.dtype}{list(tensor.shape)}".removeprefix("torch.").replace(" ", "")


class Program:
    """Builder and runner.

    Add the ops of one step in order: embed; per layer norm_qkv_rope, paged_attention, linear_residual, norm_gate_up, linear_residual (with
    `aside` the MLP's result goes to a buffer of its own, so that it can be computed before attention's is added), or routed_mlp in place
    of the last two; norm_head, or residual_out where it is a part of a model. Then call `run` as often as you like. Arguments as in the
    ops of the same name, without the batch. All tensors must be contiguous, on `device` and stay unchanged; norms, biases, cos and sin
    are f32. A program for the GPU is run by `gpu.StepKernels`.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.id = next(_ids)
        self.steps: list[tuple[str, dict[str, Any]]] = []
        self._words: list[int] = []
        self._tensors: list[Tensor] = []
        self.heads: dict[int, Tensor] = {}  # on the GPU: address of a blob -> what the host knows of it
        self.peers: Peers | None = None  # of a rank's program on the GPU: with whom it exchanges
        self._hidden = 0
        self._code: Tensor | None = None
        _programs[self.id] = self

    @cached_property
    def widest(self) -> int:
        """On the GPU: numbers in the largest matrix before the head."""
        head = self.steps[-1][1].get("blob")
        others = (known for address, known in self.heads.items() if head is None or address != head.data_ptr())
        return max((math.prod(gpu.shape_of(known)) for known in others), default=0)

    @property
    def outputs(self) -> int:
        """Numbers in a row of what a step returns: the vocabulary, or the hidden size of a program without head."""
        head = self.steps[-1][1].get("blob")
        return self._hidden if head is None else layout.shape(head)[1]

    def embed(self, table: Tensor, *, scale: float = 1.0, position_table: Tensor | None = None) -> None:
        """Start the step: x = table[ids] * scale (+ position_table[positions])."""
        check(table.dtype in layout.DENSE, "Program.embed", "table dtype", table.dtype, "float32, float16 or bfloat16")
        self._hidden = table.shape[1]
        fields = {"table": self._address(table), "dtype": layout.DENSE.index(table.dtype), "vocab": table.shape[0], "width": table.shape[1]}
        if position_table is not None:
            fits = position_table.dtype in layout.DENSE and position_table.shape[1:] == table.shape[1:]
            check(fits, "Program.embed", "position_table", (position_table.dtype, position_table.shape), f"float (*, {table.shape[1]})")
            fields |= {"position_table": self._address(position_table), "position_dtype": layout.DENSE.index(position_table.dtype)}
            fields["max_positions"] = position_table.shape[0]
        self._write("embed", **fields, scale=scale)
        self._record("embed", table=table, scale=scale, position_table=position_table)

    def norm_qkv_rope(self, projection: QKVProjection, *, layer: int) -> None:
        """Q of x; K and V go into the pools of `layer`."""
        op, a, D = "Program.norm_qkv_rope", projection, projection.head_dim
        _shapes(op, a.blob, a.norm, a.norm_bias, a.bias, (a.num_heads + 2 * a.num_kv_heads) * D)
        check(a.cos.shape == a.sin.shape and a.cos.dim() == 2, op, "cos, sin", (a.cos.shape, a.sin.shape), "(max_pos, rotary_dim / 2)")
        fields: dict[str, Any] = {"q_norm": self._f32(a.q_norm), "k_norm": self._f32(a.k_norm)}
        for side, norm, heads in (("q", a.q_norm, a.num_heads), ("k", a.k_norm, a.num_kv_heads)):
            fits = norm is None or tuple(norm.shape) in ((D,), (heads, D), (heads * D,))
            check(fits, op, "head norm", norm is not None and norm.shape, f"({D},), ({heads}, {D}) or ({heads * D},)")
            fields[f"{side}_norm_stride"] = 0 if norm is None or tuple(norm.shape) == (D,) else D
            fields[f"{side}_norm_whole"] = norm is not None and norm.dim() == 1 and norm.shape[0] != D
        self._write(
            "norm_qkv_rope", **self._normed(a.norm, a.eps, a.norm_bias, a.layer_norm, a.blob), **fields, bias=self._f32(a.bias),
            cos=self._f32(a.cos), sin=self._f32(a.sin), max_positions=a.cos.shape[0], rope_half=a.cos.shape[1], num_heads=a.num_heads,
            num_kv_heads=a.num_kv_heads, head_dim=D, layer=layer, interleaved=a.interleaved, clip=a.clip,
        )  # fmt: skip
        self._record("norm_qkv_rope", norm=a.norm, eps=a.eps, blob=a.blob, bias=a.bias, cos=a.cos, sin=a.sin, layer=layer,
                     heads=(a.num_heads, a.num_kv_heads, D), q_norm=a.q_norm, k_norm=a.k_norm,
                     rest=(a.norm_bias, a.layer_norm, a.interleaved, a.clip))  # fmt: skip

    def paged_attention(self, *, layer: int, scale: float, window: int = 0, softcap: float = 0.0) -> None:
        """Attention of the last q over the pools of `layer`."""
        self._write("paged_attention", scale=scale, window=window, softcap=softcap, layer=layer)
        self._record("paged_attention", scale=scale, window=window, softcap=softcap, layer=layer)

    def linear_residual(
        self,
        blob: Tensor,
        bias: Tensor | None = None,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        scale: float = 1.0,
        aside: bool = False,
    ) -> None:
        """X += scale * norm((output of the last paged_attention or norm_gate_up) @ matrix + bias); aside: of the last one set aside."""
        _shapes("Program.linear_residual", blob, None, None, bias, self._hidden)
        fits = norm is None or tuple(norm.shape) == (self._hidden,)
        check(fits, "Program.linear_residual", "norm", norm is not None and tuple(norm.shape), f"({self._hidden},)")
        addresses = {"blob": self._blob(blob), "bias": self._f32(bias), "norm": self._f32(norm)}
        self._write("linear_residual", **addresses, eps=eps, scale=scale, side=aside)
        self._record("linear_residual", blob=blob, bias=bias, norm=norm, eps=eps, scale=scale, aside=aside)

    def norm_gate_up(
        self,
        norm: Tensor | None,
        eps: float,
        blob: Tensor,
        bias: Tensor | None = None,
        *,
        activation: str = "silu",
        norm_bias: Tensor | None = None,
        layer_norm: bool = False,
        gated: bool = True,
        aside: bool = False,
    ) -> None:
        """Gated activation of the normed x."""
        check(activation in ACTIVATIONS, "Program.norm_gate_up", "activation", repr(activation), f"one of {', '.join(ACTIVATIONS)}")
        _shapes("Program.norm_gate_up", blob, norm, norm_bias, bias, layout.shape(blob)[1])
        index = ACTIVATIONS.index(activation)
        normed = self._normed(norm, eps, norm_bias, layer_norm, blob)
        self._write("norm_gate_up", **normed, bias=self._f32(bias), activation=index, gated=gated, side=aside)
        self._record("norm_gate_up", norm=norm, eps=eps, blob=blob, bias=bias, activation=index, aside=aside,
                     rest=(norm_bias, layer_norm, gated))  # fmt: skip

    def routed_mlp(self, experts: Experts) -> None:
        """X += the MLP of each row's experts."""
        op, e, H = "Program.routed_mlp", experts, self._hidden
        inner, shared = (0 if blob is None else layout.shape(blob)[0] for blob in (e.down[0], e.shared_down))
        _shapes(op, e.router, e.norm, e.norm_bias, None, len(e.up))
        for blob, K, N in e.shapes(H, inner, shared):
            check(layout.shape(blob) == (K, N), op, "shape of a matrix", layout.shape(blob), str((K, N)))
        fits = e.post_norm is None or tuple(e.post_norm.shape) == (H,)
        check(fits, op, "post_norm", e.post_norm is not None and e.post_norm.shape, f"({H},)")
        shared = [[blob for blob in (e.shared_up,) if blob is not None], [blob for blob in (e.shared_down,) if blob is not None]]
        table = self._experts([*e.up, *shared[0]], [*e.down, *shared[1]])
        first = e.router
        if self.device.type != "cpu" and e.shared_gate is not None:  # one product for both
            self._blob(e.router)
            first = pack_concat([e.router, e.shared_gate])
        shared_blobs = {"shared_up": e.shared_up, "shared_down": e.shared_down, "shared_gate": e.shared_gate}
        self._write(
            "routed_mlp", **self._normed(e.norm, e.eps, e.norm_bias, e.layer_norm, first), table=table, experts=len(e.up), top_k=e.top_k,
            renormalize=e.renormalize, activation=ACTIVATIONS.index(e.activation), post_norm=self._f32(e.post_norm), post_eps=e.post_eps,
            scale=e.scale, **{name: 0 if blob is None else self._blob(blob) for name, blob in shared_blobs.items()},
        )  # fmt: skip
        self._record("routed_mlp", experts=experts)

    def norm_head(
        self,
        norm: Tensor | None,
        eps: float,
        blob: Tensor,
        bias: Tensor | None = None,
        *,
        norm_bias: Tensor | None = None,
        layer_norm: bool = False,
    ) -> None:
        """End the step: logits of the wanted rows of x."""
        _shapes("Program.norm_head", blob, norm, norm_bias, bias, layout.shape(blob)[1])
        self._write("norm_head", **self._normed(norm, eps, norm_bias, layer_norm, blob), bias=self._f32(bias))
        self._record("norm_head", norm=norm, eps=eps, blob=blob, bias=bias, rest=(norm_bias, layer_norm))

    def residual_out(self) -> None:
        """End a part of a model: what the step returns is the residual stream f32 `(T, H)`."""
        self._write("residual_out")
        self._record("residual_out")

    @property
    def code(self) -> Tensor:
        """int64 1-D: header (magic, version, length, id, hidden size), then the ops."""
        if self._code is None:
            length = HEADER_WORDS + len(self._words)
            self._code = torch.tensor([MAGIC, VERSION, length, self.id, self._hidden, *self._words], dtype=torch.int64)
        return self._code

    def dump(self) -> str:
        """The program as text: a line for each op with its fields in the order of the words.

        A tensor is its dtype and shape, a matrix "blob" and its shape. Fields that are 0 are left out.
        """
        names = {code: (name, kinds) for name, (code, kinds) in SCHEMA.items()}
        tensors = {tensor.data_ptr(): tensor for tensor in self._tensors}
        lines, at = [], 0
        while at < len(self._words):
            name, kinds = names[self._words[at]]
            words = zip(kinds.items(), self._words[at + 1 :])
            lines.append(" ".join([name, *(f"{field}={_text(kind, word, tensors)}" for (field, kind), word in words if word)]))
            at += 1 + len(kinds)
        return "\n".join(lines) + "\n"

    def run(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        block_table: Tensor,
        cu_seqlens: Tensor,
        context_lens: Tensor,
        logit_rows: Tensor,
        k_pools: Sequence[Tensor],
        v_pools: Sequence[Tensor],
        lora: Tensor | None = None,
        adapters: Tensor | None = None,
    ) -> Tensor:
        """One step: logits f32 `(R, V)` of the rows `logit_rows`, or the residual stream f32 `(T, H)` of a program that ends with
        residual_out; K and V of all layers are written to their slots.

        lora: words of an `ops.lora.LoraTable` of this program. adapters: int32 `(T,)`, its row for each token, -1 for none.

        Raises:
            RuntimeError, ValueError: an id, position, slot, page or row is out of range, or a pool does not fit; nothing is written then.
        """
        return _decode_step_op(
            self.code,
            ids,
            positions,
            slots,
            block_table,
            cu_seqlens,
            context_lens,
            logit_rows,
            list(k_pools),
            list(v_pools),
            lora,
            adapters,
        )

    def _write(self, op: str, **fields: float) -> None:
        """Add an op's struct to the code; a field that is not given is 0."""
        code, kinds = SCHEMA[op]
        assert fields.keys() <= kinds.keys(), f"{op} has no {fields.keys() - kinds.keys()}"
        values = ((kind, fields.get(field, 0)) for field, kind in kinds.items())
        self._code = None
        self._words += [code, *(_float_bits(value) if kind == REAL else int(value) for kind, value in values)]

    def _record(self, op: str, **arguments: Any) -> None:
        """Keep an op's tensors, for the reference."""
        self.steps.append((op, arguments))

    def _normed(self, norm: Tensor | None, eps: float, norm_bias: Tensor | None, layer_norm: bool, blob: Tensor) -> dict[str, Any]:
        """The fields that most ops begin with: the norm in front of a matrix, and the matrix."""
        addresses = {"norm": self._f32(norm), "norm_bias": self._f32(norm_bias), "blob": self._blob(blob)}
        return {**addresses, "eps": eps, "layer_norm": layer_norm}

    def _address(self, tensor: Tensor) -> int:
        check(
            tensor.is_contiguous() and tensor.device.type == self.device.type,
            "Program",
            "a tensor",
            (tensor.device, tensor.stride()),
            f"contiguous, on {self.device}",
        )
        self._tensors.append(tensor)
        return tensor.data_ptr()

    def _f32(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        check(tensor.dtype == torch.float32, "Program", "dtype of a norm, bias, cos or sin", tensor.dtype, "torch.float32")
        if self.device.type != "cpu" and tensor.data_ptr() % 16:  # its kernels read four numbers at once
            tensor = tensor.clone()
        return self._address(tensor)

    def _experts(self, up: Sequence[Tensor], down: Sequence[Tensor]) -> int:
        """The word for the table of experts; on the GPU the shared expert comes last."""
        addresses = [[self._blob(a), self._blob(b)] for a, b in zip(up, down)]
        if self.device.type == "cpu":
            return self._address(torch.tensor(addresses, dtype=torch.int64))
        words = []
        for parts, blobs in ((2, up), (1, down)):
            table = gpu.expert_table([self.heads[blob.data_ptr()] for blob in blobs], parts)
            copy = table.to(self.device)
            self._tensors += [table, copy]
            words += [table.data_ptr(), copy.data_ptr()]
        self._tensors.append(torch.tensor(words, dtype=torch.int64))
        return self._tensors[-1].data_ptr()

    def _blob(self, blob: Tensor) -> int:
        layout.shape(blob)
        address = self._address(blob)
        if self.device.type == "cpu":
            return address
        if address not in self.heads:
            self.heads[address] = gpu.blob_head(blob)
        return self.heads[address].data_ptr()


def _shapes(op: str, blob: Tensor, norm: Tensor | None, norm_bias: Tensor | None, bias: Tensor | None, outputs: int) -> None:
    K, N = layout.shape(blob)
    check(outputs == N, op, "outputs of the blob", N, str(outputs))
    for name, vector in (("norm", norm), ("norm_bias", norm_bias)):
        check(vector is None or tuple(vector.shape) == (K,), op, name, vector is not None and tuple(vector.shape), f"({K},)")
    check(bias is None or tuple(bias.shape) == (N,), op, "bias", bias is not None and tuple(bias.shape), f"({N},)")


def _decode_step(
    program: Tensor,
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    logit_rows: Tensor,
    k_pools: list[Tensor],
    v_pools: list[Tensor],
    lora: Tensor | None = None,
    adapters: Tensor | None = None,
) -> Tensor:
    from exl2nb.ops.lora import merged

    key = int(program[3]) if program.dtype == torch.int64 and len(program) > HEADER_WORDS and int(program[0]) == MAGIC else 0
    check(key in _programs, "decode_step", "program", tuple(program.shape), "the code of a Program that is alive")
    pages = k_pools[0].shape[0] if k_pools else 0
    inside = len(slots) == 0 or (int(slots.min()) >= 0 and int(slots.max()) < pages * page_size(k_pools[0]))
    check(inside, "decode_step", "a slot", slots.tolist()[:8], f"below {pages} pages")
    check((lora is None) == (adapters is None), "decode_step", "lora and adapters", "one of them", "both or none")
    rows_of = _rows_of(adapters, len(ids))
    op = REFERENCES
    x = torch.zeros(len(ids), int(program[4]))
    q = logits = torch.empty(0)
    done: dict[bool, Tensor] = {}
    for index, (name, plain) in enumerate(_programs[key].steps):
        if name == "paged_attention":
            a, pools = plain, (k_pools[plain["layer"]], v_pools[plain["layer"]])
            done[False] = op[name](q, *pools, block_table, cu_seqlens, context_lens, a["scale"], a["window"], a["softcap"])
            continue
        if name == "residual_out":
            return x
        if name == "norm_head":
            wanted = logit_rows.long()
            x, rows_of = x[wanted], _rows_of(None if adapters is None else adapters[wanted], len(wanted))
        pieces = []  # an op's rows of each adapter
        for adapter, rows in rows_of:
            a = plain if lora is None else merged(lora, adapter, index)
            mine = x[rows]
            if name == "embed":
                x[rows] = op[name](a["table"], ids[rows], a["scale"], a["position_table"], positions[rows])
            elif name == "norm_qkv_rope":
                layer, where = a["layer"], (a["cos"], a["sin"], positions[rows], slots[rows])
                args = (mine, a["norm"], a["eps"], a["blob"], a["bias"], *where, k_pools[layer], v_pools[layer], *a["heads"])
                pieces.append(op[name](*args, a["q_norm"], a["k_norm"], *a["rest"]))
            elif name == "linear_residual":
                op[name](mine, done[a["aside"]][rows], a["blob"], a["bias"], a["norm"], a["eps"], a["scale"])
                x[rows] = mine
            elif name == "norm_gate_up":
                pieces.append(op[name](mine, a["norm"], a["eps"], a["blob"], a["bias"], a["activation"], *a["rest"]))
            elif name == "routed_mlp":
                op[name](mine, *a["experts"].arguments())
                x[rows] = mine
            else:
                pieces.append(op[name](mine, a["norm"], a["eps"], a["blob"], a["bias"], *a["rest"]))
        if not pieces:
            continue
        whole = pieces[0].new_empty(len(x), *pieces[0].shape[1:])
        for (_, rows), piece in zip(rows_of, pieces):
            whole[rows] = piece
        if name == "norm_qkv_rope":
            q = whole
        elif name == "norm_gate_up":
            done[plain["aside"]] = whole
        else:
            logits = whole
    return logits


def _rows_of(adapters: Tensor | None, tokens: int) -> list[tuple[int, Tensor]]:
    """The adapters of a step, and the rows of each."""
    if adapters is None:
        return [(-1, torch.arange(tokens))]
    check(tuple(adapters.shape) == (tokens,), "decode_step", "adapters", tuple(adapters.shape), f"({tokens},)")
    return [(adapter, (adapters == adapter).nonzero()[:, 0]) for adapter in sorted(set(adapters.tolist()))]


_decode_step_op = define(
    "decode_step(Tensor program, Tensor ids, Tensor positions, Tensor slots, Tensor block_table, Tensor cu_seqlens, Tensor context_lens, "
    "Tensor logit_rows, Tensor(a!)[] k_pools, Tensor(b!)[] v_pools, Tensor? lora=None, Tensor? adapters=None) -> Tensor",
    fake=lambda program, ids, positions, slots, block_table, cu_seqlens, context_lens, logit_rows, *_, **__: torch.empty(
        dynamic_size(), dynamic_size()
    ),
    reference=_decode_step,
)
