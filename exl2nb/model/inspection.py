"""What a model directory holds, from headers and group tables alone; and its weights in single slices, beside those of its original.

No model is loaded, and no compiled library is needed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import torch

from exl2nb.core.errors import ConfigError, FormatError, OptionError, UnknownArchitecture
from exl2nb.core.show import bits_cell, size_text
from exl2nb.io.hf_config import read_config, with_quantization
from exl2nb.io.hub import label
from exl2nb.io.shards import TensorStore
from exl2nb.model.archs import parse_config
from exl2nb.model.config import ModelConfig
from exl2nb.model.facts import Facts, facts_of
from exl2nb.model.layout import layer_linears
from exl2nb.model.store import GPTQ_TENSOR_SUFFIXES, ModelStore, Store, open_store
from exl2nb.quant.bits import Groups, stored_bits
from exl2nb.quant.exl2 import EXL2_SUFFIXES, check_headers, parse_groups
from exl2nb.quant.exl2_slice import Exl2Slices
from exl2nb.quant.gptq_format import GptqSpec, bits_of, header_problems, in_features_of

_NO_LINEARS = ("q_norm", "k_norm", "mlp.gate", "block_sparse_moe.gate", "shared_expert_gate")  # two-dimensional, and never quantised
_LAYER_KEY = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class StoredMatrix:
    """One linear layer (or the embedding) on disk.

    key: module key. layer: its decoder layer, None outside them. name: what is left of the key ("self_attn.q_proj"). format: "exl2", "gptq"
    or a dtype. in_features, out_features: K and N as stored, padding included. groups: `(bits, rows)` each, empty when dense. bpw: stored
    bits per weight, the bias left out. nbytes: all its tensors, the bias included.
    """

    key: str
    layer: int | None
    name: str
    format: str
    in_features: int
    out_features: int
    groups: tuple[tuple[int, int], ...]
    bpw: float
    nbytes: int

    @property
    def weights(self) -> int:
        """K * N."""
        return self.in_features * self.out_features

    @property
    def widths(self) -> dict[int, int]:
        """Rows per width, widest first; empty when dense."""
        rows: dict[int, int] = {}
        for bits, count in self.groups:
            rows[bits] = rows.get(bits, 0) + count
        return rows

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """The different group sizes in rows, falling."""
        return tuple(sorted({rows for _, rows in self.groups}, reverse=True))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "key": self.key,
            "layer": self.layer,
            "name": self.name,
            "format": self.format,
            "in_features": self.in_features,
            "out_features": self.out_features,
            "bpw": round(self.bpw, 4),
            "widths": {str(bits): rows for bits, rows in self.widths.items()},
            "groups": len(self.groups),
            "group_sizes": list(self.group_sizes),
            "bytes": self.nbytes,
        }


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect`. Prints as a table with a map of bits; `to_frame`, `to_dict` for programs.

    path: the directory. architecture: `architectures[0]`. layers: decoder layers. matrices: every decoder linear in layer order, the head
    and the embedding last. decoder_bpw: stored bits of the decoder's linears over their weights, the head and the embedding left out (0
    where there are none). total_bytes: data of all tensors. file_bytes: the files. files: their names. target_bpw: what config.json says
    was asked for. tied: the config says that head and embedding are one table. experts: how many a sparse layer has and how many of them a
    token uses, or None. token_bytes: what decoding one token reads of the files' weights: of the experts those that it uses, of the
    embedding one row. facts: sizes, what is unusual, chat templates, notes.
    """

    path: Path
    architecture: str
    layers: int
    matrices: tuple[StoredMatrix, ...]
    decoder_bpw: float
    total_bytes: int
    file_bytes: int
    files: tuple[str, ...]
    target_bpw: float | None
    tied: bool
    experts: tuple[int, int] | None = None
    token_bytes: int = 0
    facts: Facts = field(default_factory=Facts)

    @property
    def decoder(self) -> tuple[StoredMatrix, ...]:
        """The decoder's linears."""
        return tuple(m for m in self.matrices if m.layer is not None)

    @property
    def head(self) -> StoredMatrix | None:
        """The output head; None where it is the embedding (tied)."""
        return next((m for m in self.matrices if m.layer is None and m.key.endswith("lm_head")), None)

    @property
    def embedding(self) -> StoredMatrix | None:
        """The embedding table."""
        return next((m for m in self.matrices if m.layer is None and m.key.endswith("embed_tokens")), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "path": str(self.path),
            "architecture": self.architecture,
            "layers": self.layers,
            "decoder_bpw": round(self.decoder_bpw, 4),
            "target_bpw": self.target_bpw,
            "total_bytes": self.total_bytes,
            "file_bytes": self.file_bytes,
            "files": list(self.files),
            "tied_embeddings": self.tied,
            "experts": None if self.experts is None else {"count": self.experts[0], "per_token": self.experts[1]},
            "token_bytes": self.token_bytes,
            **self.facts.to_dict(),
            "matrices": [matrix.to_dict() for matrix in self.matrices],
        }

    def to_frame(self) -> Any:
        """A pandas DataFrame, one row per matrix."""
        import pandas as pd

        return pd.DataFrame([matrix.to_dict() for matrix in self.matrices]).astype({"layer": "Int64"})

    def bit_map(self) -> str:
        """Matrices x layers as Unicode blocks, plain text."""
        return _bit_map(self)

    def __str__(self) -> str:
        return _as_text(self)

    def __repr__(self) -> str:
        what = f"{self.architecture}, {self.layers} layers, {self.decoder_bpw:.2f} bpw, {self.total_bytes} bytes"
        return f"Inspection({what}, {str(self.path)!r})"

    def _repr_html_(self) -> str:
        return _as_html(self)


