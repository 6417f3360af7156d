"""Calibration text and rows: files, tables, conversations, the model itself; spread and seeded; errors by name."""

import gzip
import json
import lzma
import unicodedata
import warnings
from pathlib import Path

import pytest
import torch

import exl2nb
from exl2nb.converter import calibration, pipeline
from exl2nb.converter.calibration import (
    calibration_rows,
    check_known,
    check_like,
    read_calibration,
    split_rows,
    tuning_rows,
    write_text,
)
from exl2nb.converter.sensitivity import sweep_layers
from exl2nb.converter.weights import DenseWeights
from exl2nb.core.errors import CalibrationWarning, OptionError, TokenizerError
from exl2nb.model.loader import read_model_config
from exl2nb.model.reference import logits
from exl2nb.model.store import open_store
from exl2nb.tokenizer.tokenizer import Tokenizer

from .test_conversion_job import ConversionJob, write_model

DEMO_MODEL = Path(exl2nb.__file__).parent / "demo_model"
MIXED = Path(exl2nb.__file__).parent / "calibration_text" / "mixed.jsonl.xz"


class Words:
    """One id per word: its number. BOS is 1."""

    def encode(self, text, add_special=True):
        return [1] * add_special + [int(word) for word in text.split()]


TEXT = " ".join(f"{i:05d}" for i in range(2, 60000))


def test_rows_are_consecutive_and_spread():
    rows = calibration_rows(Words(), TEXT, rows=8, length=64)
    assert rows.shape == (8, 64)
    assert rows.dtype == torch.int32
    for i, row in enumerate(rows.tolist()):
        body = row[1:] if i % 4 == 0 else row
        assert (row[0] == 1) == (i % 4 == 0)
        assert body == list(range(body[0], body[0] + len(body)))
        assert i / 8 <= body[0] / 60000 <= (i + 1) / 8


def test_seeded():
    first, again, other = (calibration_rows(Words(), TEXT, rows=8, length=64, seed=s) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("piece", [1, 40, 1 << 20])
def test_a_text_that_is_encoded_in_pieces_comes_out_whole(monkeypatch, piece):
    """Also where it begins or ends with empty lines, has none, or is empty; special tokens come once."""
    monkeypatch.setattr(calibration, "ENCODE_CHARACTERS", piece)
    seen, encoder = [], Words()
    monkeypatch.setattr(encoder, "encode", lambda text, add_special=True: seen.append(text) or Words.encode(encoder, text, add_special))
    for text in ("\n\n12 13\n\n\n14 15 16\n\n" + "17 18\n\n" * 30 + "19", "12 13 14", "\n\n\n\n", ""):
        del seen[:]
        assert calibration.encode_in_pieces(encoder, text) == Words.encode(encoder, text)
        assert "".join(seen) == text
        assert len(seen) > 5 or piece > 1 or text.count("\n\n") < 5


def test_pieces_have_the_ids_of_the_whole_text(monkeypatch):
    tokenizer, text = Tokenizer.load(DEMO_MODEL), (DEMO_MODEL / "calibration.txt").read_text()[:60000]
    monkeypatch.setattr(calibration, "ENCODE_CHARACTERS", 500)
    assert calibration.encode_in_pieces(tokenizer, text) == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("words", "rows", "length", "hint"),
    [
        (4, 1, 64, "found 5; give more text"),
        (40, 1, 64, "found 41; give more text, or use length=41"),
        (40, 2, 64, "found 41; give more text, or use length=20"),
        (40, 3, 64, "found 41; give more text"),
        (100, 2, 64, "found 101; use rows=1, a shorter length, or give more text"),
    ],
)
def test_the_hint_is_not_what_was_given(words, rows, length, hint):
    with pytest.raises(OptionError) as caught:
        calibration_rows(Words(), " ".join(map(str, range(2, words + 2))), rows=rows, length=length)
    assert str(caught.value).endswith(hint)


@pytest.mark.parametrize(
    ("rows", "hint"), [(1, "give more text, or use length=51"), (4, "use rows=1, a shorter length, or give more text")]
)
def test_the_hint_counts_no_rows_that_are_added(rows, hint):
    text = " ".join(map(str, range(2, 155 if rows == 1 else 194)))
    with pytest.raises(OptionError) as caught:
        tuning_rows(Words(), text, rows=rows, tuning=0, choosing=2, extra=0, length=64 if rows == 1 else 60)
    assert str(caught.value).endswith(hint)


