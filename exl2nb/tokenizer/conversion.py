"""Tokenizers of checkpoints without a tokenizer.json: SentencePiece models, and vocabularies with merges, converted by Transformers.

Transformers knows how each family of models bends its SentencePiece model (prefix spaces, added tokens, where BOS goes), so there is no
converter of our own; it is an optional package, needed for such checkpoints alone. No code from the checkpoint is run.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import tokenizers

from exl2nb.core.errors import TokenizerError
from exl2nb.core.files import placeholder, read_regular
from exl2nb.tokenizer.backend import parse

SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_INSTALL_HINT = "pip install 'exl2nb[sentencepiece]'"
_CONVERT_HINT = "or make a tokenizer.json elsewhere: transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)"
# plain text on which the conversion must agree with the SentencePiece library itself
_PROBE_TEXTS = (
    "Hello world",
    "It was a dark and stormy night; the rain fell in 1234 torrents.",
    "naïve café – 東京",
    "def f(x):\n    return x",
)


def convertible(directory: Path) -> str | None:
    """The file that a tokenizer can be made of, None where there is none."""
    found = next((name for name in SENTENCEPIECE_FILES if (directory / name).is_file()), None)
    pair = (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file()
    return found or ("vocab.json" if pair else None)


def convert(directory: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Make the tokenizer of a checkpoint that has none.

    Returns:
        The tokenizer, and the texts of its special tokens by role ("bos_token", ...).

    Raises:
        TokenizerError: the optional packages are missing, they cannot read the files, or what they made does not agree with the
            SentencePiece model; says what to do.
    """
    file = convertible(directory)
    assert file is not None, "asked for a checkpoint without any tokenizer"
    path = directory / file
    for name in (file, *(("merges.txt",) if file == "vocab.json" else ())):
        try:
            found = placeholder(read_regular(directory / name, 512))
        except OSError as error:
            raise TokenizerError(f"{directory / name}: cannot be read ({error}); expected a regular file") from error
        if found is not None:
            raise TokenizerError(f"{directory / name}: found {found}")
    spm = file in SENTENCEPIECE_FILES
    try:
        packages = [importlib.import_module(name) for name in ("transformers", *(("sentencepiece", "google.protobuf") if spm else ()))]
    except ImportError as error:
        raise TokenizerError(
            f"{path}: there is no tokenizer.json next to it, and converting it needs {error.name}: {_INSTALL_HINT}, {_CONVERT_HINT}"
        ) from error
    transformers, *others = packages
    model = others[0].SentencePieceProcessor if spm else None
    problem: Exception | None = None
    for loader in (transformers.AutoTokenizer, transformers.LlamaTokenizer):
        try:
            made: Any = loader.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
            backend = parse(made.backend_tokenizer.to_str(), path)
        except Exception as error:  # the library raises many kinds for bad files
            problem = problem or error
            continue
        if model is not None and not _agrees(backend, model(str(path))):
            problem = problem or ValueError("the converted tokenizer splits plain text differently from the SentencePiece model")
            continue
        roles = {role: str(text) for role, text in made.special_tokens_map.items() if isinstance(text, str)}
        return backend, roles
    raise TokenizerError(f"{path}: transformers cannot convert it ({str(problem)[:200]}); copy a tokenizer.json from the original model")


def _agrees(backend: tokenizers.Tokenizer, model: Any) -> bool:
    return all(backend.encode(text, add_special_tokens=False).ids == model.encode(text) for text in _PROBE_TEXTS)
