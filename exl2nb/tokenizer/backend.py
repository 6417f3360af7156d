"""The tokenizers library, kept from files that abort, panic or fill the memory.

The library is Rust and trusts its files: some end the process as they are read, others when a text is encoded or decoded. So a file that
this machine has not seen is first tried in a helper process, and what it could blow up is refused. The result is kept for each content
and version of the library, in memory and as an empty file in the user's cache folder: the next load costs a hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import tokenizers

from exl2nb.core.errors import TokenizerError
from exl2nb.core.helper import Helper, HelperError, Limits

MAX_TOKEN = 8192  # characters of one token, or of one text that a step inserts
MAX_GROWTH = 64  # characters that one becomes, in normalizers and decoders
MAX_ID = 1 << 22  # of a token: writing a tokenizer out takes memory for every number up to the largest
TRIAL_BYTES = 2  # number of the checks below: a change tries every file again
tried_files: set[str] = set()


def parse(text: str, source: Path) -> tokenizers.Tokenizer:
    """The tokenizer that the text of a tokenizer.json describes; tried in a helper process where the text is new.

    Args:
        text: the JSON. source: named in messages.

    Raises:
        TokenizerError: the library cannot read it, or fails, hangs or grows when it is used.
    """
    raw = text.encode()
    key = hashlib.sha256(f"{TRIAL_BYTES} {tokenizers.__version__} ".encode() + raw).hexdigest()
    kept = _folder() / key
    if key not in tried_files and not os.path.exists(kept):
        try_in_helper(text, len(raw), source)
        with suppress(OSError):  # a read-only home: the next process tries again
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.touch()
    tried_files.add(key)
    try:
        with library_errors:
            return tokenizers.Tokenizer.from_str(text)
    except TokenizerError as error:
        raise TokenizerError(f"{source}: {error}") from error


def _folder() -> Path:
    """Where an empty file for each text that was tried is kept."""
    home = os.environ.get("LOCALAPPDATA") if sys.platform == "win32" else os.environ.get("XDG_CACHE_HOME")
    return Path(home or os.path.expanduser("~/.cache")) / "exl2nb" / "tokenizers"


def try_in_helper(text: str, size: int, source: Path) -> None:
    """Read a tokenizer in a helper process; raise TokenizerError where it fails there."""
    helper = Helper("exl2nb.tokenizer.backend", Limits(cpu_s=30, wall_s=300, memory_bytes=(512 << 20) + 24 * size))
    try:
        helper.ask({"text": text})
    except HelperError as error:
        if error.kind in ("Killed", "MemoryError", "PanicException"):
            raise TokenizerError(
                f"{source}: the tokenizers library fails on it ({str(error)[:200] or error.kind}): the file is damaged or means harm; copy "
                "it from the original model"
            ) from error
        raise TokenizerError(f"{source}: the tokenizers library cannot read it ({str(error)[:200]}); download the file again") from error
    finally:
        helper.close()


def reraise(error: BaseException) -> NoReturn:
    """What the library raises, panics included (which are no `Exception`), as TokenizerError; interrupts as they are."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        raise TokenizerError(f"the tokenizers library failed ({str(error)[:200]}); its tokenizer.json does not fit this text") from error
    raise error


class _LibraryErrors:
    """`reraise` around a block."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            reraise(error)


library_errors = _LibraryErrors()


# What follows runs in the helper.


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Read `text`, encode and decode with it. Raises what the library raises, and ValueError for what could blow up later."""
    text = request["text"]
    backend = tokenizers.Tokenizer.from_str(text)
    _check(json.loads(text))
    backend.no_truncation()
    backend.no_padding()
    size = backend.get_vocab_size(with_added_tokens=True)
    vocab = backend.get_vocab(with_added_tokens=True)
    if max(map(len, vocab), default=0) > MAX_TOKEN:
        raise ValueError(f"it has a token of more than {MAX_TOKEN} characters")
    if (largest := max(vocab.values(), default=0)) > MAX_ID:
        raise ValueError(f"it has a token of number {largest}, expected at most {MAX_ID}")
    ids = [
        *([i] for i in (*range(min(size, 512)), *range(max(0, size - 512), size))),
        *(range(i, min(i + 64, size)) for i in range(0, size, 64)),
    ]
    for some in ids:
        _decode(backend, list(some))
    for probe in _probes():
        _encode(backend, probe)
    backend.encode_special_tokens = True
    _encode(backend, "Hello world")
    return {}


def _probes() -> list[str]:
    """Texts with every character of the basic plane, and with long runs of one, at which a bad pattern starts over and over."""
    plane = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x10000), *range(0x1F300, 0x1F700))))
    runs = [c * 2000 + end for c in (*"a0. \n!_-", "é", "東", "ab", "a ", " \n", "a1") for end in ("", "\0")]
    return ["", "Hello world, it is 12:30.", "\U0010ffff", *runs, *(plane[i : i + 256] for i in range(0, len(plane), 256))]


