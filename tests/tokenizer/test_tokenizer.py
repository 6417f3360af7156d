import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from transformers import AutoTokenizer

import exl2nb
from exl2nb.core.errors import TokenizerError
from exl2nb.tokenizer.literal import control_pattern, protect
from exl2nb.tokenizer.template import render
from exl2nb.tokenizer.tokenizer import Tokenizer

from .makers import MAKERS, TEXT, byte_level, sentencepiece, write

DEMO = Path(exl2nb.__file__).parent / "demo_model"


def test_demo_model_agrees_with_transformers():
    ours, theirs = Tokenizer.load(DEMO), AutoTokenizer.from_pretrained(DEMO)
    for text in (TEXT, "", " ", "a" * 500, "</s> in the text", "emoji 👩‍👩‍👧 done"):
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.encode(text, add_special=False) == theirs(text, add_special_tokens=False)["input_ids"]
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids)
    assert (ours.bos_id, ours.eos_ids, ours.vocab_size) == (1, {2}, 4096)


@pytest.mark.parametrize(
    ("make", "config"),
    [(byte_level, {}), (byte_level, {"add_bos_token": False}), *((sentencepiece, {"add_bos_token": b}) for b in (True, False, None))],
)
def test_bos_rules_are_those_of_transformers(tmp_path, make, config):
    names = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    folder = write(tmp_path, make(), tokenizer_config={**names, **config})
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.encode("It was") == theirs("It was")["input_ids"]
    assert ours.encode("It was", add_special=False) == theirs("It was", add_special_tokens=False)["input_ids"]


def test_bos_where_only_the_config_asks_for_it_and_never_eos(tmp_path):
    flags = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    tokenizer = Tokenizer.load(write(tmp_path, byte_level(), tokenizer_config=flags))
    plain = tokenizer.encode("It was", add_special=False)
    assert tokenizer.encode("It was") == [0, *plain]
    assert tokenizer.encode("<s>It was</s>") == [0, *plain, 1], "an end that the caller wrote stays"


def test_a_post_processor_that_adds_eos(tmp_path):
    backend = byte_level()
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer = Tokenizer.load(write(tmp_path, backend, tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"}))
    plain = tokenizer.encode("It was", add_special=False)
    assert tokenizer.encode("It was") == [0, *plain]
    assert tokenizer.encode("It was</s>") == [0, *plain, 1]


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_tokens_that_only_the_config_declares(tmp_path, make):
    backend = make()
    size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    entry = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    declared = {
        str(size): {**entry, "content": "<|turn|>", "special": True},
        str(size + 1): {**entry, "content": "<kit>", "special": False},
    }
    config = {"bos_token": "<s>", "eos_token": "<|turn|>", "added_tokens_decoder": declared, "tokenizer_class": "PreTrainedTokenizerFast"}
    folder = write(tmp_path, backend, tokenizer_config=config)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("It was<|turn|>", "a<kit>b <|turn|>"):
        assert ours.encode(text, add_special=False) == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.eos_ids == {size}
    assert ours.skipped_ids >= {size}
    assert size + 1 not in ours.skipped_ids
    assert ours.decode([size, size + 1]) == "<kit>"


def test_a_token_that_the_config_makes_special(tmp_path):
    backend = byte_level()
    backend.add_tokens(["<x>"])
    number = backend.token_to_id("<x>")
    plain = Tokenizer.load(write(tmp_path, backend, tokenizer_config={}))
    assert number not in plain.skipped_ids
    made = Tokenizer.load(
        write(tmp_path, backend, tokenizer_config={"added_tokens_decoder": {str(number): {"content": "<x>", "special": True}}})
    )
    assert number in made.skipped_ids
    by_name = Tokenizer.load(write(tmp_path, byte_level(), tokenizer_config={"additional_special_tokens": ["the", {"content": "absent"}]}))
    assert by_name.token_id("absent") is None


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ([1], r"added_tokens_decoder is \[1\]"),
        ({"a": {"content": "<x>"}}, "holds 'a'"),
        ({"-1": {"content": "<x>"}}, "holds '-1'"),
        ({"5": "<x>"}, "holds '5'"),
        ({"5": {"content": ""}}, "holds '5'"),
        ({"999999": {"content": "<x>"}}, "the next free id is"),
        ({"999999": {"content": "<s>"}}, "in tokenizer.json it is id 0"),
    ],
)
def test_declared_tokens_that_cannot_be(tmp_path, declared, words):
    with pytest.raises(TokenizerError, match=words):
        Tokenizer.load(write(tmp_path, byte_level(), tokenizer_config={"added_tokens_decoder": declared}))


