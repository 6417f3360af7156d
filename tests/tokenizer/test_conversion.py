"""SentencePiece-only checkpoints, and odd strings through every kind of tokenizer, against Transformers and SentencePiece itself."""

import importlib
import json

import pytest
import sentencepiece
from transformers import AutoTokenizer

from exl2nb.core.errors import TokenizerError
from exl2nb.tokenizer.conversion import convertible
from exl2nb.tokenizer.tokenizer import Tokenizer

from .makers import MAKERS, TEXT, byte_level, write

CORPUS = [
    "", " ", "  ", "\n", "\t\t", "a", " a", "a ", "  two  spaces ", TEXT, "</s>", "<s>x</s>", "<unk>", "x<|im_end|>y", "<|user|> hi",
    "<0x41>", "▁", "a▁b", "emoji 👩‍👩‍👧 🇺🇳", "é e\u0301 ﬁ Ⅷ ㎏", "مرحبا بالعالم", "שלום", "ไทย", "नमस्ते",
    "東京都 日本語", "\u200b\u200d\ufeff", "\x00\x01\x1b[31m", "1234567890 3.14e-10", "CamelCase snake_case",
    "def f(x):\n\treturn x  # comment\n", "http://x.y/z?a=b&c=d", "a" * 300, "\r\n\r\n", "½ ¾ ²", "\U0010ffff\ud7ff", "İstanbul ẞ ǅ",
    "...!!!???", "''\"\"``", "{}[]()<>", "tab\tend", "\u3000wide\u3000", "NaN -inf", "😀😀😀", "ＦＵＬＬ",
]  # fmt: skip


def with_one_bos(ids, bos):
    """Transformers puts a BOS before a text that begins with one; we do not."""
    return ids[1:] if ids[:2] == [bos] * 2 else ids


