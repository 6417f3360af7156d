import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from exl2nb.tokenizer.detokenize import Detokenizer
from exl2nb.tokenizer.tokenizer import Tokenizer

from .makers import MAKERS, TEXT

ALL = {kind: Tokenizer(make()) for kind, make in MAKERS.items()}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def stream(tokenizer, ids, **kwargs):
    detokenizer = Detokenizer(tokenizer, **kwargs)
    pieces = [detokenizer.feed(i) for i in ids]
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@given(text=TEXTS)
@settings(max_examples=200, deadline=None)
def test_text_of_random_unicode(kind, text):
    tokenizer = ALL[kind]
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "�" not in text:
        assert not any("�" in piece for piece in pieces)


@pytest.mark.parametrize("kind", MAKERS)
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_random_ids_end_in_what_decode_says(kind, data):
    """Models may say anything, broken characters included."""
    tokenizer = ALL[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)
    assert "".join(stream(tokenizer, ids, skip_special=False)) == tokenizer.decode(ids, skip_special=False)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_a_character_comes_whole(kind):
    tokenizer = ALL[kind]
    ids = tokenizer.encode("🎉 ok", add_special=False)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == "🎉 ok"
    assert next(p for p in pieces if p)[0] == "🎉"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_every_step_is_a_prefix(kind):
    tokenizer = ALL[kind]
    ids = tokenizer.encode(TEXT, add_special=False)
    whole, text = tokenizer.decode(ids), ""
    for piece in stream(tokenizer, ids):
        text += piece
        assert whole.startswith(text)
    assert text == whole


def test_words_arrive_at_once():
    tokenizer = ALL["sentencepiece"]
    ids = [tokenizer.token_id(p) for p in ("▁It", "▁was", "▁a", "▁dark")]
    assert stream(tokenizer, ids) == ["It", " was", " a", " dark", ""]


def test_space_after_the_prompt():
    """The first word of an answer keeps its space when it continues a prompt."""
    tokenizer = ALL["sentencepiece"]
    prompt, ids = tokenizer.encode("It was"), [tokenizer.token_id("▁a"), tokenizer.token_id("▁dark")]
    assert "".join(stream(tokenizer, ids, context=prompt)) == " a dark"
    assert "".join(stream(tokenizer, ids)) == "a dark"
    assert "".join(stream(tokenizer, ids, context=[1])) == "a dark"  # BOS alone is not text


def test_special_tokens_leave_no_trace():
    tokenizer = ALL["sentencepiece"]
    ids = [tokenizer.token_id(p) for p in ("▁It", "</s>", "▁was", "<s>")]
    assert "".join(stream(tokenizer, ids)) == "It was"


def test_pending():
    tokenizer = ALL["byte_level"]
    detokenizer = Detokenizer(tokenizer)
    first, *rest = tokenizer.encode("東", add_special=False)
    if rest:
        assert (detokenizer.feed(first), detokenizer.pending) == ("", True)
        assert detokenizer.flush() == "�"


def test_bytes_split_inside_a_character():
    tokenizer = ALL["byte_level"]
    table = {value: key for key, value in tokenizer.byte_table.items() if len(value) == 1}
    ids = [table[bytes([b])] for b in "é🎉�ab".encode()]
    pieces = stream(tokenizer, ids)
    assert [p for p in pieces if p] == ["é", "🎉", "�", "a", "b"]


def test_byte_table_equals_the_library():
    tokenizer = ALL["byte_level"]
    for token_id, raw in tokenizer.byte_table.items():
        assert raw.decode("utf-8", "replace") == tokenizer.decode([token_id], skip_special=False)


def test_unknown_ids_and_no_decoder():
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert "".join(stream(Tokenizer(backend), [0, 1, 1])) == "a b b"
    assert "".join(stream(ALL["byte_level"], [10**6])) == ALL["byte_level"].decode([10**6]) == ""


@pytest.mark.parametrize("kind", MAKERS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_in_a_hurry_and_back_again_the_text_is_the_same(kind, data):
    """`plain` wherever it answers, `feed` elsewhere, and places that are come back to: what stands in the end is what decode says."""
    tokenizer = ALL[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    detokenizer, pieces, place = Detokenizer(tokenizer), [], 0
    saved = (0, detokenizer.save())
    turns = data.draw(st.lists(st.sampled_from(["go", "go", "go", "keep", "back"]), max_size=60))
    for turn in [*turns, *["go"] * len(ids)]:
        if turn == "keep":
            saved = (place, detokenizer.save())
        elif turn == "back":
            place = saved[0]
            detokenizer.load(saved[1])
            del pieces[place:]
        elif place < len(ids):
            text = None if detokenizer.pending else detokenizer.plain(ids[place])
            pieces.append(detokenizer.feed(ids[place]) if text is None else text)
            place += 1
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids)


def test_most_tokens_have_a_text_of_their_own():
    for kind in ("byte_level", "sentencepiece", "metaspace"):
        texts = ALL[kind].plain_texts
        plain = [i for i in range(ALL[kind].vocab_size) if texts[i] is not None]
        special = len(ALL[kind].skipped_ids | ALL[kind].byte_ids)
        assert len(plain) > 0.5 * (ALL[kind].vocab_size - special)
    assert not any(ALL["wordpiece"].plain_texts[i] for i in range(ALL["wordpiece"].vocab_size)), "its tokens look at their neighbours"
