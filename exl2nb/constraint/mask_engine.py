"""The mask engine: llguidance, an optional package without dependencies. The only file that knows it.

Chosen by measuring both engines that are well kept, at 128 256 tokens, one thread, on a schema with strings, bounds, patterns and maxLength
(benchmarks/masks.py): llguidance 1.9 reads a schema in 1 ms and a tokenizer in 0.8 s, once; a mask takes 14 us (median), 0.11 ms (mean), at
worst 1.1 ms. xgrammar 0.2.8 needs 1.6 s for the schema; 9 us, 0.49 ms, at worst 12 ms; and it installs transformers and triton.
"""

from __future__ import annotations

import importlib
import threading
import weakref
from typing import Any

from exl2nb.constraint.dead_ends import find_dead_end, may_have_dead_ends, quoted
from exl2nb.constraint.gbnf import is_lark, lark_of
from exl2nb.core.errors import MissingDependency, StructureError
from exl2nb.tokenizer.literal import LITERAL_MARK, control_pattern, protect
from exl2nb.tokenizer.tokenizer import Tokenizer

MAX_SOURCE = 1 << 20  # characters of a schema, regex or grammar
WHITESPACE_PATTERN = r" |\r?\n[ \t]{0,40}"  # between JSON tokens: as people format it; small models get lost in endless runs of it
MAX_BYTE_STEPS = 2000  # of a search for dead ends over bytes: 10 us each
MAX_TOKEN_STEPS = 300  # the same over the model's tokens, where a mask takes up to 1 ms
MAX_SEARCHED_SOURCE = 20_000  # characters of a grammar that is compiled once more, over bytes
_vocabularies: weakref.WeakKeyDictionary[Tokenizer, dict[int, Any]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def library() -> Any:
    """The module.

    Raises:
        MissingDependency: it is not installed.
    """
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise MissingDependency(
            "structured output needs the package llguidance, which is not installed; pip install 'exl2nb[structured]'"
        ) from error


def vocabulary(tokenizer: Tokenizer, vocab_size: int) -> Any:
    """The engine's view of a tokenizer, made once: up to a second at 128 000 tokens.

    Raises:
        StructureError: the engine cannot use the tokenizer.
    """
    engine = library()
    with _lock:
        made = _vocabularies.setdefault(tokenizer, {})
        if vocab_size not in made:
            if not tokenizer.eos_ids:
                raise StructureError(
                    "the model names no end-of-text token, which structured output needs; add eos_token_id to its generation_config.json"
                )
            ends = sorted(i for i in tokenizer.eos_ids if i < vocab_size)
            if not ends:
                raise StructureError(f"the model's end-of-text tokens {sorted(tokenizer.eos_ids)} are beyond its {vocab_size} embeddings")
            source = _words(engine, tokenizer, vocab_size, ends[0])
            try:
                made[vocab_size] = engine.LLTokenizer(source, n_vocab=vocab_size, eos_token=ends)
            except Exception as error:
                raise StructureError(f"the mask engine cannot read this model's tokenizer: {str(error)[:300]}") from error
        return made[vocab_size]


def _words(engine: Any, tokenizer: Tokenizer, vocab_size: int, eos_id: int) -> Any:
    """The vocabulary as the engine takes it: the bytes that each token adds to a text, with special tokens marked as such.

    Reading tokenizer.json itself, the engine would take every added token in angle brackets for a special one. But tags such as
    "<tool_call>" are often added tokens that are text like any other, and a grammar has to be able to spell them.
    """
    tokens = tokenizer.token_bytes(vocab_size)
    if tokens is None:  # a decoder that we have no bytes for; the engine refuses most of these itself
        return tokenizer.backend.to_str()
    return engine.TokenizerWrapper(_GuidanceVocabulary(tokenizer, tokens, eos_id))


class _GuidanceVocabulary:
    """What `llguidance.TokenizerWrapper` reads of a tokenizer: the bytes of its tokens, and how the model itself would spell a text.

    The text of a special token is spelled as text, because a grammar names a special token by its id. Where the tokenizer puts a space
    before a text, a mark goes in front and is removed again, because a grammar's text continues what is there already.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], eos_id: int) -> None:
        self._tokenizer = tokenizer
        self.tokens, self.eos_token_id = tokens, eos_id
        self.bos_token_id = tokenizer.bos_id if tokenizer.bos_id is not None and tokenizer.bos_id < len(tokens) else None
        self.special_token_ids = sorted(i for i in tokenizer.skipped_ids if i < len(tokens))
        self._special = control_pattern(tokenizer.special_texts.values())
        self._lead = "" if self._spelled(tokenizer.encode("<", add_special=False)) == b"<" else LITERAL_MARK

    def __call__(self, text: bytes | str) -> list[int]:
        words = text if isinstance(text, str) else text.decode("utf-8", "replace")
        ids = self._tokenizer.encode_chat(self._lead + protect(words, self._special))
        # Without canonical tokens the engine falls back to the longest ones that spell the text.
        return ids if self._spelled(ids) == words.encode("utf-8", "replace") else []

    def _spelled(self, ids: list[int]) -> bytes:
        return b"".join([self.tokens[i] if i < len(self.tokens) else b"" for i in ids])


def compile_grammar(kind: str, source: Any, tokenizer: Tokenizer, vocab_size: int) -> Any:
    """A matcher at the beginning of a grammar, to be copied.

    Args:
        kind: "schema" (a dict), "regex", "choice" (a list of texts) or "grammar" (Lark, or EBNF with `::=`).
        source: of that kind.

    Raises:
        StructureError: it cannot be read, uses what the engine does not support, or nothing satisfies it. MissingDependency.
    """
    engine = library()
    if len(str(source)) > MAX_SOURCE:
        raise StructureError(f"{kind} has {len(str(source))} characters; expected at most {MAX_SOURCE}")
    words = vocabulary(tokenizer, vocab_size)
    try:
        grammar = _grammar(engine, kind, source)
        wrong, messages = engine.LLMatcher.validate_grammar_with_warnings(grammar, words)
        matcher = None if wrong else engine.LLMatcher(words, grammar, log_level=0)
    except StructureError as error:
        raise StructureError(f"{kind} cannot be used: {error}") from error
    except BaseException as error:  # the converters raise bare Exception for whatever they cannot read, and now and then panic
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise StructureError(f"{kind} cannot be used: {_first_lines(str(error))}") from error
    if matcher is None:
        raise StructureError(f"{kind} cannot be used: {_first_lines('; '.join(messages))}")
    if matcher.is_error():
        raise StructureError(f"{kind} cannot be used: {_first_lines(matcher.get_error())}")
    if not any(matcher.compute_bitmask()):
        raise StructureError(f"{kind} cannot be satisfied: no token of this model's vocabulary can begin the answer")
    if matcher.is_error():  # rules that need themselves
        raise StructureError(f"{kind} cannot be satisfied: no text is complete under it ({_first_lines(matcher.get_error())})")
    if kind == "grammar" or (kind == "schema" and may_have_dead_ends(source)):
        _refuse_dead_ends(kind, source, matcher, words)
    return matcher


def byte_matcher(schema: dict[str, Any]) -> Any:
    """A matcher of a JSON schema over single bytes, or None where the engine cannot use the schema.

    It needs no tokenizer. Token ids are bytes.
    """
    try:
        engine = library()
        return _over_bytes(engine, engine.LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False}))
    except MissingDependency:
        return None


def explained(kind: str, message: str) -> str:
    """Say what an error of the engine in the middle of an answer means.

    Args:
        kind: of the structure.
        message: the engine's own.
    """
    text = message.split("<state>")[0].strip()[:300]
    if "NoExtension" in text or not text:
        return f"the {kind} has a dead end: no text that it allows continues the answer from here; its parts contradict each other"
    limit = next((line for line in message.splitlines() if "max is" in line or "too many" in line.lower()), "")
    hint = "; write alternatives as one regex" if "max is" in limit else "; a rule that needs itself has no end" if limit else ""
    return f"the {kind} is too complex ({(limit or text).strip()[:200]}){hint}"


def _refuse_dead_ends(kind: str, source: Any, matcher: Any, words: Any) -> None:
    """Raise StructureError where a bounded search finds a text that nothing can continue."""
    over_bytes = None
    if kind == "schema":
        over_bytes = byte_matcher(source)
    elif len(source) <= MAX_SEARCHED_SOURCE:
        engine = library()
        over_bytes = _over_bytes(engine, _grammar(engine, kind, source))
    if over_bytes is not None:
        found = find_dead_end(over_bytes, {byte: chr(byte) for byte in range(256)}, MAX_BYTE_STEPS)
    else:  # a grammar that names tokens of the model
        single = ((words.tokenize_bytes(bytes([byte])), chr(byte)) for byte in (10, *range(32, 127)))
        found = find_dead_end(matcher, {ids[0]: text for ids, text in single if len(ids) == 1}, MAX_TOKEN_STEPS)
    if found is not None:
        raise StructureError(f"{kind} cannot be used: after the text {quoted(found.text)} {explained(kind, found.message)}")


def _over_bytes(engine: Any, grammar: str) -> Any:
    """A matcher over single bytes, or None where the grammar needs the model's tokens."""
    try:
        words = engine.LLTokenizer("byte")
        wrong, _ = engine.LLMatcher.validate_grammar_with_warnings(grammar, words)
        matcher = None if wrong else engine.LLMatcher(words, grammar, log_level=0)
        return None if matcher is None or matcher.is_error() else matcher
    except BaseException as error:  # see compile_grammar
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        return None


def _grammar(engine: Any, kind: str, source: Any) -> str:
    make = engine.LLMatcher
    if kind == "schema":
        return make.grammar_from_json_schema(source, defaults={"whitespace_pattern": WHITESPACE_PATTERN})
    if kind == "regex":
        return make.grammar_from_regex(source)
    if kind == "choice":
        # one regex: as rules of their own they would be items of one row, of which the engine takes 2000, and masks twenty times as slow
        return make.grammar_from_lark("start: /" + "|".join(map(_literal, source)) + "/")
    return make.grammar_from_lark(source if is_lark(source) else lark_of(source))


def _literal(text: str) -> str:
    """A regex that matches `text` and nothing else, every byte of doubt as its code point."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)


def _first_lines(message: str) -> str:
    """The part of the engine's message that is about the grammar and not about its own state."""
    text = message.split("<state>")[0].strip()
    if "coerce_one_of" in text:  # an option that callers of this package cannot set
        text = text.split("Enable")[0].strip().rstrip(".") + "; write anyOf, which also takes what fits two of its branches"
    if "Unimplemented keys" in text:
        text += "; leave them out, and check the value when it is there (completion.parsed)"
    return text if len(text) <= 500 else text[:497] + "..."
