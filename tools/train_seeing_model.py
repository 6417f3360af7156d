"""Train a small model that sees, on pictures drawn here: shapes, colours, places, counts and digits, with questions and captions.

A Llava of about 3.6 million parameters (a SigLIP tower, a projector, a Llama decoder), trained with torch and Transformers, loaded like any
other. The accuracy on pictures of other seeds is measured through `llm.chat` and written into the card.

    python tools/train_seeing_model.py out/                      # the whole recipe, for a GPU
    python tools/train_seeing_model.py out/ --steps 20 --batch 8 # to see that it works
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont
import torch

SIDE, PATCH = 48, 6
SPECIAL = ["<unk>", "<s>", "</s>", "<image>", "<|user|>", "<|bot|>"]
IMAGE = SPECIAL.index("<image>")
COLOURS = {
    "red": (214, 40, 40), "green": (56, 142, 60), "blue": (33, 90, 200), "yellow": (250, 205, 30), "purple": (130, 50, 160),
    "orange": (245, 130, 30), "black": (20, 20, 20), "pink": (245, 130, 180),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "cross", "ring")
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")
GROUNDS = ((255, 255, 255), (235, 235, 235), (250, 244, 225), (225, 240, 250))
NUMBERS = ("no", "one", "two", "three", "four")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|user|>' if m.role != 'assistant' else '<|bot|>' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}"
    "{{ eos_token if m.role == 'assistant' else '' }}{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)


@dataclass(frozen=True)
class Thing:
    """One drawn object: its name, its colour and its cell of a grid of three by three."""

    name: str
    colour: str
    cell: int

    @property
    def place(self) -> str:
        """Its cell in words."""
        return f"{ROWS[self.cell // 3]} {COLUMNS[self.cell % 3]}"

    @property
    def words(self) -> str:
        """What it is, in words."""
        return f"{'an' if self.colour == 'orange' else 'a'} {self.colour} {self.name}"


def scene(rng: random.Random) -> tuple[PIL.Image.Image, list[Thing]]:
    """A picture of one to four things, by cell."""
    picture = PIL.Image.new("RGB", (SIDE, SIDE), rng.choice(GROUNDS))
    draw, cells = PIL.ImageDraw.Draw(picture), sorted(rng.sample(range(9), rng.choice((1, 1, 2, 2, 3, 4))))
    things = []
    for cell in cells:
        digit = rng.random() < 0.3
        thing = Thing(f"digit {rng.randrange(10)}" if digit else rng.choice(SHAPES), rng.choice(list(COLOURS)), cell)
        size = rng.uniform(5.0, 7.0)
        x, y = 8 + 16 * (cell % 3) + rng.uniform(-1.5, 1.5), 8 + 16 * (cell // 3) + rng.uniform(-1.5, 1.5)
        paint(draw, thing, x, y, size)
        things.append(thing)
    noise = np.random.default_rng(rng.randrange(1 << 30)).normal(0, 3, (SIDE, SIDE, 3))
    return PIL.Image.fromarray(np.clip(np.asarray(picture) + noise, 0, 255).astype(np.uint8)), things


def paint(draw: PIL.ImageDraw.ImageDraw, thing: Thing, x: float, y: float, size: float) -> None:
    """Draw a thing around a point."""
    colour, box = COLOURS[thing.colour], (x - size, y - size, x + size, y + size)
    if thing.name == "circle":
        draw.ellipse(box, fill=colour)
    elif thing.name == "ring":
        draw.ellipse(box, outline=colour, width=2)
    elif thing.name == "square":
        draw.rectangle(box, fill=colour)
    elif thing.name == "triangle":
        draw.polygon([(x, y - size), (x - size, y + size), (x + size, y + size)], fill=colour)
    elif thing.name == "cross":
        draw.line((x - size, y - size, x + size, y + size), fill=colour, width=3)
        draw.line((x - size, y + size, x + size, y - size), fill=colour, width=3)
    else:
        draw.text((x, y), thing.name[-1], fill=colour, anchor="mm", font=PIL.ImageFont.load_default(14))


def dialogue(things: list[Thing], rng: random.Random) -> tuple[str, str]:
    """A question about a scene, and its answer."""
    kind = rng.choice(("colour", "where", "what", "count", "is", "describe", "digit"))
    names = [thing.name for thing in things]
    single = [thing for thing in things if names.count(thing.name) == 1]
    if kind == "colour" and single:
        thing = rng.choice(single)
        return rng.choice(
            (f"What colour is the {thing.name}?", f"Which colour does the {thing.name} have?")
        ), f"The {thing.name} is {thing.colour}."
    if kind == "where" and single:
        thing = rng.choice(single)
        return f"Where is the {thing.name}?", f"The {thing.name} is in the {thing.place}."
    if kind == "what":
        thing = rng.choice(things)
        return f"What is in the {thing.place}?", f"There is {thing.words} in the {thing.place}."
    if kind == "is":
        colour, name = rng.choice(list(COLOURS)), rng.choice(SHAPES)
        if rng.random() < 0.5:
            thing = rng.choice(things)
            colour, name = thing.colour, thing.name
        found = any(thing.colour == colour and thing.name == name for thing in things)
        words = Thing(name, colour, 0).words
        return f"Is there {words}?", f"Yes, there is {words}." if found else f"No, there is no {colour} {name}."
    if kind == "digit" and (digits := [thing for thing in things if thing.name.startswith("digit")]) and len(digits) == 1:
        return "Which digit do you see?", f"I see the {digits[0].name}."
    if kind == "count":
        return rng.choice(
            ("How many things are there?", "Count the things.")
        ), f"There {'is' if len(things) == 1 else 'are'} {NUMBERS[len(things)]}."
    return rng.choice(
        ("Describe the picture.", "What do you see?")
    ), f"I see {', '.join(f'{thing.words} in the {thing.place}' for thing in things)}."


def examples(count: int, seed: int) -> list[tuple[PIL.Image.Image, str, str]]:
    """Pictures with a question and its answer each; equal for equal seeds."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        picture, things = scene(rng)
        made.append((picture, *dialogue(things, rng)))
    return made


