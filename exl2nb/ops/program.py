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

from exl2nb.ops import blob as layout
from exl2nb.ops import gpu
from exl2nb.ops._library import REFERENCE_OPS, check_argument, define_op, dynamic_size
from exl2nb.ops.blob_weights import pack_concat
from exl2nb.ops.interpreter import CpuBackend, Inputs, interpret
from exl2nb.ops.kv_codes import page_size
from exl2nb.ops.records import ADDRESS_KIND, OP_SCHEMA, REAL_KIND, EmbedOp, HeadOp, Op, QkvOp, ResidualOutOp, RoutedOp, words_of
from exl2nb.ops.reference import ACTIVATION_NAMES

if TYPE_CHECKING:
    from exl2nb.ops.peers import Peers

PROGRAM_MAGIC = 0x3147525032584558
PROGRAM_VERSION = 4
HEADER_WORDS = 5

_programs: weakref.WeakValueDictionary[int, Program] = weakref.WeakValueDictionary()
_ids = itertools.count(1)


def _text(kind: str, word: int, tensors: Mapping[int, Tensor]) -> str:
    """A word that is not 0, as `Program.dump` writes it."""
    if kind != ADDRESS_KIND:
        return f"{struct.unpack('<d', struct.pack('<q', word))[0]:.9g}" if kind == REAL_KIND else str(word)
    tensor = tensors[word]
    if tensor.dtype == torch.uint8:
        return f"blob{list(layout.shape(tensor))}".replace(" ", "")
    return f"{tensor.dtype}{list(tensor.shape)}".removeprefix("torch.").replace(" ", "")


