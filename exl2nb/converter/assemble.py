"""The stage "write": the model directory from the work folder and the dense model. Knows nothing of how either was made."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from exl2nb.converter.context import Context
from exl2nb.converter.result import Conversion
from exl2nb.converter.work import HEAD
from exl2nb.io import safetensors
from exl2nb.io.hf_config import read_config
from exl2nb.model.layout import end_vectors, head_linear, layer_linears, layer_vectors
from exl2nb.model.store import ModelStore
from exl2nb.model.writer import write_model
from exl2nb.quant.exl2 import Exl2Tensors

REPORT = "conversion.json"  # in the model directory


def assemble(context: Context, dst: Path, src: Path, key: str, result: Conversion, quantization: dict[str, Any]) -> None:
    """Write the directory; it appears when everything in it is complete.

    Args:
        context: the dense model's tensors that are stored as they are, and the folder of the quantised layers.
        dst: the directory.
        src: the dense model's, for everything but weights.
        key: of the quantised layers.
        result: goes into the report.
        quantization: `quantization_config` of its config.json.
    """
    with context.meter("write", total=len(result.matrices), unit="matrices") as meter:

        def step(name: str) -> None:
            context.check()
            meter.step(detail=name)

        write_model(
            dst,
            _tensors(context, key, step),
            config=read_config(src),
            source_dir=src,
            quantization_config=quantization,
            extra={REPORT: (json.dumps(result.to_dict(), indent=1) + "\n").encode()},
        )


def _tensors(context: Context, key: str, step: Callable[[str], None]) -> Iterator[tuple[str, Tensor]]:
    weights, work, config = context.weights, context.work, context.weights.config
    for name in end_vectors(config):
        yield name, weights.stored(name)
    for layer in (*range(config.num_layers), HEAD):
        for name, shape in (layer_vectors(config, layer) if layer != HEAD else {}).items():
            yield name, weights.stored(name, shape)
        linears = layer_linears(config, layer) if layer != HEAD else {"head": head_linear(config)}
        with safetensors.SafetensorsFile(work.quantized(key, layer)) as file:
            for linear in linears.values():
                yield from Exl2Tensors.read(file, linear.key).tensors(linear.key).items()
                step(linear.key)
    if isinstance(weights.store, ModelStore):
        for name in weights.store.untouched():
            yield name, weights.store.read_untouched(name)
