"""How an Inspection looks: plain text and HTML. Knows nothing of files."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exl2nb.model.inspect import Inspection, Matrix

ORDER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "v1", "w3", "w2")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_BLOCKS = "▁▂▃▄▅▆▇█"
_LOW, _HIGH = 2.0, 8.0
_MAX_COLUMNS = 120


def text(found: Inspection) -> str:
    """Summary, one line per kind of matrix, and the bit map: no control characters, so it reads anywhere."""
    rows = [("matrix", "shape", "bpw", "widths (share of rows)", "groups", "bytes")]
    rows += [_summary_row(name, group) for name, group in _kinds(found).items()]
    rows += [_summary_row(m.key, [m]) for m in found.matrices if m.layer is None]
    return "\n".join([*_facts(found), "", *_table(rows), "", bit_map(found)]).rstrip()


def bit_map(found: Inspection) -> str:
    """One line per kind of matrix, one block per decoder layer; the height is the bits per weight, from 2 to 8 (16 and more is full)."""
    kinds = _kinds(found)
    if not kinds:
        return ""
    layers = sorted({m.layer for m in found.decoder if m.layer is not None})
    width = max(len(_short(name)) for name in kinds)
    scale = f"{_BLOCKS[0]} {_LOW:g} or less ... {_BLOCKS[-1]} {_HIGH:g} or more"
    lines = [f"bits per weight, one column per layer ({layers[0]} to {layers[-1]}): {scale}"]
    for start in range(0, len(layers), _MAX_COLUMNS):
        shown = layers[start : start + _MAX_COLUMNS]
        for name, group in kinds.items():
            cells = {layer: _block(_mean(of)) for layer, of in _by_layer(group).items()}
            lines.append(f"{_short(name):<{width}} {''.join(cells.get(layer, ' ') for layer in shown)}")
    return "\n".join(lines)


def html(found: Inspection) -> str:
    """A self-contained table: no script, no style sheet; readable on light and dark pages."""
    facts = "<br>".join(escape(line) for line in _facts(found))
    layers = sorted({m.layer for m in found.decoder if m.layer is not None})
    style = "padding:1px 4px;text-align:center;font-variant-numeric:tabular-nums"
    head = "".join(f'<th style="{style}">{layer}</th>' for layer in layers)
    body = []
    for name, group in _kinds(found).items():
        at = _by_layer(group)
        cells = "".join(_cell(at[layer], style) if layer in at else f'<td style="{style}"></td>' for layer in layers)
        body.append(f'<tr><th style="text-align:left">{escape(_short(name))}</th>{cells}</tr>')
    for matrix in found.matrices:
        if matrix.layer is None:
            span = (
                f'<td colspan="{max(1, len(layers) - 1)}" style="text-align:left">{escape(_widths([matrix]))}, {_bytes(matrix.nbytes)}</td>'
            )
            body.append(f'<tr><th style="text-align:left">{escape(_short(matrix.key))}</th>{_cell([matrix], style)}{span}</tr>')
    table = f"<table><thead><tr><th>bits per weight</th>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return f'<div><div style="margin-bottom:4px">{facts}</div><div style="overflow-x:auto">{table}</div></div>'


def _facts(found: Inspection) -> list[str]:
    target = "" if found.target_bpw is None else f" (asked for {found.target_bpw:g})"
    decoder = f"{found.decoder_bpw:.3f} bits per weight{target}" if found.decoder else "no matrices"
    return [
        f"{found.path}",
        f"{_plain(found.architecture)}, {found.layers} layers; decoder: {decoder}",
        f"{_bytes(found.total_bytes)} of tensors in {len(found.files)} file{'s' if len(found.files) != 1 else ''}"
        + ("; embeddings tied" if found.tied else ""),
        *_experts(found),
        *_words(found),
    ]


def _words(found: Inspection) -> list[str]:
    """Sizes, chat template, what is unusual, notes."""
    facts, lines = found.facts, []
    if facts.sizes:
        s = facts.sizes
        heads = f"{s['heads']} heads of {s['head_dim']}" + (
            f" ({s['kv_heads']} for keys and values)" if s["kv_heads"] != s["heads"] else ""
        )
        lines.append(f"context {s['context']} tokens, vocabulary {s['vocabulary']}, hidden size {s['hidden_size']}, {heads}")
    if facts.quantization:
        lines.append(f"quantised: {_plain(facts.quantization, 200)}")
    names = ", ".join(map(_plain, facts.chat_templates))
    lines.append("chat template: " + ("none" if not names else "yes" if names == "default" else names))
    if facts.unusual:
        lines.append(f"unusual: {'; '.join(facts.unusual)}")
    return [*lines, *(f"note: {_plain(note, 300)}" for note in facts.notes)]


def _experts(found: Inspection) -> list[str]:
    """What a mixture of experts has that others have not."""
    if found.experts is None:
        return []
    count, visited = found.experts
    return [f"{count} experts in a sparse layer, {visited} for each token: decoding one reads {_bytes(found.token_bytes)} of weights"]


def _kinds(found: Inspection) -> dict[str, list[Matrix]]:
    kinds: dict[str, list[Matrix]] = {}
    for matrix in found.decoder:
        kinds.setdefault(_EXPERT.sub(".experts.*.", matrix.name), []).append(matrix)
    return kinds


def _by_layer(group: list[Matrix]) -> dict[int | None, list[Matrix]]:
    """The matrices of one kind by layer: several where they are experts."""
    found: dict[int | None, list[Matrix]] = {}
    for matrix in group:
        found.setdefault(matrix.layer, []).append(matrix)
    return found


def _mean(group: list[Matrix]) -> float:
    """Bits per weight of several matrices together."""
    return sum(m.bpw * m.weights for m in group) / sum(m.weights for m in group)


def _summary_row(name: str, group: list[Matrix]) -> tuple[str, ...]:
    shapes = {f"{m.in_features}x{m.out_features}" for m in group}
    low, high = min(m.bpw for m in group), max(m.bpw for m in group)
    bpw = f"{low:.2f}" if high - low < 0.005 else f"{low:.2f}-{high:.2f}"
    sizes = sorted({size for m in group for size in m.group_sizes}, reverse=True)
    groups = "/".join(map(str, sizes[:4])) + ("..." if len(sizes) > 4 else "")
    return (
        _short(name),
        shapes.pop() if len(shapes) == 1 else "various",
        bpw,
        _widths(group),
        groups or "-",
        _bytes(sum(m.nbytes for m in group)),
    )


def _widths(group: list[Matrix]) -> str:
    rows: dict[int, int] = {}
    for matrix in group:
        for bits, count in matrix.widths.items():
            rows[bits] = rows.get(bits, 0) + count
    total = sum(rows.values())
    dense = sorted({m.format for m in group if not m.groups})
    return " ".join([f"{bits}b {100 * rows[bits] / total:.0f}%" for bits in sorted(rows, reverse=True)] + dense)


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    right = {2, 5}
    lines = [
        "  ".join(cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip() for row in rows
    ]
    return [lines[0], "  ".join("-" * w for w in widths), *lines[1:]]


def _short(name: str) -> str:
    return _plain(name.removeprefix("self_attn.").removeprefix("mlp.").removeprefix("block_sparse_moe."))


def _plain(name: str, limit: int = 80) -> str:
    """A name from a file as something safe to show: no control characters, not endless."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name[:limit])


def _block(bpw: float) -> str:
    share = (min(max(bpw, _LOW), _HIGH) - _LOW) / (_HIGH - _LOW)
    return _BLOCKS[min(int(share * len(_BLOCKS)), len(_BLOCKS) - 1)]


def _cell(group: list[Matrix], style: str) -> str:
    bpw = _mean(group)
    share = (min(max(bpw, _LOW), _HIGH) - _LOW) / (_HIGH - _LOW)
    what = group[0].key if len(group) == 1 else f"{len(group)} experts like {group[0].key}"
    title = escape(f"{what}: {_widths(group)}, {_bytes(sum(m.nbytes for m in group))}", quote=True)
    return f'<td title="{title}" style="{style};background:rgba(230,120,20,{0.08 + 0.62 * share:.2f})">{bpw:.1f}</td>'


def _bytes(count: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} bytes"
