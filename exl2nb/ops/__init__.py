"""Floor 2: ops with schema, fake kernel and fp32 reference; compiled kernels take over when the library is there.

Importing this room defines the ops and loads the compiled library (see `_load.load_libraries`); `exl2nb` itself imports it only when
needed.
"""

from exl2nb.ops import _load
from exl2nb.ops._load import on_device
from exl2nb.ops.blob import shape
from exl2nb.ops.blob_weights import pack_concat, pack_dense, pack_exl2, pack_gptq, reconstruct, unpack
from exl2nb.ops.cpu_sample import draw_ahead, draw_rows, join_ahead, mask_logits, step_draw
from exl2nb.ops.gptq import gptq_losses, gptq_quantize
from exl2nb.ops.layer_ops import linear, paged_attention
from exl2nb.ops.memory_ops import read_memory
from exl2nb.ops.program import Program
from exl2nb.ops.records import AttentionOp, EmbedOp, GateUpOp, HeadOp, Op, QkvOp, ResidualOp, ResidualOutOp, RoutedOp

libraries = _load.load_libraries
libraries()

__all__ = [
    "AttentionOp",
    "EmbedOp",
    "GateUpOp",
    "HeadOp",
    "Op",
    "Program",
    "QkvOp",
    "ResidualOp",
    "ResidualOutOp",
    "RoutedOp",
    "draw_ahead",
    "draw_rows",
    "gptq_losses",
    "gptq_quantize",
    "join_ahead",
    "libraries",
    "linear",
    "mask_logits",
    "on_device",
    "pack_concat",
    "pack_dense",
    "pack_exl2",
    "pack_gptq",
    "paged_attention",
    "read_memory",
    "reconstruct",
    "shape",
    "step_draw",
    "unpack",
]