def test_short_text_is_used_whole():
    rows = calibration_rows(Words(), " ".join(f"{i:05d}" for i in range(130)), rows=2, length=64)
    assert rows.shape == (2, 64)
    assert rows[0, 0] == 1
    with pytest.raises(OptionError, match="rows=2"):
        calibration_rows(Words(), " ".join(map(str, range(130))), rows=3, length=64)


def test_sources(tmp_path):
    (tmp_path / "a.txt").write_text("plain text")
    with lzma.open(tmp_path / "a.xz", "wt") as file:
        file.write("squeezed text")
    with gzip.open(tmp_path / "a.gz", "wt") as file:
        file.write("zipped text")
    assert read_calibration(tmp_path / "a.txt") == ("plain text", "a.txt")
    assert read_calibration(str(tmp_path / "a.xz"))[0] == "squeezed text"
    assert read_calibration(tmp_path / "a.gz")[0] == "zipped text"
    assert read_calibration(["one", "two"]) == ("one\ntwo", "2 strings")
    text, name = read_calibration("demo")
    assert len(text) > 100_000
    assert name == "(default)"


def test_the_mixed_text_has_every_kind_in_its_share():
    text, name = read_calibration(None)
    assert (text, name) == read_calibration("mixed") and name == "(mixed)"
    with lzma.open(MIXED, "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    sizes = dict.fromkeys(("prose", "encyclopaedic", "code", "mathematics", "dialogue", "scripts"), 0)
    for record in records:
        sizes[record["kind"]] += len(record["text"]) if "text" in record else sum(len(m["content"]) for m in record["messages"])
    assert min(sizes.values()) > 0.05 * sum(sizes.values()) and max(sizes.values()) < 0.3 * sum(sizes.values())
    assert len({unicodedata.name(c).split()[0] for r in records if r["kind"] == "scripts" for c in r["text"] if c.isalpha()}) >= 25
    assert all(word in text for word in ("def ", "public static", "#define", "fn ", "\\frac", "User: ", "\n\nAssistant: "))
    card = (MIXED.parent / "README.md").read_text()
    assert f"{len(records):,} records" in card and f"{MIXED.stat().st_size:,} bytes" in card
    table = [line.split("|") for line in card.partition("| licence |")[2].splitlines()[2:] if line.startswith("|")]
    assert len(table) >= 15 and {row[1].strip() for row in table} == set(sizes)
    assert all(any(word in row[4] for word in ("public domain", "CC0", "Unlicense", "ours")) for row in table)


def test_conversations_of_the_mixed_text_are_written_as_the_model_reads_them():
    seen = []

    def render(messages):
        seen.append([message["role"] for message in messages])
        if messages[0]["role"] == "system":
            raise TokenizerError("no system message")
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)

    text, _ = read_calibration("mixed", render)
    assert ["system", "user"] in [roles[:2] for roles in seen], "tried once"
    assert sum(roles[0] == "system" for roles in seen) == 1
    assert "<user>You are a helpful assistant.\n\n" in text and "<assistant>" in text and "User: " not in text

    def refuse(messages):
        raise TokenizerError("nothing pleases me")

    plain, _ = read_calibration("mixed", refuse)
    assert plain.count("\n\nAssistant: ") > 1000 and "<user>" not in plain and plain.count("System: ") > 100


def test_the_mixed_text_is_the_default_of_all_models_but_the_demo(source, tmp_path, monkeypatch):
    class Enough(Exception):
        pass

    found = []

    def read(given, render):
        found.append(read_calibration(given, render)[1])
        raise Enough

    monkeypatch.setattr(pipeline, "read_calibration", read)
    for folder in (DEMO_MODEL, source):
        with pytest.raises(Enough):
            ConversionJob(folder, tmp_path / "out", bpw=4.0, rows=4, report_rows=2, length=64).measure()
    assert found == ["(default)", "(mixed)"]