def train(folder, **options):
    """A SentencePiece model of 500 pieces."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "vocab_size": 420, "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "split_digits": True,
        "remove_extra_whitespaces": False, "unk_id": 0, "bos_id": 1, "eos_id": 2, "minloglevel": 2, "hard_vocab_limit": False, **options,
    }  # fmt: skip
    words = [f"{a} {b} {TEXT}" for a in ("night", "rain", "café", "storm") for b in ("fell", "dark", "東京", "return x")]
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(words * 4), model_prefix=str(folder / "tokenizer"), **settings)
    return folder


def files(folder, **contents):
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
NAMES = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CASES = {
    "llama 2": {"tokenizer_config": {**NAMES, "add_bos_token": True}},
    "no bos": {"tokenizer_config": {**NAMES, "add_bos_token": False}},
    "bos, and an eos that no prompt gets": {"tokenizer_config": {**NAMES, "add_bos_token": True, "add_eos_token": True}},
    "not legacy": {"tokenizer_config": {**NAMES, "legacy": False}},
    "added tokens": {
        "tokenizer_config": NAMES,
        "added_tokens": {"<|im_end|>": 420, "<|user|>": 421},
        "special_tokens_map": {"additional_special_tokens": ["<|im_end|>"]},
    },
    "names in the map alone": {
        "tokenizer_config": {"tokenizer_class": "LlamaTokenizer"},
        "special_tokens_map": {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"},
    },
    "gemma, no space before the first word": {"tokenizer_config": {**NAMES, "tokenizer_class": "GemmaTokenizer"}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return train(tmp_path_factory.mktemp("sp")) / "tokenizer.model"


@pytest.mark.parametrize("case", CASES)
def test_sentencepiece_model_alone(case, model, tmp_path):
    if case.startswith("gemma"):
        train(tmp_path, add_dummy_prefix=False)
    else:
        (tmp_path / "tokenizer.model").write_bytes(model.read_bytes())
    files(tmp_path, config=LLAMA, **CASES[case])
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in CORPUS:
        ids = with_one_bos(theirs(text)["input_ids"], ours.bos_id)
        assert ours.encode(text) == (ids[:-1] if case.endswith("gets") else ids), text
        plain = ours.encode(text, add_special=False)
        assert plain == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(plain, skip_special=False) == theirs.decode(plain, clean_up_tokenization_spaces=False), text
    assert (ours.bos_id, ours.eos_ids) == (1, {2})
    assert ours.special_tokens["eos_token"] == "</s>"


def test_classes_that_live_in_a_repository_are_not_run(model, tmp_path):
    """What InternLM2 and Orion ship: a tokenizer class of their own beside a plain SentencePiece model."""
    (tmp_path / "tokenizer.model").write_bytes(model.read_bytes())
    (tmp_path / "tokenization_internlm2.py").write_text("raise SystemExit('run')")
    own = {"tokenizer_class": "InternLM2Tokenizer", "auto_map": {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]}}
    files(
        tmp_path,
        config={**LLAMA, "model_type": "internlm2", "auto_map": {"AutoConfig": "c.C"}},
        tokenizer_config={**NAMES, **own, "add_bos_token": True},
    )
    ours = Tokenizer.load(tmp_path)
    reader = sentencepiece.SentencePieceProcessor(str(model))
    for text in ("Hello world", TEXT, "a\nb", "東京"):
        assert ours.encode(text) == [1, *reader.encode(text)]


def test_what_transformers_would_cut_otherwise_is_refused(tmp_path):
    """A unigram model read as if it were BPE gives other ids without any error."""
    train(tmp_path, model_type="unigram", normalization_rule_name="nmt_nfkc")
    files(tmp_path, config=LLAMA, tokenizer_config=NAMES)
    with pytest.raises(TokenizerError, match=r"splits plain text differently .*copy a tokenizer.json"):
        Tokenizer.load(tmp_path)


def test_a_broken_model(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\xff" * 100)
    files(tmp_path, config=LLAMA, tokenizer_config=NAMES)
    with pytest.raises(TokenizerError, match=r"tokenizer.model: transformers cannot convert it"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("package", ["transformers", "sentencepiece"])
def test_without_the_optional_packages(package, model, tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(model.read_bytes())
    real = importlib.import_module

    def blocked(name, *args):
        if name == package:
            raise ImportError(f"No module named {name!r}", name=name)
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", blocked)
    with pytest.raises(
        TokenizerError, match=rf"converting it needs {package}: pip install 'exl2nb\[sentencepiece\]', or make a tokenizer.json"
    ):
        Tokenizer.load(tmp_path)


def test_vocabulary_and_merges(tmp_path):
    """What older GPT-2 and Qwen2 checkpoints have."""
    backend = json.loads(byte_level().to_str())["model"]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in backend["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    files(tmp_path, vocab=backend["vocab"], config={"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})
    files(tmp_path, tokenizer_config={"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<s>"})
    assert convertible(tmp_path) == "vocab.json"
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in CORPUS:
        assert ours.encode(text) == with_one_bos(theirs(text)["input_ids"], ours.bos_id), text


@pytest.mark.parametrize("kind", MAKERS)
def test_odd_strings(kind, tmp_path):
    names = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if kind in ("byte_level", "sentencepiece"):
        names |= {"bos_token": "<s>", "eos_token": "</s>"}
    folder = write(tmp_path, MAKERS[kind](), tokenizer_config=names)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for text in CORPUS:
        assert ours.encode(text) == with_one_bos(theirs(text)["input_ids"], ours.bos_id), text
        ids = ours.encode(text, add_special=False)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids, clean_up_tokenization_spaces=False), text


def test_several_eos_ids(tmp_path):
    added = {"eos_token": "</s>"}
    folder = write(tmp_path, byte_level(), tokenizer_config=added, generation_config={"eos_token_id": [2, 0]}, config={"eos_token_id": 1})
    assert Tokenizer.load(folder).eos_ids == {0, 1, 2}