def inspect(directory: str | os.PathLike[str]) -> Inspection:
    """Inspect a model directory, EXL2, GPTQ or fp16/bf16/fp32, without loading it.

    Raises:
        ModelNotFound: no such directory, no config.json or no .safetensors file in it.
        ConfigError: config.json cannot be used, or names another weight format.
        FormatError: a header or a group table breaks a rule.
    """
    directory = Path(directory)
    config = with_quantization(directory, read_config(directory))
    model = _model_config(directory, config)
    with open_store(model, directory) if model else TensorStore(directory) as store:
        spec = (model.gptq if model else None) or GptqSpec()
        matrices = sorted(_matrices(store, spec), key=_matrix_order)
        total = store.nbytes if isinstance(store, ModelStore) else sum(store.info(name).nbytes for name in store.names())
        files = store.files
    decoder = [m for m in matrices if m.layer is not None]
    if not matrices:
        raise FormatError(f"{directory}: found {len(files)} files without a matrix, expected the weights of a model")
    weights = sum(m.weights for m in decoder)
    target = (config.get("quantization_config") or {}).get("bits")
    return Inspection(
        path=directory,
        architecture=config["architectures"][0],
        layers=len({m.layer for m in decoder}),
        matrices=tuple(matrices),
        decoder_bpw=sum(m.bpw * m.weights for m in decoder) / weights if weights else 0.0,
        total_bytes=total,
        file_bytes=sum(path.stat().st_size for path in files),
        files=tuple(path.name for path in files),
        target_bpw=float(target) if isinstance(target, (int, float)) and not isinstance(target, bool) else None,
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=(model.moe.num_experts, model.moe.top_k) if model is not None and model.moe is not None else None,
        token_bytes=total - _idle_bytes(model, matrices),
        facts=facts_of(directory, config, model),
    )


def _idle_bytes(config: ModelConfig | None, matrices: list[StoredMatrix]) -> int:
    """Bytes that decoding one token does not read: the embedding except a row, unless it is the head too; unused experts."""
    idle = 0
    for matrix in matrices:
        if matrix.key.endswith("embed_tokens") and any(m.layer is None and m.key.endswith("lm_head") for m in matrices):
            idle += matrix.nbytes - matrix.nbytes // matrix.out_features
    if config is None or config.moe is None:
        return idle
    visited = config.moe.top_k / config.moe.num_experts
    keys = {linear.key for layer in range(config.num_layers) for role, linear in layer_linears(config, layer).items() if "." in role}
    return idle + round((1 - visited) * sum(matrix.nbytes for matrix in matrices if matrix.key in keys))


