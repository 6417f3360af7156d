"""Text to ids and back, by the tokenizers library. Knows no model and no chat format."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from exl2nb.core.errors import TokenizerError
from exl2nb.core.files import read_object, read_text
from exl2nb.tokenizer.backend import add_declared_tokens, library_errors, parse, reraise
from exl2nb.tokenizer.conversion import convert, convertible
from exl2nb.tokenizer.literal import LITERAL_MARK, ids_without_marks
from exl2nb.tokenizer.template import ChatTemplates
from exl2nb.tokenizer.token_texts import PlainTexts, byte_table, byte_tokens, piece_bytes, plain_texts

_TOKENIZER_FILE = "tokenizer.json"
_LOSSLESS_STEPS = frozenset(("ByteLevel", "Digits", "Metaspace", "Prepend"))  # normalizers and pre-tokenizers that leave no character out


class Tokenizer:
    """One model's tokenizer and the special tokens its files agree on.

    Attributes:
        bos_id: the token a text begins with, or None. eos_ids: every token that ends a text: the ids of generation_config.json and
        config.json, and the `eos_token` of tokenizer_config.json. special_tokens: their texts by role ("bos_token", ...), for chat
        templates; tokenizer_config.json names them, else special_tokens_map.json, else a conversion. templates: the chat templates of the
        model.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, directory: Path | None = None, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        self.backend = backend
        folder = directory if directory is not None else Path()
        config = read_object(folder / "tokenizer_config.json") if directory else {}
        add_declared_tokens(backend, config, folder / "tokenizer_config.json")
        model, generation = (read_object(folder / name) if directory else {} for name in ("config.json", "generation_config.json"))
        own = _special_tokens(read_object(folder / "special_tokens_map.json")) if directory else {}
        known = {role: text for role, text in {**(special_tokens or {}), **own}.items() if _id_of(backend, text) is not None}
        self.special_tokens = {**known, **_special_tokens(config)}
        self.bos_id = self._special_id("bos_token", (generation, model), "bos_token_id", folder)
        self._own_eos = self._special_id("eos_token", (), "", folder)
        self.eos_ids = self._eos_ids((generation, model), folder)
        self._add_bos = config.get("add_bos_token") is True
        self._ends_prompts = bool(self._own_eos is not None and backend.encode("").ids[-1:] == [self._own_eos])
        self.templates = ChatTemplates.load(folder, config) if directory else ChatTemplates({}, folder)
        self._pieces: dict[int, str] = {}
        self._literal: tokenizers.Tokenizer | None = None
        self.skipped_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Tokenizer:
        """Read the tokenizer of a model directory; without tokenizer.json a SentencePiece model or vocab.json and merges.txt.

        Raises:
            TokenizerError: there is none or it cannot be used, a neighbouring file contradicts it, or the packages that convert it are
                missing; says what to do.
        """
        directory = Path(directory)
        path = directory / _TOKENIZER_FILE
        if not path.is_file() and convertible(directory):
            backend, roles = convert(directory)
            return cls(_plain(backend), directory=directory, special_tokens=roles)
        if not path.is_file():
            raise TokenizerError(
                f"{directory}: has no {_TOKENIZER_FILE}; copy it from the original model, or make it with "
                f"transformers.AutoTokenizer.from_pretrained(...).save_pretrained({str(directory)!r})"
            )
        return cls(_plain(parse(read_text(path), path)), directory=directory)

    @property
    def vocab_size(self) -> int:
        """Tokens it knows, added ones included; the model's may be larger (padding)."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special: bool = True, *, parse_special: bool = True) -> list[int]:
        """Turn text into ids.

        BOS comes from the post-processor of tokenizer.json. Where that adds none and tokenizer_config.json has `add_bos_token`, it is
        added here, since older exports rely on it. A text that begins with BOS, such as a rendered chat, gets no second one. EOS is
        never added, whatever the post-processor or `add_eos_token` ask for: the model would begin a new text instead of continuing.

        Args:
            text: any string; lone surrogates are replaced, since they have no UTF-8 form.
            add_special: add what the model's files ask for, usually BOS.
            parse_special: texts of special tokens become those tokens; False reads them as plain text (for text from strangers).

        Raises:
            TokenizerError: the tokenizer has no token for a part of the text, or fails at it.
        """
        text = text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text
        backend = self.backend if parse_special else self._literal_backend()
        try:
            ids = backend.encode(text, add_special_tokens=add_special).ids
        except BaseException as error:
            reraise(error)
        if not add_special:
            return ids
        bos = self.special_tokens.get("bos_token")
        if bos and text.startswith(bos) and parse_special and ids[:2] == [self.bos_id, self.bos_id]:
            del ids[0]
        if self._add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        if self._ends_prompts and ids[-1:] == [self._own_eos]:
            del ids[-1]
        return ids

    def encode_chat(self, text: str) -> list[int]:
        """Turn a rendered conversation into ids. Control tokens that `literal.protect` marked in the messages stay plain text.

        Raises:
            TokenizerError: as `encode`.
        """
        if LITERAL_MARK not in text:
            return self.encode(text, add_special=False)
        text = text.encode("utf-8", "replace").decode("utf-8")
        try:
            encoded = self.backend.encode(text, add_special_tokens=False)
        except BaseException as error:
            reraise(error)
        ids = ids_without_marks(text, encoded.ids, encoded.offsets)
        if ids is not None:
            return ids
        # A token spans a mark and its neighbours, so the text is encoded in parts.
        parts = text.split(LITERAL_MARK)
        return [token for part in parts for token in (self.encode(part, add_special=False) if part else ())]

    def at_least(self, text: str) -> int:
        """A number of tokens that `text` has at least, by its length alone; 0 where this kind of tokenizer may leave characters out."""
        longest = self._longest
        return -(-len(text) // longest) if longest else 0

    @cached_property
    def _longest(self) -> int:
        """Most characters of a text that one token stands for; 0: any number."""
        parts = json.loads(self.backend.to_str())
        steps = [step for part in ("normalizer", "pre_tokenizer") for step in _steps(parts[part])]
        whole = all(
            step["type"] in _LOSSLESS_STEPS or (step["type"] == "Split" and step["behavior"] != "Removed") or _keeps(step) for step in steps
        )
        fallback = parts["model"].get("byte_fallback") and len(self.byte_ids) == 256  # else what is unknown may be fused, or be left out
        every = self.byte_table is not None or fallback
        if not (whole and every) or any(token.lstrip or token.rstrip for token in self.backend.get_added_tokens_decoder().values()):
            return 0
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=0)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Turn ids into text; special tokens are left out unless `skip_special` is False.

        Raises:
            TokenizerError: something that is no id, or the tokenizer fails at them.
        """
        with library_errors:
            return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def piece(self, token_id: int) -> str:
        """One token as people read it: its own text, special tokens by name, and U+FFFD for a part of a character."""
        if token_id not in self._pieces:
            with library_errors:
                text = self.backend.decode([token_id], skip_special_tokens=False)
                raw = self.backend.id_to_token(token_id)
            if raw is not None and raw.startswith("▁") and not text.startswith(" "):
                text = f" {text}"  # the decoder strips it where a text begins
            self._pieces[token_id] = text
        return self._pieces[token_id]

    @cached_property
    def byte_table(self) -> dict[int, bytes] | None:
        """Bytes of every token of a byte-level vocabulary; None for other kinds."""
        return byte_table(self.backend)

    def keep_ends_below(self, vocab_size: int) -> None:
        """Forget end-of-text tokens that a model of `vocab_size` tokens cannot draw."""
        self.eos_ids = frozenset(i for i in self.eos_ids if i < vocab_size)

    def token_bytes(self, count: int) -> list[bytes] | None:
        """The bytes that each of the first `count` ids stands for in a text; b"" for ids without a token.

        None: the decoder is of a kind whose tokens have no bytes of their own.
        """
        table = self.byte_table if self.byte_table is not None else piece_bytes(self.backend, self.byte_ids)
        return None if table is None else [table.get(i, b"") for i in range(count)]

    @cached_property
    def special_texts(self) -> dict[int, str]:
        """The texts of the tokens in `skipped_ids`, which are not part of a decoded text."""
        added = self.backend.get_added_tokens_decoder()
        return {i: added[i].content for i in self.skipped_ids}

    def special_in(self, texts: Iterable[str]) -> dict[int, str]:
        """The special tokens, by id, whose texts occur in one of `texts`."""
        whole = "\0".join(texts)
        return {i: text for i, text in self.special_texts.items() if text and text in whole}

    @cached_property
    def added_texts(self) -> frozenset[str]:
        """The texts of all added tokens, special or not."""
        return frozenset(token.content for token in self.backend.get_added_tokens_decoder().values() if token.content)

    @cached_property
    def begins_with_bos(self) -> bool:
        """Whether `encode` puts BOS before a text."""
        return self.bos_id is not None and self.encode("a")[:1] == [self.bos_id]

    @property
    def highest_id(self) -> int:
        """The highest id that has a token; -1 for an empty vocabulary. Embeddings may have more rows (padding) or fewer."""
        return self._highest_id

    @cached_property
    def _highest_id(self) -> int:
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Tokens that stand for one byte of a character the vocabulary lacks; none in byte-level vocabularies."""
        return byte_tokens(self.backend)

    @cached_property
    def plain_texts(self) -> PlainTexts:
        """The text of each token that has one wherever it stands, None for the others; filled as it is read."""
        return plain_texts(self.backend, self.byte_table, byte_ids=self.byte_ids, skipped=self.skipped_ids)

    def token_id(self, text: str) -> int | None:
        """The id whose vocabulary entry is exactly `text`, or None."""
        return _id_of(self.backend, text)

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size} tokens, bos {self.bos_id}, eos {sorted(self.eos_ids)})"

    def _literal_backend(self) -> tokenizers.Tokenizer:
        if self._literal is None:
            self._literal = tokenizers.Tokenizer.from_str(self.backend.to_str())
            self._literal.encode_special_tokens = True
        return self._literal

    def _special_id(self, role: str, configs: Sequence[dict[str, Any]], key: str, folder: Path) -> int | None:
        text = self.special_tokens.get(role)
        if text is not None:
            found = _id_of(self.backend, text)
            if found is None:
                raise TokenizerError(f"{folder / 'tokenizer_config.json'}: {role} is {text!r}, which {_TOKENIZER_FILE} does not contain")
            return found
        return next((ids[0] for config in configs if (ids := _ids(config.get(key), key, folder))), None)

    def _eos_ids(self, configs: Sequence[dict[str, Any]], folder: Path) -> frozenset[int]:
        found = {i for config in configs for i in _ids(config.get("eos_token_id"), "eos_token_id", folder)}
        return frozenset(found if self._own_eos is None else found | {self._own_eos})


def _plain(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Without the truncation and padding that some files ask for."""
    backend.no_truncation()
    backend.no_padding()
    return backend


def _id_of(backend: tokenizers.Tokenizer, text: str) -> int | None:
    try:
        return backend.token_to_id(text)
    except UnicodeEncodeError:  # a lone surrogate, which no token holds
        return None


def _ids(value: Any, key: str, folder: Path) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise TokenizerError(f"{folder}: {key} is {str(value)[:80]}; expected a token id or a list of them")
    return ids


def _steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer."""
    if part is None:
        return []
    inner = part.get("normalizers") or part.get("pretokenizers")
    return [part] if inner is None else [step for one in inner for step in _steps(one)]


def _keeps(step: dict[str, Any]) -> bool:
    """Whether a replacement makes no text shorter."""
    return step["type"] == "Replace" and len(step["pattern"].get("String", " " * len(step["content"]) + " ")) <= len(step["content"])


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The texts by role; tokenizer_config.json writes each as a string or as an object with `content`."""
    found: dict[str, str] = {}
    for role in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        value = config.get(role)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text:
            found[role] = text
    return found