def test_text_unlike_the_models_own_is_named():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_like(3.4, 3.2, "mine")
        check_like(9.0, 8.9, "noise that the model expects")
    with pytest.warns(
        CalibrationWarning,
        match=r"calibration x.txt: unlike the model's own text: a loss of 7.45 nats .* has 3.48, expected at most 1 more",
    ):
        check_like(7.45, 3.48, "x.txt")


def test_likeness_is_measured_on_the_way(tmp_path):
    """The demo model on its own text and on code: what the sweep finds is what the logits say."""
    code = [Path(calibration.__file__).read_text(encoding="utf-8")]
    config = read_model_config(DEMO_MODEL)
    encoder = Tokenizer.load(DEMO_MODEL)
    with open_store(config, DEMO_MODEL) as store, torch.no_grad():
        weights = DenseWeights(config, store)
        for text, unlike in ((read_calibration("demo")[0], False), (code[0], True)):
            ids = calibration_rows(encoder, text, rows=3, length=48)
            head = next(iter(sweep_layers(weights, ids, used=2, seed=0, step=lambda _: None)))
            every = {name: tensor for layer in range(config.num_layers) for name, tensor in weights.layer(layer).items()}
            logprobs = logits(config, {**every, **weights.ends()}, ids).log_softmax(-1)[:, :-1]
            loss = -logprobs.gather(-1, ids[:, 1:, None].long()).mean()
            entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
            assert head.likeness == pytest.approx((float(loss), float(entropy)), rel=1e-3)
            assert (head.likeness[0] - head.likeness[1] > calibration.MAX_EXCESS_LOSS_NATS) == unlike


def test_bad_sources_are_named(tmp_path):
    for name, content in (("empty.txt", b"  \n"), ("binary.txt", b"\xff\xfe\x00"), ("fake.xz", b"no xz"), ("fake.gz", b"no gz")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(OptionError, match=name):
            read_calibration(tmp_path / name)
    for source in (tmp_path / "absent.txt", [], [""], [3]):
        with pytest.raises(OptionError, match="calibration"):
            read_calibration(source)


DEMO = Path(__file__).parents[2] / "exl2nb" / "demo_model"
TEXTS = ["one two", "three", "vier fünf"]
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
SHARED = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}


def render(messages):
    return "".join(f"<{m['role']}>{m['content']}" for m in messages)