class Program:
    """Builder and runner.

    Add the ops of one step in order: an EmbedOp; per layer a QkvOp, AttentionOp, ResidualOp, GateUpOp, ResidualOp (with `side` the MLP's
    result goes to a second buffer, so that it can be computed before attention's is added), or a RoutedOp in place of the last two; a
    HeadOp, or a ResidualOutOp where it is a part of a model. Then call `run` as often as you like. All tensors must be contiguous, on
    `device` and stay unchanged; norms, biases, cos and sin are f32. A program for the GPU is run by `gpu.StepKernels`.

    Attributes:
        steps: the ops in order.
        heads: on the GPU, address of a blob -> what the host knows of it.
        peers: of a rank's program on the GPU, with whom it exchanges.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.id = next(_ids)
        self.steps: list[Op] = []
        self._words: list[int] = []
        self._tensors: list[Tensor] = []
        self.heads: dict[int, Tensor] = {}
        self.peers: Peers | None = None
        self._hidden = 0
        self._code: Tensor | None = None
        _programs[self.id] = self

    def add(self, *steps: Op) -> None:
        """Add ops.

        Raises:
            ValueError: a tensor is of a wrong shape, dtype or device; named.
        """
        for op in steps:
            self._hidden = op.width if isinstance(op, EmbedOp) else self._hidden
            op.check(self._hidden)
            known = self._experts(op) if isinstance(op, RoutedOp) else {}
            words = [known[name] if name in known else self._word(kind, getattr(op, name)) for name, kind in words_of(type(op))]
            self._code = None
            self._words += [op.code, *words]
            self.steps.append(op)

    @cached_property
    def widest(self) -> int:
        """On the GPU: numbers in the largest matrix before the head."""
        head = self._head
        others = (known for address, known in self.heads.items() if head is None or address != head.data_ptr())
        return max((math.prod(gpu.head_shape(known)) for known in others), default=0)

    @property
    def outputs(self) -> int:
        """Numbers in a row of what a step returns: the vocabulary, or the hidden size of a program without head."""
        head = self._head
        return self._hidden if head is None else layout.shape(head)[1]

    @property
    def layers(self) -> list[list[Op]]:
        """The ops of every layer, without what is before and behind them."""
        found: list[list[Op]] = []
        for op in self.steps:
            if isinstance(op, QkvOp):
                found.append([])
            if not isinstance(op, (EmbedOp, HeadOp, ResidualOutOp)):
                found[-1].append(op)
        return found

    @property
    def _head(self) -> Tensor | None:
        last = self.steps[-1]
        return last.blob if isinstance(last, HeadOp) else None

    @property
    def code(self) -> Tensor:
        """int64 1-D: header (magic, version, length, id, hidden size), then the ops."""
        if self._code is None:
            length = HEADER_WORDS + len(self._words)
            self._code = torch.tensor([PROGRAM_MAGIC, PROGRAM_VERSION, length, self.id, self._hidden, *self._words], dtype=torch.int64)
        return self._code

    def dump(self) -> str:
        """The program as text: a line for each op with its fields in the order of the words.

        A tensor is its dtype and shape, a matrix "blob" and its shape. Fields that are 0 are left out.
        """
        names = {code: (name, kinds) for name, (code, kinds) in OP_SCHEMA.items()}
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

        lora: words of an `ops.lora_table.LoraTable` of this program. adapters: int32 `(T,)`, its row for each token, -1 for none.

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

    def _word(self, kind: str, value: Any) -> int:
        """The word of a field."""
        if value is None:
            return 0
        if kind == "Blob":
            return self._blob(value)
        if kind == "Vector":
            return self._f32(value)
        if kind == "Table":
            return self._address(value)
        if kind == "float":
            return struct.unpack("<q", struct.pack("<d", value))[0]
        return ACTIVATION_NAMES.index(value) if kind == "Activation" else int(value)

    def _address(self, tensor: Tensor) -> int:
        check_argument(
            tensor.is_contiguous() and tensor.device.type == self.device.type,
            "Program",
            "a tensor",
            (tensor.device, tensor.stride()),
            f"contiguous, on {self.device}",
        )
        self._tensors.append(tensor)
        return tensor.data_ptr()

    def _f32(self, tensor: Tensor) -> int:
        check_argument(tensor.dtype == torch.float32, "Program", "dtype of a norm, bias, cos or sin", tensor.dtype, "torch.float32")
        if self.device.type != "cpu" and tensor.data_ptr() % 16:  # its kernels read four numbers at once
            tensor = tensor.clone()
        return self._address(tensor)

    def _experts(self, op: RoutedOp) -> dict[str, int]:
        """The words for the table of experts, on the GPU with the shared expert behind the others, and for the router."""
        up, down = ([*blobs, *([] if shared is None else [shared])] for blobs, shared in ((op.up, op.shared_up), (op.down, op.shared_down)))
        addresses = [[self._blob(a), self._blob(b)] for a, b in zip(up, down)]
        if self.device.type == "cpu":
            return {"table": self._address(torch.tensor(addresses, dtype=torch.int64))}
        words = []
        for parts, blobs in ((2, up), (1, down)):
            words += self._expert_table([self.heads[blob.data_ptr()] for blob in blobs], parts)
        self._tensors.append(torch.tensor(words, dtype=torch.int64))
        known = {"table": self._tensors[-1].data_ptr()}
        if op.shared_gate is not None:  # one product for both
            self._blob(op.blob)
            known["blob"] = self._blob(pack_concat([op.blob, op.shared_gate]))
        return known

    def _expert_table(self, heads: list[Tensor], parts: int) -> tuple[int, int]:
        """On the GPU: the addresses of a table of experts on the host and on the device."""
        table = gpu.expert_table(heads, parts)
        copy = table.to(self.device)
        self._tensors += [table, copy]
        return table.data_ptr(), copy.data_ptr()

    def _blob(self, blob: Tensor) -> int:
        layout.shape(blob)
        address = self._address(blob)
        if self.device.type == "cpu":
            return address
        if address not in self.heads:
            self.heads[address] = gpu.blob_head(blob)
        return self.heads[address].data_ptr()


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
    key = int(program[3]) if program.dtype == torch.int64 and len(program) > HEADER_WORDS and int(program[0]) == PROGRAM_MAGIC else 0
    check_argument(key in _programs, "decode_step", "program", tuple(program.shape), "the code of a Program that is alive")
    pages = k_pools[0].shape[0] if k_pools else 0
    inside = len(slots) == 0 or (int(slots.min()) >= 0 and int(slots.max()) < pages * page_size(k_pools[0]))
    check_argument(inside, "decode_step", "a slot", slots.tolist()[:8], f"below {pages} pages")
    check_argument((lora is None) == (adapters is None), "decode_step", "lora and adapters", "one of them", "both or none")
    fits = adapters is None or tuple(adapters.shape) == (len(ids),)
    check_argument(fits, "decode_step", "adapters", adapters is not None and tuple(adapters.shape), f"({len(ids)},)")
    inputs = Inputs(ids, positions, slots, block_table, cu_seqlens, context_lens, logit_rows)
    backend = CpuBackend(inputs, k_pools, v_pools, kernels=REFERENCE_OPS, lora=lora, adapters=adapters)
    return interpret(_programs[key].steps, backend)


_decode_step_op = define_op(
    "decode_step(Tensor program, Tensor ids, Tensor positions, Tensor slots, Tensor block_table, Tensor cu_seqlens, Tensor context_lens, "
    "Tensor logit_rows, Tensor(a!)[] k_pools, Tensor(b!)[] v_pools, Tensor? lora=None, Tensor? adapters=None) -> Tensor",
    fake=lambda program, ids, positions, slots, block_table, cu_seqlens, context_lens, logit_rows, *_, **__: torch.empty(
        dynamic_size(), dynamic_size()
    ),
    reference=_decode_step,
)