def test_the_words_of_a_user_stay_text(tmp_path):
    for make in (byte_level, sentencepiece):
        tokenizer = Tokenizer.load(write(tmp_path, make(), tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"}))
        control = control_pattern(tokenizer.special_texts.values())
        for words in ("It </s> was", "</s>", "a<s></s><s>b", "The <s>fox"):
            ids = tokenizer.encode_chat("<s>" + protect(words, control) + "</s>")
            ends = {tokenizer.token_id("<s>"), tokenizer.token_id("</s>")}
            assert {ids[0], ids[-1]} == ends
            assert not ends & set(ids[1:-1])
            assert tokenizer.decode(ids[1:-1]).strip() == words


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_a_rendered_chat_gets_no_second_bos(tmp_path, make):
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": template}
    tokenizer = Tokenizer.load(write(tmp_path, make(), tokenizer_config=config))
    text = render([{"role": "user", "content": "It was"}], template, special_tokens=tokenizer.special_tokens)
    assert text == "<s>It was"
    assert tokenizer.encode(text) == tokenizer.encode(text, add_special=False)
    assert tokenizer.encode(text).count(tokenizer.bos_id) == 1
    assert tokenizer.encode(text, parse_special=False).count(tokenizer.bos_id) == 1  # as text it is none


def test_bos_named_by_an_object(tmp_path):
    folder = write(tmp_path, byte_level(), tokenizer_config={"bos_token": {"content": "<s>", "lstrip": False}, "add_bos_token": True})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.bos_id == 0
    assert tokenizer.encode("It")[0] == 0


def test_no_bos_where_there_is_none(tmp_path):
    folder = write(tmp_path, byte_level(), tokenizer_config={"add_bos_token": True})
    assert Tokenizer.load(folder).bos_id is None
    assert Tokenizer.load(folder).encode("It") == Tokenizer.load(folder).encode("It", add_special=False)


def test_eos_ids_from_all_files(tmp_path):
    folder = write(
        tmp_path,
        byte_level(),
        generation_config={"eos_token_id": [1, 7]},
        config={"eos_token_id": 9},
        tokenizer_config={"eos_token": "<|im_end|>"},
    )
    assert Tokenizer.load(folder).eos_ids == {1, 7, 9, 2}
    assert Tokenizer.load(write(tmp_path / "none", byte_level())).eos_ids == frozenset()


def test_special_texts_can_be_read_as_plain_text(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path, byte_level()))
    assert tokenizer.encode("</s>") == [1]
    plain = tokenizer.encode("</s>", parse_special=False)
    assert 1 not in plain
    assert tokenizer.decode(plain) == "</s>"
    assert tokenizer.encode("</s>") == [1]


def test_lone_surrogate(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path, byte_level()))
    assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a?b"


@pytest.mark.parametrize("kind", MAKERS)
def test_pieces(tmp_path, kind):
    tokenizer = Tokenizer.load(write(tmp_path, MAKERS[kind]()))
    for token_id in range(tokenizer.vocab_size):
        assert isinstance(tokenizer.piece(token_id), str)
    if kind == "sentencepiece":
        assert tokenizer.piece(tokenizer.token_id("▁was") or 0) == " was"
        assert tokenizer.piece(2) == "</s>"


def test_truncation_in_the_file_is_not_applied(tmp_path):
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=10)
    assert len(Tokenizer.load(write(tmp_path, backend)).encode(TEXT)) > 10


def test_missing(tmp_path):
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json; copy it from the original model"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"model": {"type": "BPE"}}', b'{"version": "9"}'])
def test_broken(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "files",
    [
        {"generation_config": {"eos_token_id": "x"}},
        {"generation_config": {"eos_token_id": [1, -2]}},
        {"config": {"bos_token_id": True}},
        {"tokenizer_config": {"eos_token": "<nowhere>"}},
        {"tokenizer_config": {"chat_template": 5}},
        {"tokenizer_config": []},
    ],
)
def test_neighbours_that_contradict(tmp_path, files):
    with pytest.raises(TokenizerError):
        Tokenizer.load(write(tmp_path, byte_level(), **files))


def test_neighbour_that_is_not_json(tmp_path):
    write(tmp_path, byte_level())
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"generation_config\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "generation_config.json").write_text("[" * 100_000)
    with pytest.raises(TokenizerError, match=r"generation_config\.json"):
        Tokenizer.load(tmp_path)


def test_repr(tmp_path):
    assert repr(Tokenizer.load(DEMO)) == "Tokenizer(4096 tokens, bos 1, eos [2])"
    assert json.loads(Tokenizer.load(DEMO).backend.to_str())["model"]["type"] == "BPE"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@given(text=st.text(max_size=60) | st.text(alphabet=" ab\n<s>é東", max_size=200))
def test_a_bound_by_length_alone(kind, text):
    tokenizer = Tokenizer(MAKERS[kind]())
    assert 0 <= tokenizer.at_least(text) <= len(tokenizer.encode(text, add_special=False))
    assert tokenizer.at_least("a" * 10_000) > 100


@pytest.mark.parametrize(
    "change",
    [
        lambda backend: setattr(backend, "normalizer", normalizers.Replace(Regex(" +"), " ")),
        lambda backend: setattr(backend, "normalizer", normalizers.Replace("aaaa", "a")),
        lambda backend: setattr(backend, "normalizer", normalizers.Strip()),
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.Split("a", "removed")),
        lambda backend: backend.add_tokens([AddedToken("<mask>", lstrip=True)]),
    ],
)
def test_no_bound_where_characters_may_be_left_out(change):
    backend = sentencepiece()
    change(backend)
    assert Tokenizer(backend).at_least("a" * 10_000) == 0
    assert Tokenizer(MAKERS["wordpiece"]()).at_least("a" * 10_000) == 0