def tokenizer_of(texts: list[str]) -> Any:
    """A byte-level tokenizer: any text can be asked."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(unk_token=None))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(texts, trainer)
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return made


def config_of(vocab_size: int) -> Any:
    """The network."""
    from transformers import LlamaConfig, LlavaConfig, SiglipVisionConfig

    vision = SiglipVisionConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        vision_use_head=False,
    )
    text = LlamaConfig(
        vocab_size=vocab_size, hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=1024, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1, vision_feature_select_strategy="full",
        image_seq_length=(SIDE // PATCH) ** 2, tie_word_embeddings=False,
    )  # fmt: skip
    config.architectures = ["LlavaForConditionalGeneration"]
    return config


def batch_of(some: list[tuple[PIL.Image.Image, str, str]], tokenizer: Any, device: str) -> dict[str, torch.Tensor]:
    """Tensors of a step; the loss counts answers alone."""
    rows, labels = [], []
    for _, question, answer in some:
        asked = tokenizer.encode("<s><|user|>" + "<image>" * (SIDE // PATCH) ** 2 + question + "<|bot|>", add_special_tokens=False).ids
        said = tokenizer.encode(answer + "</s>", add_special_tokens=False).ids
        rows.append(asked + said)
        labels.append([-100] * len(asked) + said)
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    wanted = torch.tensor([row + [-100] * (width - len(row)) for row in labels])
    pixels = torch.from_numpy(np.stack([np.asarray(picture) for picture, _, _ in some])).permute(0, 3, 1, 2).float() / 127.5 - 1
    made = {
        "input_ids": ids,
        "labels": wanted,
        "pixel_values": pixels,
        "attention_mask": (torch.arange(width) < torch.tensor([[len(r)] for r in rows])).long(),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


def train(args: argparse.Namespace, tokenizer: Any) -> Any:
    """The trained model."""
    from transformers import LlavaForConditionalGeneration

    torch.manual_seed(args.seed)
    model = LlavaForConditionalGeneration(config_of(tokenizer.get_vocab_size())).to(args.device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} million parameters on {args.device}")
    pool = examples(args.pictures, args.seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.05)
    rng, begun = random.Random(args.seed + 2), time.time()
    for step in range(args.steps):
        if args.minutes and time.time() - begun > 60 * args.minutes:
            break
        done = max(step / args.steps, (time.time() - begun) / (60 * args.minutes) if args.minutes else 0.0)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
        batch = batch_of(rng.sample(pool, args.batch), tokenizer, args.device)
        with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            print(f"step {step}: loss {float(loss):.3f}, {time.time() - begun:.0f} s", flush=True)
    return model.eval()


def write(model: Any, tokenizer: Any, out: Path) -> None:
    """The files of a Llava."""
    model.half().save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": TEMPLATE}
    (out / "tokenizer_config.json").write_text(json.dumps(special, indent=1))
    rules = {"size": {"height": SIDE, "width": SIDE}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}
    (out / "preprocessor_config.json").write_text(json.dumps(rules, indent=1))
    (out / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))


def accuracy(path: Path, count: int, seed: int) -> tuple[float, dict[str, tuple[int, int]]]:
    """Share of answers on unseen pictures that are right to the letter, greedily, through exl2nb; and (right, asked) per first words."""
    import exl2nb as ex

    right, kinds = 0, dict[str, tuple[int, int]]()
    with ex.load(path, device="cpu", progress=None) as llm:
        asked = examples(count, seed)
        for at in range(0, count, 16):
            some = asked[at : at + 16]
            handles = [
                llm.chat([{"role": "user", "content": [picture, question]}], stream=True, temperature=0, max_tokens=80)
                for picture, question, _ in some
            ]
            for handle, (_, question, answer) in zip(handles, some):
                good = handle.result().text.strip() == answer
                right += good
                kind = " ".join(question.split()[:2])
                before = kinds.get(kind, (0, 0))
                kinds[kind] = before[0] + good, before[1] + 1
    return right / count, kinds


def main(argv: list[str] | None = None) -> None:
    """Train, write, measure, write the card."""
    parser = argparse.ArgumentParser(description="Train a small model that sees.")
    parser.add_argument("out", type=Path, help="model directory to write")
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--minutes", type=float, default=0.0, help="end after so long; 0 = after the steps")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--pictures", type=int, default=100_000)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test", type=int, default=400, help="unseen pictures of the measurement")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    tokenizer = tokenizer_of([text for _, *texts in examples(3000, args.seed + 9) for text in texts])
    model = train(args, tokenizer)
    args.out.mkdir(parents=True, exist_ok=True)
    write(model, tokenizer, args.out)
    share, kinds = accuracy(args.out, args.test, seed=1_000_003)
    lines = [f"- {kind} ...: {good} of {all_} right" for kind, (good, all_) in sorted(kinds.items())]
    card = [
        "# A tiny model that sees",
        "",
        f"{share:.1%} of {args.test} answers on unseen pictures are right to the letter.",
        "",
        *lines,
        "",
    ]
    (args.out / "README.md").write_text("\n".join(card))
    print("\n".join(card))


if __name__ == "__main__":
    main()
