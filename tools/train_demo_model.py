"""Train a small Llama such as the packaged demo model from a folder of text files.

Self-contained: torch, tokenizers and safetensors are enough, exl2nb need not be installed. Writes a directory in the Hugging Face layout
(config.json, generation_config.json, tokenizer files, sharded fp16 safetensors) that exl2nb and Transformers load.

    python tools/train_demo_model.py books/ out/                                   # the demo model's own recipe, about 8 minutes on an H200
    python tools/train_demo_model.py books/ out/ --steps 1500 --compile            # about 2 minutes there
    python tools/train_demo_model.py books/ out/ --toy                             # 30 seconds on two CPU cores, to see that it works
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

SPECIAL = ["<unk>", "<s>", "</s>"]
BOS, EOS = 1, 2
PIECE = 1 << 16  # characters that are encoded at once
PROBED = 5  # steps before the time of one is measured
SHORTEST, LONGEST = 4, 0.4  # of a repeated passage: least tokens; most, of a row
SHORT_ROWS = (0.12, 64), (0.25, 256)  # until this share of the steps, rows of so many tokens
ASCII = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "--", "\u2026": "...", "\u00a0": " "}
)


@dataclass(frozen=True)
class Shape:
    """Size of the network. head_dim is 64 as in the demo model, smaller where hidden_size / num_heads is.

    qkv_bias: biases on q, k and v, and Qwen2 for an architecture.
    """

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 12
    num_heads: int = 4
    num_kv_heads: int = 2
    context: int = 1024
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    qkv_bias: bool = False

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.hidden_size // self.num_heads


@dataclass(frozen=True)
class Recipe:
    """How long and how to train. batch is in sequences of `Shape.context` tokens; `copies` of it are rows that repeat passages.

    The first half of those rows are tokens in random order, which only copying predicts.
    """

    steps: int = 6922
    batch: int = 128
    peak_lr: float = 2e-3
    final_lr_fraction: float = 0.05
    warmup: int = 100
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    seed: int = 0
    copies: float = 0.0


# ---------------------------------------------------------------- network


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., hidden_size)` to the same shape."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight.type_as(x)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in the two-halves layout. x `(B, heads, S, D)`, cos and sin `(S, D / 2)`."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)


class Attention(nn.Module):
    """Grouped-query attention with RoPE."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden, q, kv = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj, self.o_proj = nn.Linear(hidden, q, bias=shape.qkv_bias), nn.Linear(q, hidden, bias=False)
        self.k_proj, self.v_proj = nn.Linear(hidden, kv, bias=shape.qkv_bias), nn.Linear(hidden, kv, bias=shape.qkv_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: Tensor | None = None, start: int = 0) -> Tensor:
        """Map `(..., hidden_size)` to the same shape."""
        batch, length, _ = x.shape
        q, k, v = (p(x).view(batch, length, -1, self.shape.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        repeat = self.shape.num_heads // self.shape.num_kv_heads
        if past is None:
            k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        else:  # one token: the query heads of a KV head stand in the place of its queries, so that K and V are read once and never copied
            past[:, :, :, start] = torch.stack([k[:, :, 0], v[:, :, 0]])
            k, v = past[:, :, :, : start + 1]
            y = F.scaled_dot_product_attention(q.view(batch, -1, repeat, self.shape.head_dim), k, v)
        return self.o_proj(y.reshape(batch, length, -1))


class MLP(nn.Module):
    """Gated feed-forward layer with SiLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., hidden_size)` to the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape), MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: Tensor | None = None, start: int = 0) -> Tensor:
        """Map `(..., hidden_size)` to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, past, start)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Llama or Qwen2 with untied head. Parameter names are the checkpoint's names."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(shape.vocab_size, shape.hidden_size),
                "layers": nn.ModuleList(Block(shape) for _ in range(shape.num_layers)),
                "norm": RMSNorm(shape.hidden_size, shape.norm_eps),
            }
        )
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        frequency = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angle = torch.arange(shape.context).float()[:, None] * frequency
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        residual_std = 0.02 / math.sqrt(2 * shape.num_layers)
        for name, weight in self.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(weight)
            elif weight.dim() == 2:
                nn.init.normal_(weight, std=residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02)

    def forward(self, ids: Tensor, *, start: int = 0, past: Tensor | None = None) -> Tensor:
        """Logits `(B, S, V)` of ids `(B, S)` at positions `start...`.

        With `past` f32 `(layers, 2, B, num_kv_heads, context, head_dim)`, S is 1 and K and V of the tokens before it are found there.
        """
        cos, sin = self.cos[start : start + ids.shape[1]], self.sin[start : start + ids.shape[1]]
        x = self.model["embed_tokens"](ids)
        for index, block in enumerate(self.model["layers"]):
            x = block(x, cos, sin, None if past is None else past[index], start)
        return self.lm_head(self.model["norm"](x))