def _model_config(directory: Path, config: dict[str, Any]) -> ModelConfig | None:
    """What the architecture makes of it; None where it is unknown: then the tensors are shown under the names they have."""
    try:
        return parse_config(config, where=str(directory / "config.json"))
    except (UnknownArchitecture, ConfigError):
        return None


def _matrix_order(matrix: StoredMatrix) -> tuple[int, int, str]:
    last = 1 << 62
    rank = next((i for i, stem in enumerate(MATRIX_ORDER) if matrix.name.endswith(stem)), len(MATRIX_ORDER))
    return (last if matrix.layer is None else matrix.layer, rank, matrix.key)


def _matrices(store: Store, spec: GptqSpec) -> list[StoredMatrix]:
    found = []
    for name in store.names():
        stem, _, suffix = name.rpartition(".")
        if suffix == "q_weight":
            found.append(_exl2_matrix(store, stem))
        elif suffix == "qweight":
            found.append(_gptq_matrix(store, stem, spec))
        elif suffix == "weight" and len(store.info(name).shape) == 2 and not stem.endswith(_NO_LINEARS):
            found.append(_dense_matrix(store, stem))
    return found


def _split_layer_key(key: str) -> tuple[int | None, str]:
    match = _LAYER_KEY.fullmatch(key)
    return (int(match[1][:9]), match[2]) if match else (None, key)


def _exl2_matrix(store: Store, key: str) -> StoredMatrix:
    infos = {suffix: store.info(f"{key}.{suffix}") for suffix in EXL2_SUFFIXES}
    if f"{key}.bias" in store:
        infos["bias"] = store.info(f"{key}.bias")
    check_headers(infos, key, file=infos["q_weight"].path)
    groups: Groups = parse_groups(store.read(f"{key}.q_groups").tolist(), infos["q_weight"].shape[0], key, file=infos["q_groups"].path)
    rows, columns = sum(count for _, count in groups), infos["q_weight"].shape[1]
    if rows != infos["q_invperm"].shape[0]:
        raise FormatError(
            f"{infos['q_invperm'].path}: tensor {key + '.q_invperm'!r}: found {infos['q_invperm'].shape[0]} rows, expected {rows}, "
            "the sum over the groups of q_groups"
        )
    layer, name = _split_layer_key(key)
    nbytes = sum(info.nbytes for info in infos.values())
    return StoredMatrix(key, layer, name, "exl2", rows, columns, tuple(groups), stored_bits(groups, columns) / (rows * columns), nbytes)


def _gptq_matrix(store: Store, key: str, spec: GptqSpec) -> StoredMatrix:
    whole = store.fused_gptq(key) if isinstance(store, ModelStore) else None
    home, prefix = (store, key) if whole is None else (whole.store, whole.prefix)
    infos = {suffix: home.info(f"{prefix}.{suffix}") for suffix in GPTQ_TENSOR_SUFFIXES if suffix != "g_idx" or f"{prefix}.g_idx" in home}
    if problems := header_problems(infos, prefix, spec):
        raise FormatError(f"{infos['qweight'].path}: {'; '.join(problems)}")
    rows, groups, columns = in_features_of(infos, spec), infos["scales"].shape[0], infos["scales"].shape[1]
    bits = bits_of(infos["qweight"].shape[0], rows)
    assert bits is not None  # header_problems
    taken = columns if whole is None else len(whole.columns)
    stored = bits * rows * taken + groups * taken * (bits + 8 * infos["scales"].dtype.itemsize)
    nbytes = stored // 8 + (infos["g_idx"].nbytes if "g_idx" in infos and whole is None else 0)
    size = -(-rows // groups)
    sizes = tuple((bits, min(size, rows - size * g)) for g in range(groups) if rows > size * g)
    layer, name = _split_layer_key(key)
    bias = store.info(f"{key}.bias").nbytes if f"{key}.bias" in store else 0
    return StoredMatrix(key, layer, name, "gptq", rows, taken, sizes, nbytes * 8 / (rows * taken), nbytes + bias)


def _dense_matrix(store: Store, key: str) -> StoredMatrix:
    info = store.info(f"{key}.weight")
    layer, name = _split_layer_key(key)
    bias = store.info(f"{key}.bias").nbytes if f"{key}.bias" in store else 0
    out_features, in_features = info.shape
    dtype = str(info.dtype).removeprefix("torch.")
    return StoredMatrix(key, layer, name, dtype, in_features, out_features, (), 8.0 * info.dtype.itemsize, info.nbytes + bias)


MATRIX_ORDER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "v1", "w3", "w2")
_EXPERT_KEY = re.compile(r"\.experts\.\d+\.")
_BAR_CHARACTERS = "▁▂▃▄▅▆▇█"
_MIN_BAR_BITS = 2.0
_MAX_BAR_BITS = 8.0
_MAX_COLUMNS = 120


