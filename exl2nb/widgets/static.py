"""What stands in for a live widget: script-free HTML, a small PNG, the self-contained offline page. Plain strings and bytes; no Jupyter."""

from __future__ import annotations

import base64
import html
import json
import struct
import textwrap
import unicodedata
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

STATIC = Path(__file__).parent.parent / "static"
RGB = tuple[int, int, int]
Pixels = Sequence[Sequence[RGB]]
"""A picture: rows of (r, g, b), 0..255 each."""

SURPRISE_LIMITS = (0.9, 0.5, 0.2, 0.05)
"""Steps of the tint: at least 90 %, 50, 20, 5 and below. The same numbers are in widgets/src/shared/format.ts."""
_TINTS = ("transparent", "rgba(255,200,40,.26)", "rgba(255,160,30,.42)", "rgba(250,110,40,.52)", "rgba(226,60,70,.58)")
WHITE: RGB = (255, 255, 255)
_SOLID: tuple[RGB, ...] = ((206, 206, 206), (250, 224, 150), (250, 196, 120), (247, 160, 120), (228, 116, 122))


def surprise(prob: float | None) -> int:
    """Step 0 (likely) to 4 (below 5 %); 0 where the probability is not known."""
    return 0 if prob is None else sum(prob < limit for limit in SURPRISE_LIMITS)


def percent(prob: float) -> str:
    """`prob` 0..1 as a person reads it."""
    return f"{prob:.0%}" if prob >= 0.1 else f"{prob:.1%}" if prob >= 0.01 else f"{prob:.2%}"


def token_html(items: Sequence[Sequence[Any]], prompt: str = "") -> str:
    """Text tinted by probability, one `span` per token whose title says the number, so that colour is never the only carrier."""
    parts = [f'<span style="opacity:.7">{html.escape(prompt)}</span>'] if prompt else []
    for text, _id, prob, rank, top in items:
        style = f"background:{_TINTS[surprise(prob)]};border-radius:2px"
        if rank is not None and rank > 1:
            style += ";text-decoration:underline dotted"
        title = "" if prob is None else f"{percent(prob)}, rank {rank}" if rank is not None else percent(prob)
        others = ", ".join(f"{other!r} {percent(p)}" for other, p in top[:3])
        title += f"; top choices: {others}" if others else ""
        parts.append(f'<span style="{style}" title="{html.escape(title, quote=True)}">{html.escape(text)}</span>')
    return "".join(parts)


def page(body: str, caption: str = "") -> str:
    """The script-free twin: `body` over one muted line. The class lets a live widget's style sheet hide it."""
    frame = "max-width:60rem;border:1px solid rgba(128,128,128,.4);border-radius:8px;padding:8px 14px;font-size:14px"
    line = f'<div style="opacity:.75;font-size:12px;margin-top:6px">{html.escape(caption)}</div>' if caption else ""
    return f'<div class="exl2nb-static" style="{frame}">{body}{line}</div>'


def text_pixels(cells: Iterable[tuple[str, RGB]], *, columns: int = 53, most: int = 100) -> Pixels:
    """A page of text, each character on the colour that is given with it, wrapped at `columns`; at most so many lines."""
    lines: list[list[tuple[str, RGB]]] = [[]]
    for character, ground in cells:
        if character == "\n" or len(lines[-1]) == columns:
            lines.append([])
        if len(lines) > most:
            break
        if character != "\n":
            lines[-1].append((character, ground))
    return [row for line in lines[:most] for row in _written([*line, *[(" ", WHITE)] * (columns - len(line))])]


def token_pixels(items: Sequence[Sequence[Any]]) -> Pixels:
    """The text, tinted by probability."""
    return text_pixels((character, _SOLID[surprise(prob)]) for text, _id, prob, *_ in items for character in text)


def bar_pixels(share: float, *, width: int = 320, height: int = 12) -> Pixels:
    """A bar filled to `share` (0..1)."""
    filled = round(width * min(1.0, max(0.0, share)))
    return [[(23, 105, 184)] * filled + [(224, 224, 224)] * (width - filled)] * height