# ---------------------------------------------------------------- text


def clean(text: str) -> str:
    """Join hard-wrapped lines of a paragraph, put ASCII quotes and dashes, keep blank lines between paragraphs."""
    paragraphs = re.split(r"\n\s*\n", text.replace("\r\n", "\n").translate(ASCII))
    return "\n\n".join(p for p in (re.sub(r"\s+", " ", p).strip() for p in paragraphs) if p)


def read_texts(folder: Path) -> list[str]:
    """Cleaned text of every .txt file under `folder`, in name order."""
    texts = [clean(path.read_text(encoding="utf-8", errors="replace")) for path in sorted(folder.rglob("*.txt"))]
    texts = [text for text in texts if text]
    if not texts:
        raise SystemExit(f"train_demo_model: no .txt file with text under {folder}; give a folder of plain text files")
    return texts


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with `<unk>`, `<s>`, `</s>` as ids 0, 1, 2; it puts `<s>` at the front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator((paragraph for text in texts for paragraph in text.split("\n\n")), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)])
    return tokenizer


def encode_all(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """All documents as one int32 stream, each with BOS before and EOS after it."""
    ids: list[int] = []
    for text in texts:
        ids.append(BOS)
        for encoding in tokenizer.encode_batch(list(pieces(text)), add_special_tokens=False):  # on all cores
            ids += encoding.ids
        ids.append(EOS)
    return torch.tensor(ids, dtype=torch.int32)


def pieces(text: str) -> Iterator[str]:
    """A text cut before blank lines, where no token of it is cut."""
    start = 0
    while start < len(text):
        end = text.find("\n\n", start + PIECE)
        end = len(text) if end < 0 else end
        yield text[start:end]
        start = end


# ---------------------------------------------------------------- training


def row_length(done: float, shape: Shape, recipe: Recipe) -> int:
    """Tokens of a row after a share of the steps. For copying short ones come first: attention finds a place among few sooner."""
    short = [length for until, length in SHORT_ROWS if recipe.copies and done < until and shape.context % length == 0]
    return short[0] if short else shape.context


def draw_rows(stream: Tensor, length: int, shape: Shape, recipe: Recipe, generator: torch.Generator) -> Tensor:
    """Random windows of context + 1 tokens `(batch, context + 1)`, the same for the same seed on every device.

    Args:
        length: of the rows that are cut from a window; passages are repeated within it.
    """
    starts = torch.randint(len(stream) - shape.context, (recipe.batch, 1), generator=generator)
    windows, copies = stream[starts + torch.arange(shape.context + 1)].long(), round(recipe.batch * recipe.copies)
    for number, row in enumerate(windows[:copies]):
        row.copy_(repeated(stream, len(row), generator, longest=round(LONGEST * length), shuffled=number < copies // 2))
    return windows


def repeated(stream: Tensor, length: int, generator: torch.Generator, *, longest: int, shuffled: bool) -> Tensor:
    """A row of passages that stand two to four times each: what teaches a model to copy.

    Args:
        longest: tokens of a passage. shuffled: its tokens are drawn from the whole stream, one by one.
    """
    parts: list[Tensor] = []
    left = length
    while left > 0:
        size, times = (
            int(torch.randint(low, high, (), generator=generator)) for low, high in ((SHORTEST, max(SHORTEST, longest) + 1), (2, 5))
        )
        size = min(size, len(stream) - 1)
        start = torch.randint(len(stream) - size, (size if shuffled else 1,), generator=generator)
        parts += [stream[start if shuffled else slice(int(start), int(start) + size)]] * times
        left -= size * times
    return torch.cat(parts)[:length]


def make_optimizer(model: Llama, recipe: Recipe, device: torch.device) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only; one fused kernel on CUDA."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.peak_lr, betas=(0.9, 0.95), fused=device.type == "cuda")


def learning_rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine down to final_lr_fraction of the peak."""
    if step < recipe.warmup:
        return recipe.peak_lr * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.peak_lr * (recipe.final_lr_fraction + (1 - recipe.final_lr_fraction) * 0.5 * (1 + math.cos(math.pi * done)))


def train(
    stream: Tensor,
    shape: Shape,
    recipe: Recipe,
    *,
    device: torch.device,
    compiled: bool,
    seconds: float | None = None,
    teacher: Llama | None = None,
    name: str = "",
) -> tuple[Llama, float, int]:
    """Train on `stream` int32 `(tokens,)`.

    Args:
        seconds: take fewer steps than the recipe's where they would need longer; how long one takes is measured all along.
        teacher: learn its distribution at every place instead of the token there (distillation), beginning with those of its weights
        that have the same name and shape. On `device`, of the same vocabulary.
        name: for the lines of progress.

    Returns:
        The model (fp32), the mean loss over the last tenth of the steps, and how many there were. The loss is in nats: of the text, or the
        KL divergence from the teacher.
    """
    if len(stream) <= shape.context + 1:
        raise SystemExit(
            f"train_demo_model: {len(stream)} tokens of text, but one row takes {shape.context + 1}; give more text or --context"
        )
    torch.manual_seed(recipe.seed)
    model = Llama(shape).to(device)
    if teacher is not None:
        mine = model.state_dict()
        same = {key: value for key, value in teacher.state_dict().items() if key in mine and mine[key].shape == value.shape}
        model.load_state_dict(same, strict=False)

    def loss_of(windows: Tensor, length: int) -> Tensor:
        ids = windows[:, :-1].reshape(-1, length)
        logits = model(ids).flatten(0, 1).float()
        if teacher is None:
            return F.cross_entropy(logits, windows[:, 1:].flatten())
        with torch.no_grad():
            goal = teacher(ids).flatten(0, 1).float().log_softmax(-1)
        return F.kl_div(logits.log_softmax(-1), goal, reduction="batchmean", log_target=True)

    optimizer = make_optimizer(model, recipe, device)
    for block in (*model.model["layers"], *(() if teacher is None else teacher.model["layers"])) if compiled else ():
        block.compile(dynamic=False)  # once for all layers, for each length: seconds; the whole network would take a minute
    amp = torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else nullcontext()
    start, losses, chance, warm = time.monotonic(), [], torch.Generator().manual_seed(recipe.seed), 0.0
    step, most = 0, recipe.steps
    while step < recipe.steps:
        length = row_length(step / recipe.steps, shape, recipe) if teacher is None else shape.context
        windows = draw_rows(stream, length, shape, recipe, chance)
        if device.type == "cuda":
            windows = windows.pin_memory().to(device, non_blocking=True)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe)
        with amp:
            loss = loss_of(windows, length)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_clip)
        optimizer.step()
        losses.append(loss.detach())
        step += 1
        if seconds is not None and step % PROBED == 0:
            loss.item()
            now = time.monotonic()
            if step == PROBED:  # the first ones compile, and fill the allocator
                warm = now
            elif step % (3 * PROBED) == 0:
                left = (seconds - (now - start)) * (step - PROBED) / (now - warm)
                recipe = replace(recipe, steps=max(step, min(most, step + int(left))))
        if step % max(1, recipe.steps // 40) == 0 or step == recipe.steps:
            said, elapsed = loss.item(), time.monotonic() - start
            rate = step * recipe.batch * shape.context / max(elapsed, 1e-9)
            print(f"{name} step {step}/{recipe.steps}  loss {said:.4f}  {elapsed:.0f} s  {rate:,.0f} tok/s", file=sys.stderr, flush=True)
    tail = losses[-max(1, len(losses) // 10) :]
    return model, torch.stack(tail).mean().item(), step


# ---------------------------------------------------------------- files


def hf_config(shape: Shape) -> dict[str, object]:
    """config.json of the model."""
    family = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
    if not shape.qkv_bias:
        family = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False}
    return {
        **family,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float16",
    }


def save_shards(tensors: dict[str, Tensor], out: Path, max_bytes: int) -> None:
    """Write fp16 tensors in name order as shards of at most `max_bytes` each, with the index file."""
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu", torch.float16).contiguous()
        if shards[-1] and filled + tensor.nbytes > max_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(t.numel() for t in tensors.values())
    index_json = {"metadata": {"total_parameters": total, "total_size": 2 * total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=2) + "\n")


def save_model(model: Llama, tokenizer: Tokenizer, out: Path, *, max_shard_bytes: int = 12_000_000) -> None:
    """Write `out` as a model directory in the Hugging Face layout."""
    out.mkdir(parents=True, exist_ok=True)
    save_shards(dict(model.named_parameters()), out, max_shard_bytes)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "model_max_length": model.shape.context,
    }
    files = {
        "config.json": hf_config(model.shape),
        "generation_config.json": {"bos_token_id": BOS, "eos_token_id": EOS},
        "tokenizer_config.json": settings,
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=1) + "\n")


# ---------------------------------------------------------------- command line


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small Llama from a folder of text files.")
    parser.add_argument("texts", type=Path, help="folder; every .txt file below it is read")
    parser.add_argument("out", type=Path, help="model directory to write")
    parser.add_argument("--toy", action="store_true", help="tiny network, few steps: about 30 s on two CPU cores")
    for name, value in {**asdict(Shape()), **asdict(Recipe())}.items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=None, help="biases, as Qwen2 has them")
        else:
            parser.add_argument(option, type=type(value), default=None, help=f"default {value}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="torch.compile the network")
    parser.add_argument("--tokenizer", type=Path, help="use this tokenizer.json instead of training one")
    parser.add_argument("--tokenizer-texts", type=int, default=200, help="texts that the tokenizer is trained on (a sample by the seed)")
    return parser.parse_args(argv)


def options(args: argparse.Namespace) -> tuple[Shape, Recipe]:
    """Defaults, or the toy's, with the given options on top."""
    shape, recipe = Shape(), Recipe()
    if args.toy:
        shape = replace(
            shape, vocab_size=1024, hidden_size=128, intermediate_size=256, num_layers=2, num_heads=2, num_kv_heads=1, context=128
        )
        recipe = replace(recipe, steps=150, batch=8, warmup=20)
    given = {name: value for name, value in vars(args).items() if value is not None}
    shape = replace(shape, **{name: given[name] for name in asdict(shape) if name in given})
    recipe = replace(recipe, **{name: given[name] for name in asdict(recipe) if name in given})
    if shape.hidden_size % shape.num_heads or shape.num_heads % shape.num_kv_heads or shape.head_dim % 2:
        raise SystemExit("train_demo_model: hidden_size must divide by num_heads into an even head_dim, and num_heads by num_kv_heads")
    return shape, recipe


def main(argv: list[str] | None = None) -> int:
    """Train and write the model directory; returns the exit code."""
    args = parse(argv)
    shape, recipe = options(args)
    device = torch.device(args.device)
    texts = read_texts(args.texts)
    sample = random.Random(recipe.seed).sample(texts, min(len(texts), args.tokenizer_texts))
    tokenizer = Tokenizer.from_file(str(args.tokenizer)) if args.tokenizer else train_tokenizer(sample, shape.vocab_size)
    shape = replace(shape, vocab_size=tokenizer.get_vocab_size())
    stream = encode_all(tokenizer, texts)
    print(
        f"{len(texts)} texts, {sum(map(len, texts)):,} characters, {len(stream):,} tokens, vocabulary {shape.vocab_size}", file=sys.stderr
    )
    model, loss, _ = train(stream, shape, recipe, device=device, compiled=args.compile)
    save_model(model, tokenizer, args.out)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{args.out}: {parameters:,} parameters, training loss {loss:.4f} nats (perplexity {math.exp(loss):.2f})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