def _as_text(found: Inspection) -> str:
    """Summary, one line per kind of matrix, and the bit map: no control characters, so it reads anywhere."""
    rows = [("matrix", "shape", "bpw", "widths (share of rows)", "groups", "bytes")]
    rows += [_summary_row(name, group) for name, group in _matrix_kinds(found).items()]
    rows += [_summary_row(m.key, [m]) for m in found.matrices if m.layer is None]
    return "\n".join([*_fact_lines(found), "", *_html_table(rows), "", _bit_map(found)]).rstrip()


def _bit_map(found: Inspection) -> str:
    """One line per kind of matrix, one block per decoder layer; the height is the bits per weight, from 2 to 8 (16 and more is full)."""
    kinds = _matrix_kinds(found)
    if not kinds:
        return ""
    layers = sorted({m.layer for m in found.decoder if m.layer is not None})
    width = max(len(_short_name(name)) for name in kinds)
    scale = f"{_BAR_CHARACTERS[0]} {_MIN_BAR_BITS:g} or less ... {_BAR_CHARACTERS[-1]} {_MAX_BAR_BITS:g} or more"
    lines = [f"bits per weight, one column per layer ({layers[0]} to {layers[-1]}): {scale}"]
    for start in range(0, len(layers), _MAX_COLUMNS):
        shown = layers[start : start + _MAX_COLUMNS]
        for name, group in kinds.items():
            cells = {layer: _bar_character(_mean_bpw(of)) for layer, of in _by_layer(group).items()}
            lines.append(f"{_short_name(name):<{width}} {''.join(cells.get(layer, ' ') for layer in shown)}")
    return "\n".join(lines)


def _as_html(found: Inspection) -> str:
    """A self-contained table: no script, no style sheet; readable on light and dark pages."""
    facts = "<br>".join(escape(line) for line in _fact_lines(found))
    layers = sorted({m.layer for m in found.decoder if m.layer is not None})
    style = "padding:1px 4px;text-align:center;font-variant-numeric:tabular-nums"
    head = "".join(f'<th style="{style}">{layer}</th>' for layer in layers)
    body = []
    for name, group in _matrix_kinds(found).items():
        at = _by_layer(group)
        cells = "".join(_html_cell(at[layer], style) if layer in at else f'<td style="{style}"></td>' for layer in layers)
        body.append(f'<tr><th style="text-align:left">{escape(_short_name(name))}</th>{cells}</tr>')
    for matrix in found.matrices:
        if matrix.layer is None:
            text = f"{escape(_width_counts([matrix]))}, {size_text(matrix.nbytes)}"
            span = f'<td colspan="{max(1, len(layers) - 1)}" style="text-align:left">{text}</td>'
            body.append(f'<tr><th style="text-align:left">{escape(_short_name(matrix.key))}</th>{_html_cell([matrix], style)}{span}</tr>')
    table = f"<table><thead><tr><th>bits per weight</th>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return f'<div><div style="margin-bottom:4px">{facts}</div><div style="overflow-x:auto">{table}</div></div>'


def _fact_lines(found: Inspection) -> list[str]:
    target = "" if found.target_bpw is None else f" (asked for {found.target_bpw:g})"
    decoder = f"{found.decoder_bpw:.3f} bits per weight{target}" if found.decoder else "no matrices"
    return [
        f"{found.path}",
        f"{_printable_name(found.architecture)}, {found.layers} layers; decoder: {decoder}",
        f"{size_text(found.total_bytes)} of tensors in {len(found.files)} file{'s' if len(found.files) != 1 else ''}"
        + ("; embeddings tied" if found.tied else ""),
        *_expert_words(found),
        *_summary_words(found),
    ]