def labelled(pixels: Pixels, title: str, *lines: str) -> Pixels:
    """A picture under its title and over lines of text, on white; small ones are enlarged."""
    factor = max(1, min(4, _WIDTH // max(1, len(pixels[0]))))
    body = _enlarged(pixels, factor)
    width = max(_WIDTH, len(body[0]))
    caption = [part for line in lines for part in textwrap.wrap(line, width // (2 * _CELL_PX), max_lines=4, placeholder=" ...")]

    def text(line: str) -> Pixels:
        return _enlarged(_written([(character, WHITE) for character in line]), 2)

    blank = [[WHITE]] * 8
    rows = chain(blank, text(title), blank, body, blank, *map(text, caption), blank)
    return [[WHITE] * 8 + [*row, *[WHITE] * (width - len(row))] + [WHITE] * 8 for row in rows]


# Letters of 5 x 7 pixels for ASCII from the space on: a digit in base 32 is a row, its highest bit the leftmost pixel.
_LETTERS = (
    "00000004444404aaa0000aavavaa4fke5u4op248j3cik8lid44800002488842842224804lel40044v4400000c48000e00000000cc01248g0"
    "ehjlphe4c4444eeh1248vv2421he26aiv22vgu11he68guhhev124888ehhehheehhf12c0cc0cc00cc0c48248g84200v0v008421248eh12404"
    "eh1dlleehhhvhhuhhuhhuehggghesihhhisvgguggvvggugggehgnhhfhhhvhhhe44444e72222ichikokihggggggvhrllhhhhhpljhhehhhhhe"
    "uhhugggehhhliduhhukihfgge11uv444444hhhhhhehhhhha4hhhlllahha4ahhhhha444v1248gve88888e0g84210e22222e4ah0000000000v"
    "842000000e1fhfggmphhu00egghe11djhhf00ehvge698s8880fhhf1eggmphhh40c444e20622icggikokic44444e00qllhh00mphhh00ehhhe"
    "00uhugg00djf1100mpggg00ege1u88s889600hhhjd00hhha400hhlla00ha4ah00hhf1e00v248v244844244444448442448008l200"
)
_UNKNOWN = "vhhhhhv"
_PLAIN = str.maketrans(
    {"\N{MULTIPLICATION SIGN}": "x", "\N{MIDDLE DOT}": ".", "\N{EN DASH}": "-", "\N{EM DASH}": "-", "\N{MICRO SIGN}": "u"}
)
_CELL_PX, _WIDTH = 6, 640
_INK: RGB = (24, 24, 24)


@lru_cache(4096)
def _cell(character: str, ground: RGB) -> tuple[tuple[RGB, ...], ...]:
    """A character with the space around it, 6 x 10 pixels."""
    plain = unicodedata.normalize("NFKD", character).translate(_PLAIN)[:1] or " "
    at = 7 * (ord(plain) - 32)
    letter = _LETTERS[at : at + 7] if " " <= plain <= "~" else "0000000" if plain.isspace() else _UNKNOWN
    rows = [0, *(int(digit, 32) for digit in letter), 0, 0]
    return tuple((*(_INK if bits >> (4 - x) & 1 else ground for x in range(5)), ground) for bits in rows)


def _written(cells: Iterable[tuple[str, RGB]]) -> list[list[RGB]]:
    """One line of text, ten pixels high."""
    return [list(chain.from_iterable(row)) for row in zip(*(_cell(*cell) for cell in cells))]


def _enlarged(pixels: Pixels, factor: int) -> list[list[RGB]]:
    return [wide for row in pixels for wide in [[dot for dot in row for _ in range(factor)]] * factor]


def png(pixels: Pixels) -> bytes:
    """A PNG file."""
    height, width = len(pixels), len(pixels[0])
    raw = b"".join(b"\0" + bytes(chain.from_iterable(row)) for row in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")


def base64_png(data: bytes) -> str:
    """As notebooks store images."""
    return base64.b64encode(data).decode("ascii")


def offline_page(*, esm: str, css: str, state: Mapping[str, Any], title: str, fallback: str) -> str:
    """One HTML file that shows a widget with no kernel and no network: bundle, saved state and a few lines that host them.

    Args:
        esm: text of the widget's bundle.
        css: its style sheet.
        state: synced traits, JSON values.
        title: of the document.
        fallback: script-free twin for readers without JavaScript.
    """
    data = json.dumps({"esm": esm, "state": dict(state)}, ensure_ascii=False).replace("<", "\\u003c")
    host = (STATIC / "host.js").read_text(encoding="utf-8").replace("</", "<\\/")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title)}</title>
<style>body{{margin:24px auto;max-width:60rem;padding:0 16px;font-family:system-ui,sans-serif}}
{css.replace("</", "<" + chr(92) + "/")}</style>
</head>
<body>
<div id="exl2nb-root"></div>
<noscript>{fallback.replace('class="exl2nb-static"', "")}</noscript>
<script type="application/json" id="exl2nb-export">{data}</script>
<script type="module">{host}</script>
</body>
</html>
"""
