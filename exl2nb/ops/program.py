"""A whole step as one op: the model writes its layers down once as a program, each step runs it in one call.

The program is an int64 tensor of op codes, sizes and addresses; `Program` keeps the tensors behind the addresses alive. The kernels are
those of the single ops, so the bits are the same too. Knows nothing about models: it only records ops.
"""

from __future__ import annotations

import itertools
import math
import struct
import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from exl2nb.ops import blob as layout
from exl2nb.ops import gpu
from exl2nb.ops._library import REFERENCES, check, define, dynamic_size
from exl2nb.ops.attention import QKVProjection
from exl2nb.ops.kv_codes import page_size
from exl2nb.ops.moe import Experts
from exl2nb.ops.reference import ACTIVATIONS
from exl2nb.ops.weights import pack_concat

MAGIC, VERSION, HEADER_WORDS = 0x3147525032584558, 2, 5
EMBED, QKV, ATTENTION, RESIDUAL, GATE_UP, HEAD, ROUTED = 1, 2, 3, 4, 5, 6, 7

_programs: weakref.WeakValueDictionary[int, Program] = weakref.WeakValueDictionary()
_ids = itertools.count(1)


def _float_bits(value: float) -> int:
    return struct.unpack("<q", struct.pack("<d", value))[0]


class Program:
    """Builder and runner.

    Add the ops of one step in order: embed; per layer norm_qkv_rope, paged_attention, linear_residual, norm_gate_up, linear_residual (with
    `aside` the MLP's result waits in a buffer of its own, so that it can be computed before attention's is added), or routed_mlp in place
    of the last two; norm_head. Then call `run` as often as you like. Arguments as in the ops of the same name, without the batch. All
    tensors must be contiguous, on `device` and stay unchanged; norms, biases, cos and sin are f32. A program for the GPU is run by
    `gpu.Stepper`.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.id = next(_ids)
        self.steps: list[tuple[str, dict[str, Any]]] = []
        self._words: list[int] = []
        self._tensors: list[Tensor] = []
        self.heads: dict[int, Tensor] = {}  # on the GPU: address of a blob -> what the host knows of it
        self._hidden = 0
        self._code: Tensor | None = None
        _programs[self.id] = self

    @cached_property
    def widest(self) -> int:
        """On the GPU: numbers in the largest matrix before the head."""
        head = self.steps[-1][1]["blob"].data_ptr()
        return max((math.prod(gpu.shape_of(known)) for address, known in self.heads.items() if address != head), default=0)

    def embed(self, table: Tensor, *, scale: float = 1.0, position_table: Tensor | None = None) -> None:
        """Start the step: x = table[ids] * scale (+ position_table[positions])."""
        check(table.dtype in layout.DENSE, "Program.embed", "table dtype", table.dtype, "float32, float16 or bfloat16")
        self._hidden = table.shape[1]
        words = [self._address(table), layout.DENSE.index(table.dtype), *table.shape, _float_bits(scale)]
        if position_table is None:
            words += [0, 0, 0]
        else:
            fits = position_table.dtype in layout.DENSE and position_table.shape[1:] == table.shape[1:]
            check(fits, "Program.embed", "position_table", (position_table.dtype, position_table.shape), f"float (*, {table.shape[1]})")
            words += [self._address(position_table), layout.DENSE.index(position_table.dtype), position_table.shape[0]]
        self._add(EMBED, "embed", words, table=table, scale=scale, position_table=position_table)

    def norm_qkv_rope(self, projection: QKVProjection, *, layer: int) -> None:
        """Q of x; K and V go into the pools of `layer`."""
        op, a, D = "Program.norm_qkv_rope", projection, projection.head_dim
        _shapes(op, a.blob, a.norm, a.norm_bias, a.bias, (a.num_heads + 2 * a.num_kv_heads) * D)
        check(a.cos.shape == a.sin.shape and a.cos.dim() == 2, op, "cos, sin", (a.cos.shape, a.sin.shape), "(max_pos, rotary_dim / 2)")
        words = [self._f32(a.norm), _float_bits(a.eps), self._blob(a.blob), self._f32(a.bias), self._f32(a.cos), self._f32(a.sin)]
        words += [*a.cos.shape, a.num_heads, a.num_kv_heads, D]
        flags = a.layer_norm + 2 * a.interleaved
        for bit, norm, heads in ((4, a.q_norm, a.num_heads), (8, a.k_norm, a.num_kv_heads)):
            fits = norm is None or tuple(norm.shape) in ((D,), (heads, D), (heads * D,))
            flags += bit * (norm is not None and norm.dim() == 1 and norm.shape[0] != D)
            check(fits, op, "head norm", norm is not None and norm.shape, f"({D},), ({heads}, {D}) or ({heads * D},)")
            words += [self._f32(norm), 0 if norm is None or tuple(norm.shape) == (D,) else D]
        words += [layer, self._f32(a.norm_bias), flags, _float_bits(a.clip)]
        self._add(QKV, "norm_qkv_rope", words, norm=a.norm, eps=a.eps, blob=a.blob, bias=a.bias, cos=a.cos, sin=a.sin, layer=layer,
                  heads=(a.num_heads, a.num_kv_heads, D), q_norm=a.q_norm, k_norm=a.k_norm,
                  rest=(a.norm_bias, a.layer_norm, a.interleaved, a.clip))  # fmt: skip

    def paged_attention(self, *, layer: int, scale: float, window: int = 0, softcap: float = 0.0) -> None:
        """Attention of the last q over the pools of `layer`."""
        words = [_float_bits(scale), window, _float_bits(softcap), layer]
        self._add(ATTENTION, "paged_attention", words, scale=scale, window=window, softcap=softcap, layer=layer)

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
        words = [self._blob(blob), self._f32(bias), self._f32(norm), _float_bits(eps), _float_bits(scale), int(aside)]
        self._add(RESIDUAL, "linear_residual", words, blob=blob, bias=bias, norm=norm, eps=eps, scale=scale, aside=aside)

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
        words = [self._f32(norm), _float_bits(eps), self._blob(blob), self._f32(bias), index]
        words += [self._f32(norm_bias), int(layer_norm), int(gated), int(aside)]
        self._add(GATE_UP, "norm_gate_up", words, norm=norm, eps=eps, blob=blob, bias=bias, activation=index, aside=aside,
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
        behind = [[blob for blob in (e.shared_up,) if blob is not None], [blob for blob in (e.shared_down,) if blob is not None]]
        where = self._experts([*e.up, *behind[0]], [*e.down, *behind[1]])
        first = e.router
        if self.device.type != "cpu" and e.shared_gate is not None:  # one product for both
            self._blob(e.router)
            first = pack_concat([e.router, e.shared_gate])
        words = [self._f32(e.norm), _float_bits(e.eps), self._blob(first), where, len(e.up), e.top_k, _float_bits(e.renormalize)]
        words += [ACTIVATIONS.index(e.activation), self._f32(e.norm_bias), int(e.layer_norm)]
        words += [0 if blob is None else self._blob(blob) for blob in (e.shared_up, e.shared_down, e.shared_gate)]
        words += [self._f32(e.post_norm), _float_bits(e.post_eps), _float_bits(e.scale)]
        self._add(ROUTED, "routed_mlp", words, experts=experts)

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
        words = [self._f32(norm), _float_bits(eps), self._blob(blob), self._f32(bias), self._f32(norm_bias), int(layer_norm)]
        self._add(HEAD, "norm_head", words, norm=norm, eps=eps, blob=blob, bias=bias, rest=(norm_bias, layer_norm))

    @property
    def code(self) -> Tensor:
        """int64 1-D: header (magic, version, length, id, hidden size), then the ops."""
        if self._code is None:
            length = HEADER_WORDS + len(self._words)
            self._code = torch.tensor([MAGIC, VERSION, length, self.id, self._hidden, *self._words], dtype=torch.int64)
        return self._code

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
    ) -> Tensor:
        """One step: logits f32 `(R, V)` of the rows `logit_rows`; K and V of all layers are written to their slots.

        Raises:
            RuntimeError, ValueError: an id, position, slot, page or row is out of range, or a pool does not fit; nothing is written then.
        """
        return _decode_step_op(
            self.code, ids, positions, slots, block_table, cu_seqlens, context_lens, logit_rows, list(k_pools), list(v_pools)
        )

    def _add(self, op: int, name: str, words: list[int], **arguments: Any) -> None:
        self._code = None
        self._words += [op, *words]
        self.steps.append((name, arguments))

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
        """The word for the table of experts; on the GPU one that all tokens visit stands behind the others."""
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
) -> Tensor:
    key = int(program[3]) if program.dtype == torch.int64 and len(program) > HEADER_WORDS and int(program[0]) == MAGIC else 0
    check(key in _programs, "decode_step", "program", tuple(program.shape), "the code of a Program that is alive")
    pages = k_pools[0].shape[0] if k_pools else 0
    inside = len(slots) == 0 or (int(slots.min()) >= 0 and int(slots.max()) < pages * page_size(k_pools[0]))
    check(inside, "decode_step", "a slot", slots.tolist()[:8], f"below {pages} pages")
    op = REFERENCES
    x = q = logits = torch.empty(0)
    done = {False: logits, True: logits}
    for name, a in _programs[key].steps:
        if name == "embed":
            x = op[name](a["table"], ids, a["scale"], a["position_table"], positions)
        elif name == "norm_qkv_rope":
            layer, where = a["layer"], (a["cos"], a["sin"], positions, slots)
            args = (x, a["norm"], a["eps"], a["blob"], a["bias"], *where, k_pools[layer], v_pools[layer], *a["heads"])
            q = op[name](*args, a["q_norm"], a["k_norm"], *a["rest"])
        elif name == "paged_attention":
            pools = (k_pools[a["layer"]], v_pools[a["layer"]])
            done[False] = op[name](q, *pools, block_table, cu_seqlens, context_lens, a["scale"], a["window"], a["softcap"])
        elif name == "linear_residual":
            op[name](x, done[a["aside"]], a["blob"], a["bias"], a["norm"], a["eps"], a["scale"])
        elif name == "norm_gate_up":
            done[a["aside"]] = op[name](x, a["norm"], a["eps"], a["blob"], a["bias"], a["activation"], *a["rest"])
        elif name == "routed_mlp":
            op[name](x, *a["experts"].arguments())
        else:
            logits = op[name](x[logit_rows.long()], a["norm"], a["eps"], a["blob"], a["bias"], *a["rest"])
    return logits


_decode_step_op = define(
    "decode_step(Tensor program, Tensor ids, Tensor positions, Tensor slots, Tensor block_table, Tensor cu_seqlens, Tensor context_lens, "
    "Tensor logit_rows, Tensor(a!)[] k_pools, Tensor(b!)[] v_pools) -> Tensor",
    fake=lambda program, ids, positions, slots, block_table, cu_seqlens, context_lens, logit_rows, k_pools, v_pools: torch.empty(
        logit_rows.shape[0], dynamic_size()
    ),
    reference=_decode_step,
)