def _summary_words(found: Inspection) -> list[str]:
    """Sizes, chat template, what is unusual, notes."""
    facts, lines = found.facts, []
    if facts.sizes:
        s = facts.sizes
        heads = f"{s['heads']} heads of {s['head_dim']}"
        heads += f" ({s['kv_heads']} for keys and values)" if s["kv_heads"] != s["heads"] else ""
        lines.append(f"context {s['context']} tokens, vocabulary {s['vocabulary']}, hidden size {s['hidden_size']}, {heads}")
    if facts.quantization:
        lines.append(f"quantised: {_printable_name(facts.quantization, 200)}")
    names = ", ".join(map(_printable_name, facts.chat_templates))
    lines.append("chat template: " + ("none" if not names else "yes" if names == "default" else names))
    if facts.unusual:
        lines.append(f"unusual: {'; '.join(facts.unusual)}")
    return [*lines, *(f"note: {_printable_name(note, 300)}" for note in facts.notes)]


def _expert_words(found: Inspection) -> list[str]:
    """What a mixture of experts has that others have not."""
    if found.experts is None:
        return []
    count, visited = found.experts
    return [f"{count} experts in a sparse layer, {visited} for each token: decoding one reads {size_text(found.token_bytes)} of weights"]


def _group_matrices(matrices: Iterable[StoredMatrix], key: Callable[[StoredMatrix], Any]) -> dict[Any, list[StoredMatrix]]:
    found: dict[Any, list[StoredMatrix]] = {}
    for matrix in matrices:
        found.setdefault(key(matrix), []).append(matrix)
    return found


def _matrix_kinds(found: Inspection) -> dict[str, list[StoredMatrix]]:
    return _group_matrices(found.decoder, lambda matrix: _EXPERT_KEY.sub(".experts.*.", matrix.name))


def _by_layer(group: list[StoredMatrix]) -> dict[int | None, list[StoredMatrix]]:
    """The matrices of one kind by layer: several where they are experts."""
    return _group_matrices(group, lambda matrix: matrix.layer)


def _mean_bpw(group: list[StoredMatrix]) -> float:
    """Bits per weight of several matrices together."""
    return sum(m.bpw * m.weights for m in group) / sum(m.weights for m in group)


def _summary_row(name: str, group: list[StoredMatrix]) -> tuple[str, ...]:
    shapes = {f"{m.in_features}x{m.out_features}" for m in group}
    low, high = min(m.bpw for m in group), max(m.bpw for m in group)
    bpw = f"{low:.2f}" if high - low < 0.005 else f"{low:.2f}-{high:.2f}"
    sizes = sorted({size for m in group for size in m.group_sizes}, reverse=True)
    groups = "/".join(map(str, sizes[:4])) + ("..." if len(sizes) > 4 else "")
    shape = shapes.pop() if len(shapes) == 1 else "various"
    return _short_name(name), shape, bpw, _width_counts(group), groups or "-", size_text(sum(m.nbytes for m in group))


def _width_counts(group: list[StoredMatrix]) -> str:
    rows: dict[int, int] = {}
    for matrix in group:
        for bits, count in matrix.widths.items():
            rows[bits] = rows.get(bits, 0) + count
    total = sum(rows.values())
    dense = sorted({m.format for m in group if not m.groups})
    return " ".join([f"{bits}b {100 * rows[bits] / total:.0f}%" for bits in sorted(rows, reverse=True)] + dense)