def test_lines_of_json(tmp_path):
    lines = [{"text": TEXTS[0]}, {"content": TEXTS[1], "n": 3}, TEXTS[2], {"messages": TALK}, SHARED, {"text": None}]
    data = "\n".join(json.dumps(line) for line in lines) + "\n\n"
    want = "\n".join([*TEXTS, "<user>hi<assistant>ho", "<user>hi<assistant>ho"])
    (tmp_path / "a.jsonl").write_text(data)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data.encode()))
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(data.encode()))
    (tmp_path / "a.json").write_text(json.dumps(lines))
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.json"):
        assert read_calibration(tmp_path / name, render) == (want, name)
    assert read_calibration([TEXTS[0], TALK, {"text": TEXTS[1]}], render)[0] == "one two\n<user>hi<assistant>ho\nthree"
    with pytest.raises(OptionError, match="no chat template"):
        read_calibration(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", "line 1: .*expected JSON"),
        ("[1]", "found a message"),
        ('{"a": 1, "b": 2}', "an object with a, b"),
        ("3", "a int"),
        ("[" + "1" * 5000 + "]", "line 1: .*expected JSON"),
        ('{"messages": [{"role": "user"}]}', "role and content"),
        ('{"text": "  "}', "found no text"),
        ('{"text": "\\u0000\\u0000"}', "found no text"),
        ('{"text": "a\\u0000b\\u0000"}', "found 2 NUL characters among 4"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, text):
    (tmp_path / "x.jsonl").write_text(line)
    with pytest.raises(OptionError, match=text):
        read_calibration(tmp_path / "x.jsonl", render)


def test_binary_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("It was a dark night".encode("utf-16-le"))
    with pytest.raises(OptionError, match="found 19 NUL characters among 38; .*this looks like binary or UTF-16"):
        read_calibration(tmp_path / "a.txt")
    with pytest.raises(OptionError, match="NUL characters"):
        read_calibration(["\0a" * 50])
    text = "It was a dark night. " * 100 + "\0"  # one in 2101
    assert read_calibration([text])[0] == text


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def save(name, **columns):
        parquet.write_table(pa.table(columns), tmp_path / name)
        return tmp_path / name

    assert read_calibration(save("a.parquet", id=[1, 2, 3], text=TEXTS))[0] == "\n".join(TEXTS)
    assert read_calibration(save("b.parquet", id=[1, 2, 3], story=TEXTS))[0] == "\n".join(TEXTS)
    assert read_calibration(save("c.parquet", messages=[TALK]), render)[0] == "<user>hi<assistant>ho"
    with pytest.raises(OptionError, match="found columns id, n, expected one of text"):
        read_calibration(save("d.parquet", id=[1], n=[2.0]))
    (tmp_path / "e.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(OptionError, match="expected a Parquet file"):
        read_calibration(tmp_path / "e.parquet")


def test_without_pyarrow_it_says_what_to_install(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(OptionError, match=r"exl2nb\[parquet\]"):
        read_calibration(tmp_path / "a.parquet")


def test_missing_and_directory(tmp_path):
    with pytest.raises(OptionError, match="no such file"):
        read_calibration(tmp_path / "no.txt")
    with pytest.raises(OptionError, match="a directory"):
        read_calibration(tmp_path)
    with pytest.raises(OptionError, match="dataset:no where: cannot be fetched"):
        read_calibration("dataset:no where")


class Letters:
    """One token a letter."""

    special_tokens = {"unk_token": "?"}  # noqa: RUF012
    byte_table, byte_ids = None, frozenset()

    def encode(self, text, add_special=True):
        return [ord(c) for c in text]


def test_report_rows_share_no_token():
    text = "".join(chr(48 + i % 70) for i in range(2000))
    rows, extra = split_rows(Letters(), text, rows=12, extra=4, length=100)
    assert rows.shape == (12, 100)
    assert extra.shape == (4, 100)
    assert split_rows(Letters(), text, rows=19, extra=4, length=100)[1].shape == (0, 100)
    with pytest.raises(OptionError, match="found 2000"):
        split_rows(Letters(), text, rows=21, extra=4, length=100)


def test_text_the_tokenizer_does_not_know():
    with pytest.raises(OptionError, match="50 % of its tokens are unknown"):
        check_known(Letters(), torch.tensor([[63, 63, 97, 98]]), "x.txt")
    check_known(Letters(), torch.tensor([[63, 97, 97, 98]]), "x.txt")


class Fallback(Letters):
    """Bytes for what is not ASCII, as tokenizers with byte fallback have them."""

    byte_ids = frozenset(range(256, 512))

    def encode(self, text, add_special=True):
        return [i for c in text for i in ([ord(c)] if ord(c) < 128 else [256 + b for b in c.encode()])]


def test_language_that_a_tokenizer_has_only_bytes_for():
    russian, english = "Все счастливые семьи похожи друг на друга. " * 40, "All happy families are alike; a fiancé said so. " * 40
    code = "    for i in range(10):\n\t\treturn {i: 0x1F}\n" * 40
    for encoder in (Tokenizer.load(DEMO), Fallback()):
        with pytest.warns(CalibrationWarning, match=r"ru.txt: (8|9)\d % of its tokens are parts of characters"):
            check_known(encoder, torch.tensor([encoder.encode(russian)]), "ru.txt")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for text in (english, code):
                check_known(encoder, torch.tensor([encoder.encode(text)]), "x.txt")


def test_written_by_the_model(tmp_path):
    source = write_model(tmp_path / "model", num_hidden_layers=1)
    tokenizer = Tokenizer.load(source)
    ids = write_text(source, tokenizer, rows=3, length=20, seed=1)
    assert ids.shape == (3, 20)
    assert torch.equal(ids, write_text(source, tokenizer, rows=3, length=20, seed=1))
    assert not torch.equal(ids, write_text(source, tokenizer, rows=3, length=20, seed=2))
    assert len(set(map(tuple, ids.tolist()))) == 3
    done = ConversionJob(source, tmp_path / "out", bpw=5, calibration="self", rows=4, length=24, report_rows=2).run()
    split = {"hessians": 3, "sensitivity": 1, "report": 2}
    assert done.calibration == {"rows": 4, "length": 24, "dataset": "written by the model", "split": split}
