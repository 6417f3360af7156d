"""An adapter written into the weights of the model that it was made for. Needs no compiled library."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from exl2nb.core.errors import FormatError, OptionError
from exl2nb.core.progress import Meter, Sink, showing
from exl2nb.io import hub
from exl2nb.io.hf_config import read_config
from exl2nb.io.shards import TensorStore
from exl2nb.model.archs import parse_config
from exl2nb.model.config import ModelConfig
from exl2nb.model.layout import Linear, head_linear, layer_linears
from exl2nb.model.lora import LoraFile, LoraTarget, read_lora
from exl2nb.model.store import fused_linears, row_order
from exl2nb.model.writer import write_model


def merge(
    model: str | os.PathLike[str],
    lora: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Sink | Literal["auto"] | None = "auto",
) -> Path:
    """Write a model with an adapter in its weights, in the model's own dtype; `ex.convert` then quantises both together.

    Args:
        model: directory or hub id of an fp16, bf16 or fp32 model.
        lora: directory or hub id of an adapter in PEFT's format.
        out: directory to make.
        overwrite: replace an existing directory.
        progress: takes the events of stage "merge"; "auto" and None as in `load`.

    Returns:
        `out`.

    Raises:
        ModelNotFound, ConfigError, FormatError: one of them cannot be read, or they do not fit each other. OptionError: the model is
        quantised; an adapter of a tied embedding or head, which would change the other too. ConversionError: `out` cannot be written.
    """
    with showing(progress, "merge") as sink:
        folder = hub.resolve(model, progress=sink)
        raw = read_config(folder)
        config = parse_config(raw, where=str(folder / "config.json"))
        file = read_lora(hub.resolve(lora, progress=sink, adapter=True), config)
        with TensorStore(folder) as store:
            if store.is_exl2 or any(name.endswith(".qweight") for name in store.names()):
                raise OptionError(f"{folder}: is quantised; expected the fp16, bf16 or fp32 model, to be converted after the merge")
            if config.tie_word_embeddings and {(-1, ("embed",)), (-1, ("head",))} & set(file.targets):
                raise OptionError(
                    f"{file.path}: adapts the embedding or the head, which are one table in this model; use it without merging"
                )
            write_model(out, _merged_tensors(store, config, file, sink), config=raw, source_dir=folder, overwrite=overwrite)
    return Path(out)


def _merged_tensors(store: TensorStore, config: ModelConfig, file: LoraFile, sink: Sink | None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model under its own name, changed where the adapter says so."""
    modules: dict[str, list[Linear]] = {config.names.head: [head_linear(config)], **fused_linears(config)}
    for layer in range(config.num_layers):
        modules |= {linear.key: [linear] for linear in layer_linears(config, layer).values()}
    used: set[object] = set()
    names = store.names()
    with Meter("merge", total=len(names), unit="tensors", sink=sink) as meter:
        for name in names:
            ours = name
            for old, new in config.files.renames:
                ours = ours.replace(old, new)
            key, _, kind = ours.rpartition(".")
            tensor = store.read(name)
            linears = modules.get(key, [])
            place = (linears[0].layer, tuple(linear.role for linear in linears)) if linears else (-1, ("embed",))
            target = file.targets.get(place) if linears or key == config.names.embed else None
            if target is not None and kind == "weight":
                used.add(place)
                tensor = _merge_weight(tensor, target, config, linears)
            elif kind == "bias" and linears:
                tensor = _merge_bias(tensor, target, file, config, linears, used)
            elif ours in file.vectors:
                used.add(ours)
                tensor = file.vectors[ours].to(tensor.dtype)
            yield name, tensor
            meter.step()
    biased = {place for place, target in file.targets.items() if target.bias is not None and ("bias", place) not in used}
    if missing := [*(set(file.targets) - used), *(set(file.vectors) - used), *biased]:
        raise FormatError(f"{file.path}: {missing[0]} has no tensor of its own in {store.directory}; it cannot be merged")


def _merge_weight(tensor: Tensor, target: LoraTarget, config: ModelConfig, linears: list[Linear]) -> Tensor:
    """A matrix, or the embedding, as it is stored."""
    weight = tensor.float()
    if not linears:
        return (weight + target.scale / config.embed_scale * (target.a @ target.b.T)).to(tensor.dtype)
    weight = weight.T if config.files.transposed else weight
    order = row_order(config, linears)
    rows = weight[order] + target.scale * (target.b @ target.a)
    if target.magnitude is not None:
        rows = rows * (target.magnitude / rows.norm(dim=1).clamp(min=1e-20))[:, None]
    merged = torch.empty_like(weight)
    merged[order] = rows
    return (merged.T if config.files.transposed else merged).to(tensor.dtype).contiguous()


def _merge_bias(
    tensor: Tensor, target: LoraTarget | None, file: LoraFile, config: ModelConfig, linears: list[Linear], used: set[object]
) -> Tensor:
    """A linear's bias: replaced, and with what the adapter adds."""
    order = row_order(config, linears)
    rows = list(tensor.float()[order].split([linear.out_features for linear in linears]))
    for i, linear in enumerate(linears):
        if (name := f"{linear.key}.bias") in file.vectors:
            used.add(name)
            rows[i] = file.vectors[name]
    merged = torch.cat(rows)
    if target is not None and target.bias is not None:
        used.add(("bias", (linears[0].layer, tuple(linear.role for linear in linears))))
        merged = merged + target.bias
    out = torch.empty_like(merged)
    out[order] = merged
    return out.to(tensor.dtype)