def _html_table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    right = {2, 5}
    lines = [
        "  ".join(cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip() for row in rows
    ]
    return [lines[0], "  ".join("-" * w for w in widths), *lines[1:]]


def _short_name(name: str) -> str:
    return _printable_name(name.removeprefix("self_attn.").removeprefix("mlp.").removeprefix("block_sparse_moe."))


def _printable_name(name: str, limit: int = 80) -> str:
    """A name from a file as something safe to show: no control characters, not endless."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name[:limit])


def _bar_character(bpw: float) -> str:
    share = (min(max(bpw, _MIN_BAR_BITS), _MAX_BAR_BITS) - _MIN_BAR_BITS) / (_MAX_BAR_BITS - _MIN_BAR_BITS)
    return _BAR_CHARACTERS[min(int(share * len(_BAR_CHARACTERS)), len(_BAR_CHARACTERS) - 1)]


def _html_cell(group: list[StoredMatrix], style: str) -> str:
    what = group[0].key if len(group) == 1 else f"{len(group)} experts like {group[0].key}"
    return bits_cell(_mean_bpw(group), f"{what}: {_width_counts(group)}, {size_text(sum(m.nbytes for m in group))}", style)


class Weights:
    """The weights of an EXL2 model, read from its files.

    Args:
        directory: of the model.
        original: directory of the fp16, bf16 or fp32 model it was made of, or None.

    Raises:
        ModelNotFound, ConfigError, FormatError: a directory cannot be read. UnknownArchitecture: config.json names one that is not known.
        OptionError: the first has no EXL2 matrix, or the second has quantised ones.
    """

    def __init__(self, directory: str | os.PathLike[str], original: str | os.PathLike[str] | None = None) -> None:
        self.inspection: Inspection = inspect(directory)
        self.matrices: dict[str, StoredMatrix] = {m.key: m for m in self.inspection.matrices if m.format == "exl2"}
        if not self.matrices:
            formats = ", ".join(sorted({m.format for m in self.inspection.matrices}))
            raise OptionError(f"{directory}: found matrices in {formats}, expected EXL2 ones: convert it first (exl2nb.convert)")
        self._store, _ = _open(Path(directory))
        self._slices: dict[str, Exl2Slices] = {}
        try:
            self._original, self._tied = (None, {}) if original is None else _open(Path(original))
            if self._original is not None and self._original.is_exl2:
                raise OptionError(f"{original}: is an EXL2 model too; expected the fp16, bf16 or fp32 one that {directory} was made of")
        except BaseException:
            self._store.close()
            raise

    def slices(self, key: str) -> Exl2Slices:
        """The matrix under a module key.

        Raises:
            OptionError: there is none. FormatError: it breaks a rule of the format.
        """
        if key not in self.matrices:
            some = ", ".join(list(self.matrices)[:3])
            raise OptionError(f"{label(self.inspection.path)}: no EXL2 matrix {key!r}; there are {len(self.matrices)}, such as {some}")
        if key not in self._slices:
            self._slices = {key: Exl2Slices(self._store, key)}  # the last one is enough
        return self._slices[key]

    @property
    def has_original(self) -> bool:
        """Whether there is an original to compare with."""
        return self._original is not None

    def original(self, key: str, column: int) -> torch.Tensor | None:
        """One column of the original matrix: float32 `(K,)`, rows in their own order; None where it is not known, or is padding.

        Raises:
            FormatError: the original's matrix has another number of rows.
        """
        name = f"{self._tied.get(key, key)}.weight"
        if self._original is None or name not in self._original:
            return None
        info = self._original.info(name)
        if column >= info.shape[0]:
            return None
        if len(info.shape) != 2 or info.shape[1] != self.slices(key).in_features:
            raise FormatError(
                f"{info.path}: tensor {name!r}: found shape {info.shape}, expected {self.slices(key).in_features} columns: "
                "is it the original of this model?"
            )
        return self._original.read(name, rows=(column, column + 1))[0].float()

    def original_rows(self, key: str, rows: torch.Tensor) -> torch.Tensor | None:
        """Some rows (input channels) of the original matrix: float32 `(L, N)`; None where it is not known. Reads the whole matrix.

        Raises:
            FormatError: the original's matrix has another number of rows.
        """
        if self.original(key, 0) is None or self._original is None:
            return None
        return self._original.read(f"{self._tied.get(key, key)}.weight")[:, rows].T.float()

    def close(self) -> None:
        """Close all files."""
        self._store.close()
        if self._original is not None:
            self._original.close()

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(directory: Path) -> tuple[ModelStore, dict[str, str]]:
    """Files of a model, and its head's name -> the embedding's where one table serves as both."""
    config = parse_config(with_quantization(directory, read_config(directory)), where=str(directory / "config.json"))
    store, names = open_store(config, directory), config.names
    return store, {} if f"{names.head}.weight" in store else {names.head: names.embed}
