"""Files at which the tokenizers library aborts, panics, hangs or grows: each is a TokenizerError, and this process goes on."""

import json
import os

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models

from exl2nb.core.errors import TokenizerError
from exl2nb.core.helper import Limits
from exl2nb.tokenizer import backend
from exl2nb.tokenizer.detokenize import Detokenizer
from exl2nb.tokenizer.tokenizer import Tokenizer

from .makers import MAKERS, byte_level, sentencepiece, write


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty cache of tried files, and nothing remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(backend, "tried_files", set())
    return tmp_path / "cache" / "exl2nb" / "tokenizers"


def changed(base=byte_level, **parts):
    return json.dumps({**json.loads(base().to_str()), **parts})


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


DOUBLING = replace({"String": "a"}, "aa")
WORD_LEVEL = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
HOSTILE = {
    "aborts as it is read": changed(normalizer={"type": "Precompiled", "precompiled_charsmap": "////////"}),
    "panics as it is read": changed(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "panics in decode": changed(sentencepiece, decoder={"type": "Strip", "content": "a", "start": 0, "stop": 2**63}),
    "catastrophic pattern": changed(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    ),
    "decoder inserts much": changed(sentencepiece, decoder=replace({"String": ""}, "x" * 8000)),
    "decoder inserts more": changed(sentencepiece, decoder=replace({"String": ""}, "x" * 100_000)),
    "decoder doubles": changed(sentencepiece, decoder={"type": "Sequence", "decoders": [DOUBLING] * 40}),
    "normalizer doubles": changed(normalizer={"type": "Sequence", "normalizers": [DOUBLING] * 40}),
    "normalizer replaces by pattern": changed(normalizer=replace({"Regex": "."}, "x" * 8000)),
    "large token": changed(model={"type": "WordLevel", "vocab": {"a": 0, "x" * 100_000: 1}, "unk_token": "a"}),
    "a token of a large number": changed(model={"type": "WordLevel", "vocab": {"a": 0, "b": 999_999_916}, "unk_token": "a"}),
    "many tokens at the start": changed(
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 50_000,
            "pair": [],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
        }
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused(tmp_path, folder, kind):
    (tmp_path / "tokenizer.json").write_text(HOSTILE[kind])
    for _ in range(2):  # a refusal is not remembered as a success
        with pytest.raises(TokenizerError, match=r"tokenizer\.json: the tokenizers library"):
            Tokenizer.load(tmp_path)
    assert not folder.exists()


def test_memory_is_bounded(tmp_path, monkeypatch):
    """Growth that no check foresees ends in the helper: a token of its own takes 5 bytes of the file, and 100 of memory."""
    monkeypatch.setattr(backend, "Limits", lambda **limits: Limits(**{**limits, "memory_bytes": 8 << 20}))
    model = {"type": "WordLevel", "vocab": {str(i): i for i in range(300_000)}, "unk_token": "0"}
    with pytest.raises(TokenizerError, match="the tokenizers library fails on it"):
        backend.parse(changed(model=model), tmp_path)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_good_file_is_tried_once(tmp_path, folder, monkeypatch, kind):
    write(tmp_path, MAKERS[kind]())
    tried = []
    real = backend.try_in_helper
    monkeypatch.setattr(backend, "try_in_helper", lambda *args: (tried.append(args), real(*args)))
    first = Tokenizer.load(tmp_path)
    assert len(tried) == 1
    assert [path.stat().st_size for path in folder.iterdir()] == [0]
    assert Tokenizer.load(tmp_path).encode("a b") == first.encode("a b")
    backend.tried_files.clear()  # as another process would
    Tokenizer.load(tmp_path)
    assert len(tried) == 1
    monkeypatch.setattr(backend, "TRIAL_BYTES", -1)  # other checks: tried again
    backend.tried_files.clear()
    Tokenizer.load(tmp_path)
    assert len(tried) == 2


def test_a_cache_that_cannot_be_written_costs_time_alone(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert Tokenizer.load(write(tmp_path, byte_level())).vocab_size > 300


def test_no_token_for_a_text(tmp_path):
    """The file is fine for other texts."""
    (tmp_path / "tokenizer.json").write_text(changed(model=WORD_LEVEL, added_tokens=[], pre_tokenizer=None, decoder=None))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("a") == [0]
    with pytest.raises(TokenizerError, match=r"Missing \[UNK\]"):
        tokenizer.encode("b")


def test_a_panic_in_this_process_is_an_error():
    """PanicException is no Exception: it would end the engine's thread."""
    library = Library(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    library.decoder = decoders.Strip("a", 0, 2**63)
    tokenizer = Tokenizer(library)
    for use in (
        lambda: tokenizer.decode([0]),
        lambda: tokenizer.piece(0),
        lambda: Detokenizer(tokenizer).feed(0),
    ):
        with pytest.raises(TokenizerError, match="tokenizers library failed"):
            use()


@pytest.mark.parametrize("ids", [[-1], [2**40], ["a"], [None], [1.5]])
def test_what_is_no_id(tmp_path, ids):
    with pytest.raises(TokenizerError, match="tokenizers library failed"):
        Tokenizer.load(write(tmp_path, byte_level())).decode(ids)


def test_lone_surrogates_in_the_files(tmp_path):
    folder = write(tmp_path, byte_level(), tokenizer_config={"bos_token": "\ud800"})
    with pytest.raises(TokenizerError, match=r"bos_token is '\\ud800', which tokenizer.json does not contain"):
        Tokenizer.load(folder)
    os.unlink(folder / "tokenizer_config.json")
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "\ud800"}))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.bos_id is None
    assert tokenizer.token_id("\udc00") is None