def _encode(backend: tokenizers.Tokenizer, text: str) -> None:
    most = MAX_GROWTH * len(text) + 1024
    if backend.normalizer is not None and len(backend.normalizer.normalize_str(text)) > most:
        raise ValueError("its normalizer makes a long text of a short one")
    try:
        ids = backend.encode(text).ids
    except Exception:  # such as a missing [UNK]: other texts may work, and this one is refused when it comes
        return
    if len(ids) > 4 * most:
        raise ValueError("it makes many tokens of a short text")
    _decode(backend, ids)


def _decode(backend: tokenizers.Tokenizer, ids: list[int]) -> None:
    with suppress(Exception):
        backend.decode(ids, skip_special_tokens=False)


def _check(tokenizer: dict[str, Any]) -> None:
    """Raise ValueError where normalizers or decoders could make a huge text of a small one."""
    for part in ("normalizer", "decoder"):
        if _growth(tokenizer.get(part)) > MAX_GROWTH:
            raise ValueError(f"its {part} could make more than {MAX_GROWTH} characters of one")


def _growth(step: Any) -> float:
    """Upper bound of the characters that one character becomes."""
    if not isinstance(step, dict):
        return 1
    growth = 1.0
    for inner in (*(step.get("normalizers") or ()), *(step.get("decoders") or ())):
        growth *= _growth(inner)
    if any(isinstance(value, str) and len(value) > MAX_TOKEN for name, value in step.items() if name != "precompiled_charsmap"):
        raise ValueError(f"{step.get('type')} holds a text of more than {MAX_TOKEN} characters")
    if step.get("type") == "Replace":
        plain = step["pattern"].get("String")
        new = len(step["content"])
        growth *= max(1, new / len(plain)) if plain else 1 + new
    return growth


MAX_DECLARED_TOKENS = 1 << 18
_TOKEN_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def add_declared_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], path: Path) -> None:
    """Add the tokens of `added_tokens_decoder`, and make the tokens of `extra_special_tokens` special, as Transformers does.

    Entries that agree with tokenizer.json change nothing. An entry that disagrees takes the place of the one in tokenizer.json.

    Args:
        backend: The tokenizer of tokenizer.json; it is changed.
        config: The contents of tokenizer_config.json.
        path: The file that `config` was read from, for messages.

    Raises:
        TokenizerError: An entry is malformed, or a token would get another id than the one that is declared.
    """
    known = backend.get_added_tokens_decoder()
    declared = config.get("added_tokens_decoder") or {}
    if not isinstance(declared, Mapping) or len(declared) > MAX_DECLARED_TOKENS:
        raise TokenizerError(
            f"{path}: added_tokens_decoder is {str(declared)[:80]}; expected an object of at most {MAX_DECLARED_TOKENS} ids"
        )
    entries = sorted((_entry(key, value, path) for key, value in declared.items()), key=lambda entry: entry[0])
    changed = [(number, token) for number, token in entries if number not in known or repr(known[number]) != repr(token)]
    for number, token in changed:
        known_before = backend.token_to_id(token.content) is not None
        backend.add_tokens([token])
        found = backend.token_to_id(token.content)
        if found != number:
            where = (
                f"in tokenizer.json it is id {found}"
                if known_before
                else f"tokenizer.json has no such token, and the next free id is {found}"
            )
            raise TokenizerError(
                f"{path}: added_tokens_decoder declares {token.content!r} as id {number}, but {where}; copy both files from the same model"
            )
    texts = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens([text for text in _extra(config) if text not in texts and backend.token_to_id(text) is not None])


def _entry(key: Any, value: Any, path: Path) -> tuple[int, tokenizers.AddedToken]:
    content = value.get("content") if isinstance(value, Mapping) else None
    number = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 10 else -1
    if number < 0 or not isinstance(content, str) or not content:
        raise TokenizerError(f"{path}: added_tokens_decoder holds {str(key)[:40]!r}: {str(value)[:80]}; expected an id and its token")
    flags = {flag: value[flag] is True for flag in _TOKEN_FLAGS if flag in value}
    try:
        return number, tokenizers.AddedToken(content, **flags)
    except (TypeError, ValueError, UnicodeEncodeError) as error:
        raise TokenizerError(f"{path}: added_tokens_decoder holds {content[:40]!r}, which cannot be a token ({error})") from error


def _extra(config: Mapping[str, Any]) -> list[str]:
    """The texts of `extra_special_tokens` (a list, or an object by role) and of `additional_special_tokens`, its older name."""
    found: list[str] = []
    for key in ("extra_special_tokens", "additional_special_tokens"):
        value = config.get(key)
        entries = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else []
        for entry in entries:
            text = entry.get("content") if isinstance(entry, Mapping) else entry
            if isinstance(text, str) and text and text.isprintable():
                found.append(text)
    return list(dict.fromkeys(found))
