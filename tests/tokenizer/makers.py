"""Small tokenizers of the kinds that models come with, made here, so that the tests need no download."""

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

TEXT = "It was a dark and stormy night; the rain fell in torrents. Naïve café, Straße, 東京 и мир. <x> 12345\n\n  two  spaces\t"


def byte_level() -> tokenizers.Tokenizer:
    """Like GPT-2, Llama 3 and Qwen: every byte has a character."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT] * 5, trainer)
    backend.add_tokens([AddedToken("<tool é>", special=False)])
    return backend


def sentencepiece() -> tokenizers.Tokenizer:
    """Like Llama 2 and Mistral: words begin with U+2581, rare characters fall back to tokens of one byte."""
    words = [
        "▁It",
        "▁was",
        "▁a",
        "▁dark",
        "▁",
        "It",
        "a",
        "s",
        "t",
        "o",
        "r",
        "m",
        "y",
        "n",
        "i",
        "g",
        "h",
        "d",
        "k",
        "w",
        "I",
        ".",
        ",",
        "▁▁",
    ]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for piece in [*(f"<0x{value:02X}>" for value in range(256)), *words]:
        vocab[piece] = len(vocab)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "▁")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    """Like T5 and newer SentencePiece exports."""
    backend = tokenizers.Tokenizer(
        models.Unigram([("<unk>", 0.0), *((p, -float(i)) for i, p in enumerate(["▁", *"abcdefghijklmnopqrstuvwxyz", "▁the"]))], 0)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def wordpiece() -> tokenizers.Tokenizer:
    """Like BERT."""
    vocab = {piece: i for i, piece in enumerate(["[UNK]", *"abcdefgh", *(f"##{c}" for c in "abcdefgh")])}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return backend


MAKERS = {"byte_level": byte_level, "sentencepiece": sentencepiece, "metaspace": metaspace, "wordpiece": wordpiece}


def write(folder: Path, backend: tokenizers.Tokenizer, **files: dict) -> Path:
    """A model directory's text half; files: tokenizer_config={...}, generation_config={...}, config={...}."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(backend.to_str())
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
