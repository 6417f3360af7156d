"""A forward step on the GPU: decode steps through the step kernels, prompts through prefill. Knows a program and pools, no requests."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exl2nb import ops
from exl2nb.cache.pool import CachePart, KVCache
from exl2nb.model.batch import Batch, batch_tensors
from exl2nb.ops import gpu, gpu_prefill, kernel_code, kv_codes
from exl2nb.ops.interpreter import Inputs

if TYPE_CHECKING:
    from exl2nb.ops.lora_table import LoraTable

MAX_STEP_TOKENS_PER_SEQUENCE = 8  # tokens of one sequence that the step kernels take
MAX_STEP_TOKENS = 512  # tokens of a step that go through the step kernels
MAX_ROUTED_STEP_TOKENS = 64  # of a model with experts: the step kernels read them once for every token that chose them
MAX_PROMPT_STEP_TOKENS = (
    64  # tokens of a step with a prompt in it, at most, that the step kernels take: launched by one call, where prefill makes hundreds
)
PROMPT_STEPS = 3  # such steps in a row, where stream-K GEMMs are quick: more tokens are quicker where a matrix is unpacked once
PROMPT_KEYS = 1 << 14  # tokens before a prompt, at most: the step kernels read them once for every few of its tokens
SEPARATE_DECODE_SEQUENCES = 4  # this many decoding sequences or more get a launch of their own beside prompts
STREAM_K_FROM = 9  # tokens of a step from which on its products are stream-K GEMMs; on Hopper sooner, where a persistent chain ends


class GpuForward:
    """Runs one program.

    Args:
        program: of the model, on the GPU.
        device: where it is.
        deterministic: take every prompt through the step kernels, eight tokens at a time, and steps of any size through the products of
            small ones, so that a token's bits depend neither on how a prompt was cut nor on the rest of the batch. Slow for long prompts.

    `stream_k_from`, to be set before the first step: steps of at least this many tokens use the stream-K GEMM; 0: no step does, so that a
    token's bits are the same in steps of any size. `prompt_tokens`: of a step with prompts, at most, for the step kernels to take it.
    `least_tokens`: step kernels have memory for at least so many.
    """

    def __init__(self, program: ops.Program, device: torch.device, *, deterministic: bool = False) -> None:
        self.program, self.device, self.deterministic = program, device, deterministic
        self.stream_k_from = 0 if deterministic else STREAM_K_FROM
        self.vocab = program.outputs  # the hidden size where the program is a part of a model
        self.most = MAX_ROUTED_STEP_TOKENS if any(isinstance(op, ops.RoutedOp) for op in program.steps) else MAX_STEP_TOKENS
        routed, hopper = self.most == MAX_ROUTED_STEP_TOKENS, device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
        self.prompt_tokens = (
            0 if routed or program.peers else MAX_PROMPT_STEP_TOKENS * PROMPT_STEPS if hopper else MAX_PROMPT_STEP_TOKENS
        )  # tokens
        self.least_tokens = 1
        self._kernels: dict[int, gpu.StepKernels] = {}
        self._lora_buffers: gpu.LoraBuffers | None = None

    def step_kernels(self, tokens: int) -> gpu.StepKernels:
        """The step kernels with memory for at least `tokens` tokens."""
        capacity = 1 << (max(tokens, self.least_tokens) - 1).bit_length()
        if capacity not in self._kernels:
            self._kernels[capacity] = self._new_kernels(capacity)
        return self._kernels[capacity]

    def _new_kernels(self, tokens: int) -> gpu.StepKernels:
        return gpu.StepKernels(self.program.code, tokens, self.device, stream_k_from=self.stream_k_from, peers=self.program.peers)

    def lora_buffers(self, table: LoraTable) -> gpu.LoraBuffers:
        """Where steps find these adapters from now on."""
        if self._lora_buffers is None or not self._lora_buffers.fit(table):
            least = (1, 1) if self._lora_buffers is None else (self._lora_buffers.adapters, self._lora_buffers.width)  # it never shrinks
            adapters, width = max(len(table.adapters), least[0]), max(table.widest, least[1])
            self._lora_buffers = gpu.LoraBuffers(self.program.code, len(self.program.steps), adapters, width, self.device)
        self._lora_buffers.write(table)
        return self._lora_buffers

    def kernels(self, cache: KVCache | CachePart, most: int = MAX_STEP_TOKENS_PER_SEQUENCE) -> list[kernel_code.KernelId]:
        """The kernels of steps of 1 to `most` tokens of one sequence, and of prompts; none is launched."""
        heads = cache.spec.num_kv_heads, cache.spec.head_dim
        scratch = self._new_kernels(most)
        large = self._new_kernels(MAX_PROMPT_STEP_TOKENS) if self.prompt_tokens and not self.deterministic else None
        zeros = torch.zeros(max(most, MAX_PROMPT_STEP_TOKENS) + 1, dtype=torch.int32, device=self.device)
        partial = isinstance(self.program.steps[-1], ops.ResidualOutOp)  # a part of a model, which hands on every row

        def step(kernels: gpu.StepKernels, tokens: int, *, prompts: bool) -> None:
            row = zeros[:1]
            out = torch.empty(tokens if partial else 1, self.vocab, device=self.device)
            kernels.run(
                zeros[:tokens], zeros[:tokens], row.view(1, 1), zeros[:2], row, None if partial else row, cache.k, cache.v,
                cache_formats(cache), heads, out, prompts=prompts,
            )  # fmt: skip

        def steps() -> None:
            for tokens in range(1, most + 1):
                step(scratch, tokens, prompts=False)
            for tokens in () if self.deterministic else gpu_prefill.ROWS_OF_KERNELS:
                if large is not None:
                    step(large, tokens, prompts=True)
                    continue
                for head in self.program.heads.values():
                    x = torch.empty(tokens, gpu.head_shape(head)[0], device=self.device)
                    gpu.linear_from_head(head, x, None, stream_k=True)

        return kernel_code.kernels_of_run(steps)

    def run(self, batch: Batch, cache: KVCache | CachePart, *, ids: Tensor | None = None, lora: LoraTable | None = None) -> Tensor:
        """Logits f32 `(R, V)` on the GPU.

        Args:
            batch: on the host. cache: on the GPU. ids: on the GPU, in place of the batch's. lora: what the batch's adapters mean.
        """
        bounds = batch.cu_seqlens.tolist()
        longest = max(b - a for a, b in itertools.pairwise(bounds))
        if longest <= MAX_STEP_TOKENS_PER_SEQUENCE and bounds[-1] <= self.most:
            if self.deterministic and batch.adapters is not None and mixes_adapters(batch):
                adapted = batch.adapters[batch.cu_seqlens[:-1].long()] >= 0  # a step without adapters has other kernels, with other bits
                return self._run_separately(batch, adapted.tolist(), cache, ids, lora)
            return self._step(batch, cache, ids, lora)
        if self.deterministic:
            return self._pieces(batch, cache, ids, lora)
        if bounds[-1] <= self.prompt_tokens and max(batch.context_lens.tolist()) <= PROMPT_KEYS:
            cuts, kernels = (
                [*range(0, bounds[-1], MAX_PROMPT_STEP_TOKENS), bounds[-1]],
                self._new_kernels(MAX_PROMPT_STEP_TOKENS),
            )  # memory of this step alone
            return self._in_turn(batch, cuts, cache, ids, lora, kernels) if len(cuts) > 2 else self._step(batch, cache, ids, lora, kernels)
        short = [b - a <= MAX_STEP_TOKENS_PER_SEQUENCE for a, b in itertools.pairwise(bounds)]
        if SEPARATE_DECODE_SEQUENCES <= sum(short) < len(short):
            return self._run_separately(batch, short, cache, ids, lora)
        inputs = self.inputs(batch, ids)
        sequences = gpu_prefill.Sequences(bounds, batch.context_lens.tolist())
        adapters = None
        if lora is not None and batch.adapters is not None:
            adapters = gpu_prefill.Adapters.of(self.device, lora.adapters, batch.adapters, batch.logit_rows)
        return gpu_prefill.prefill(self.program, inputs, sequences, cache.k, cache.v, lora=adapters)

    def _step(
        self, batch: Batch, cache: KVCache | CachePart, ids: Tensor | None, lora: LoraTable | None, kernels: gpu.StepKernels | None = None
    ) -> Tensor:
        """One step. kernels: for prompts, which are then allowed in it; None: those of decode steps."""
        i, adapted = self.inputs(batch, ids), None
        if lora is not None and batch.adapters is not None and bool((batch.adapters >= 0).any()):
            adapted = self.lora_buffers(lora), batch.adapters.to(self.device)
        every = torch.equal(batch.logit_rows.cpu(), torch.arange(len(batch.input_ids), dtype=torch.int32))
        rows = None if every else i.logit_rows  # as captured steps have it, for the same bits
        logits = torch.empty(len(batch.logit_rows), self.vocab, device=self.device)
        (kernels or self.step_kernels(len(batch.input_ids))).run(
            i.ids, i.positions, i.block_table, i.cu_seqlens, i.context_lens, rows, cache.k, cache.v, cache_formats(cache),
            (cache.spec.num_kv_heads, cache.spec.head_dim), logits, lora=adapted, prompts=kernels is not None,
        )  # fmt: skip
        return logits

    def _run_separately(
        self, batch: Batch, first: list[bool], cache: KVCache | CachePart, ids: Tensor | None, lora: LoraTable | None
    ) -> Tensor:
        """Some sequences, then the others: those that decode through the step kernels, and prompts through prefill, which costs something
        for each sequence's cache; or those with adapters, and those without.
        """
        out = torch.empty(len(batch.logit_rows), self.vocab, device=self.device)
        for now in (True, False):
            piece, tokens, rows = batch.select([row for row, mine in enumerate(first) if mine == now])
            logits = self.run(piece, cache, ids=None if ids is None else ids[tokens.to(self.device)], lora=lora)
            if len(rows):
                out[rows.to(self.device)] = logits
        return out

    def _pieces(self, batch: Batch, cache: KVCache | CachePart, ids: Tensor | None, lora: LoraTable | None) -> Tensor:
        """The batch as steps of at most eight tokens of one sequence."""
        bounds = batch.cu_seqlens.tolist()
        cuts = [at for first, last in itertools.pairwise(bounds) for at in range(first, last, MAX_STEP_TOKENS_PER_SEQUENCE)]
        return self._in_turn(batch, [*cuts, bounds[-1]], cache, ids, lora)

    def _in_turn(
        self,
        batch: Batch,
        cuts: list[int],
        cache: KVCache | CachePart,
        ids: Tensor | None,
        lora: LoraTable | None,
        kernels: gpu.StepKernels | None = None,
    ) -> Tensor:
        """The batch as steps of the tokens between the cuts."""
        out = torch.empty(len(batch.logit_rows), self.vocab, device=self.device)
        for first, end in itertools.pairwise(cuts):
            piece, rows = batch.cut(first, end)
            logits = self._step(piece, cache, None if ids is None else ids[first:end], lora, kernels)
            if len(rows):
                out[rows.to(self.device)] = logits
        return out

    def inputs(self, batch: Batch, ids: Tensor | None) -> Inputs:
        """The batch on the GPU, in one copy."""
        parts = batch_tensors(batch)
        flat = torch.cat([part.reshape(-1) for part in parts])
        if flat.device.type == "cpu":
            flat = flat.pin_memory().to(self.device, non_blocking=True)
        cut = [piece.view(part.shape) for piece, part in zip(flat.split([part.numel() for part in parts]), parts)]
        if ids is not None:
            cut[0] = ids
        return Inputs(*cut)


def mixes_adapters(batch: Batch) -> bool:
    """Whether some tokens have an adapter and others have none."""
    return batch.adapters is not None and bool((batch.adapters >= 0).any()) and bool((batch.adapters < 0).any())


def cache_formats(cache: KVCache | CachePart) -> tuple[int, int]:
    """Numbers of the formats of K and V."""
    return kv_codes.STORAGE_NUMBERS[cache.spec.k_mode], kv_codes.STORAGE_NUMBERS[cache.spec.v_mode]
