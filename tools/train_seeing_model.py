"""Train the small model that sees, on pictures drawn here: shapes, digits, colours, places and counts, with questions and answers.

A Llava of about 3 million parameters (a SigLIP tower, a projector, a Llama decoder), trained with torch and Transformers, loaded like any
other. First the tower alone learns what each patch is part of, then all of it learns to answer. Worker processes draw new pictures and
write new conversations all the while. Accuracy is measured on pictures of seeds that training never draws.

    python tools/train_seeing_model.py train out/ --compile            # for a GPU; ten minutes
    python tools/train_seeing_model.py train out/ --size small --seconds 5400 --tower 500 --batch 32 --kept 50000 --workers 1 --device cpu
    python tools/train_seeing_model.py measure out/ --count 1000       # through exl2nb, of an EXL2 conversion too
    python tools/train_seeing_model.py package out/ made/              # as EXL2, with a card that says what both answer
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont
import torch
import torch.nn.functional as F

SIDE, PATCH = 72, 12
DRAWN = 192  # side of a picture as it is drawn, and asked about
TOKENS = (SIDE // PATCH) ** 2  # of a picture
WIDTH = 160  # tokens of a row of a batch
REUSED = 3  # times that a conversation is drawn before a new one is wanted
HELD_OUT = 1 << 40  # seeds from here on are never trained on
SPECIAL = ["<unk>", "<s>", "</s>", "<image>", "<|user|>", "<|bot|>"]
IMAGE = SPECIAL.index("<image>")
COLOURS = {
    "red": (214, 40, 40), "green": (56, 142, 60), "blue": (33, 90, 200), "yellow": (250, 205, 30), "purple": (130, 50, 160),
    "orange": (245, 130, 30), "black": (20, 20, 20), "pink": (245, 130, 180),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "cross", "ring", "star")
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")
GROUNDS = {"white": (255, 255, 255), "grey": (200, 200, 200), "beige": (246, 232, 200), "light blue": (200, 228, 250)}
NUMBERS = ("no", "one", "two", "three", "four")
NAMES = (*SHAPES, *(f"digit {number}" for number in range(10)))
KINDS = ("colour", "where", "what", "count", "count some", "is there", "digit", "beside", "background", "describe")
BLIND = "I see no picture. Give me one, and ask about its shapes and digits."
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|user|>' if m.role != 'assistant' else '<|bot|>' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}"
    "{{ eos_token if m.role == 'assistant' else '' }}{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)


@dataclass(frozen=True)
class Size:
    """Widths and layers of tower and decoder; heads have 32 entries."""

    tower: int
    tower_layers: int
    hidden: int
    inner: int
    layers: int


SIZES = {"full": Size(128, 4, 192, 512, 6), "small": Size(128, 3, 128, 384, 4)}


@dataclass(frozen=True)
class Thing:
    """One drawn object: its name, its colour and its cell of a grid of three by three."""

    name: str
    colour: str
    cell: int

    @property
    def place(self) -> str:
        """Its cell in words."""
        return place(self.cell)

    @property
    def words(self) -> str:
        """What it is, in words."""
        return f"{'an' if self.colour == 'orange' else 'a'} {self.colour} {self.name}"


@dataclass(frozen=True)
class Scene:
    """A picture: its things by cell, and the name of its background."""

    things: tuple[Thing, ...]
    ground: str

    def named(self, name: str) -> list[Thing]:
        """The things of that name."""
        return [thing for thing in self.things if thing.name == name]

    @property
    def single(self) -> list[Thing]:
        """The things whose name no other thing has."""
        return [thing for thing in self.things if len(self.named(thing.name)) == 1]


def place(cell: int) -> str:
    """A cell in words."""
    row, column = divmod(cell, 3)
    return "centre" if cell == 4 else f"{ROWS[row]} {COLUMNS[column]}"


def fonts_in(folder: str | None) -> list[Any]:
    """Fonts to draw digits with, by name of file; None = the one that comes with Pillow."""
    return [None, *(sorted(Path(folder).glob("*.ttf")) if folder else [])]


def drawn(rng: random.Random, fonts: list[Any] | None = None) -> tuple[PIL.Image.Image, Scene]:
    """A picture of one to four things, `DRAWN` pixels a side."""
    ground = rng.choice(list(GROUNDS))
    picture = PIL.Image.new("RGB", (DRAWN, DRAWN), near(GROUNDS[ground], 5, rng))
    draw, cells = PIL.ImageDraw.Draw(picture), sorted(rng.sample(range(9), rng.choice((1, 1, 2, 2, 3, 4))))
    things = []
    large = rng.random() < 0.08  # one thing that fills the picture
    for cell in [4] if large else cells:
        name = f"digit {rng.randrange(10)}" if rng.random() < 0.35 else rng.choice(SHAPES)
        thing = Thing(name, rng.choice(list(COLOURS)), cell)
        x, y = (33 + 63 * at + rng.uniform(-6, 6) for at in (cell % 3, cell // 3))
        paint(draw, thing, x, y, rng.uniform(30, 72) if large else rng.uniform(17, 26), rng, fonts)
        things.append(thing)
    return picture, Scene(tuple(things), ground)


def near(colour: tuple[int, int, int], spread: int, rng: random.Random) -> tuple[int, int, int]:
    """A colour close to another."""
    r, g, b = (min(255, max(0, part + rng.randint(-spread, spread))) for part in colour)
    return r, g, b


def paint(
    draw: PIL.ImageDraw.ImageDraw, thing: Thing, x: float, y: float, size: float, rng: random.Random, fonts: list[Any] | None = None
) -> None:
    """Draw a thing around a point, a little turned."""
    colour, turn = near(COLOURS[thing.colour], 12, rng), rng.uniform(-0.15, 0.15)
    box = (x - size, y - size, x + size, y + size)

    def ring(corners: int, radius: float = 1.0, first: float = 0.0) -> list[tuple[float, float]]:
        angles = [turn + first + 2 * math.pi * i / corners for i in range(corners)]
        return [(x + size * radius * math.sin(angle), y - size * radius * math.cos(angle)) for angle in angles]

    if thing.name == "circle":
        draw.ellipse(box, fill=colour)
    elif thing.name == "ring":
        draw.ellipse(box, outline=colour, width=round(size * rng.uniform(0.24, 0.36)))
    elif thing.name == "square":
        draw.polygon(ring(4, 1.25, math.pi / 4), fill=colour)
    elif thing.name == "triangle":
        draw.polygon(ring(3, 1.15), fill=colour)
    elif thing.name == "star":
        draw.polygon([point for pair in zip(ring(5, 1.2), ring(5, 0.5, math.pi / 5)) for point in pair], fill=colour)
    elif thing.name == "cross":
        ends, width = ring(4, 1.2, math.pi / 4), round(size * rng.uniform(0.4, 0.55))
        draw.line((ends[0], ends[2]), fill=colour, width=width)
        draw.line((ends[1], ends[3]), fill=colour, width=width)
    else:
        font = rng.choice(fonts or [None])
        height = round(2.5 * size)
        found = PIL.ImageFont.load_default(height) if font is None else PIL.ImageFont.truetype(font, height)
        draw.text((x, y), thing.name[-1], fill=colour, anchor="mm", font=found, stroke_width=rng.randint(0, 2), stroke_fill=colour)


def question(scene: Scene, kind: str, rng: random.Random) -> tuple[str, str] | None:
    """A question of a kind about a scene, and its answer; None where the scene allows none."""
    things = scene.things
    if kind in ("colour", "where"):
        if not scene.single:
            return None
        thing = rng.choice(scene.single)
        if kind == "where":
            return f"Where is the {thing.name}?", f"The {thing.name} is in the {thing.place}."
        asked = rng.choice((f"What colour is the {thing.name}?", f"Which colour does the {thing.name} have?"))
        return asked, f"The {thing.name} is {thing.colour}."
    if kind == "what":
        cell = rng.randrange(9) if rng.random() < 0.25 else rng.choice(things).cell
        found = [thing for thing in things if thing.cell == cell]
        return f"What is in the {place(cell)}?", f"There is {found[0].words if found else 'nothing'} in the {place(cell)}."
    if kind == "count":
        asked = rng.choice(("How many things are there?", "Count the things.", "How many things do you see?"))
        return asked, counted(len(things), "thing")
    if kind == "count some":
        colour, name = rng.choice(list(COLOURS)), rng.choice((*SHAPES, "digit"))
        if rng.random() < 0.7:
            thing = rng.choice(things)
            colour, name = thing.colour, thing.name.split()[0]
        if rng.random() < 0.5:
            return f"How many {colour} things are there?", counted(sum(thing.colour == colour for thing in things), f"{colour} thing")
        many = sum(thing.name.split()[0] == name for thing in things)
        return f"How many {'crosses' if name == 'cross' else name + 's'} are there?", counted(many, name)
    if kind == "is there":
        colour, name = rng.choice(list(COLOURS)), rng.choice((*SHAPES, f"digit {rng.randrange(10)}"))
        if rng.random() < 0.75:  # most often what is there, or what has one property of it
            thing, other = rng.choice(things), rng.choice(things)
            colour, name = rng.choice(((thing.colour, thing.name), (thing.colour, other.name), (colour, thing.name), (thing.colour, name)))
        found = any(thing.colour == colour and thing.name == name for thing in things)
        words = Thing(name, colour, 0).words
        return f"Is there {words}?", f"Yes, there is {words}." if found else f"No, there is no {colour} {name}."
    if kind == "digit":
        digits = [thing.name for thing in things if thing.name.startswith("digit")]
        if len(digits) > 1 or (not digits and rng.random() < 0.8):
            return None
        return rng.choice(("Which digit do you see?", "Which digit is it?")), f"I see the {digits[0]}." if digits else "I see no digit."
    if kind == "beside":
        if len(scene.single) < 2:
            return None
        one, other = rng.sample(scene.single, 2)
        (row, column), (down, across) = divmod(one.cell, 3), divmod(other.cell, 3)
        ways = {"left of": column < across, "right of": column > across, "above": row < down, "below": row > down}
        way = rng.choice(list(ways))
        told = f"the {one.name} is {'' if ways[way] else 'not '}{way} the {other.name}."
        return f"Is the {one.name} {way} the {other.name}?", f"{'Yes' if ways[way] else 'No'}, {told}"
    if kind == "background":
        return rng.choice(("What colour is the background?", "Which background is it?")), f"The background is {scene.ground}."
    asked = rng.choice(("Describe the picture.", "What do you see?", "What is in the picture?", "What is this?"))
    return asked, f"I see {', '.join(f'{thing.words} in the {thing.place}' for thing in things)}."


def counted(many: int, name: str) -> str:
    """The answer to how many."""
    plural = "crosses" if name == "cross" else f"{name}s"
    return f"There is one {name}." if many == 1 else f"There are {NUMBERS[many]} {plural}."


def asked(scene: Scene, rng: random.Random, kind: str | None = None) -> tuple[str, str, str]:
    """A question, its answer, and its kind; of a kind that the scene allows."""
    while True:
        taken = kind or rng.choice(KINDS)
        if found := question(scene, taken, rng):
            return (*found, taken)
        kind = None


def typed(words: str, rng: random.Random) -> str:
    """A question as people type it."""
    words = words.replace("olour", "olor") if rng.random() < 0.4 else words
    words = words.lower() if rng.random() < 0.6 else words
    return words.rstrip("?.") if rng.random() < 0.6 else words


def held_out(count: int, seed: int = 0) -> Iterator[tuple[PIL.Image.Image, str, str, str]]:
    """Pictures that training never draws, with a question, its answer and its kind; the kinds take turns, as far as scenes allow."""
    for number in range(count):
        rng = random.Random(HELD_OUT + (seed << 20) + number)
        picture, scene = drawn(rng)
        yield picture, *asked(scene, rng, KINDS[number % len(KINDS)])


def tokenizer_of() -> Any:
    """A byte-level tokenizer: any text can be asked."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = random.Random(9)
    texts = [text for _ in range(4000) for text in asked(drawn(rng)[1], rng)[:2]] + [BLIND] * 40
    made = Tokenizer(models.BPE(unk_token=None))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(texts, trainer)
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return made


def config_of(vocab_size: int, size: str) -> Any:
    """The network."""
    from transformers import LlamaConfig, LlavaConfig, SiglipVisionConfig

    shape = SIZES[size]
    vision = SiglipVisionConfig(
        hidden_size=shape.tower, intermediate_size=4 * shape.tower, num_hidden_layers=shape.tower_layers,
        num_attention_heads=shape.tower // 32, image_size=SIDE, patch_size=PATCH, vision_use_head=False,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=vocab_size, hidden_size=shape.hidden, intermediate_size=shape.inner, num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // 32, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1, vision_feature_select_strategy="full",
        image_seq_length=TOKENS, tie_word_embeddings=False,
    )  # fmt: skip
    config.architectures = ["LlavaForConditionalGeneration"]
    return config


@dataclass
class Rows:
    """Conversations as arrays. n rows of two pictures each; the second is black where there is none.

    ids, labels: int16 `(n, WIDTH)`, labels -100 where nothing is asked of the model. seen: int16 `(n, WIDTH)`, which of the row's
    2 * TOKENS rows of features stands there, -1 for text. pixels: uint8 `(n, 2, SIDE, SIDE, 3)`. cells: int16 `(n, 2, 19)`, numbers of
    the name and then the colour of the thing in each of nine cells, 0 for nothing, and of the background; -1 where there is no picture.
    """

    ids: np.ndarray
    labels: np.ndarray
    seen: np.ndarray
    pixels: np.ndarray
    cells: np.ndarray

    @classmethod
    def empty(cls, n: int) -> Rows:
        """Rows of padding."""
        text = (n, WIDTH)
        return cls(
            np.zeros(text, np.int16),
            np.full(text, -100, np.int16),
            np.full(text, -1, np.int16),
            np.zeros((n, 2, SIDE, SIDE, 3), np.uint8),
            np.full((n, 2, 19), -1, np.int16),
        )

    def tensors(self, device: str) -> list[torch.Tensor]:
        """All of them, on a device."""
        return [torch.from_numpy(part).to(device) for part in self.arrays]

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """In the order in which training takes them."""
        return self.ids, self.labels, self.seen, self.pixels, self.cells


def numbers(scene: Scene) -> np.ndarray:
    """A scene as `Rows.cells` has it."""
    made = np.zeros(19, np.int16)
    for thing in scene.things:
        made[thing.cell] = 1 + NAMES.index(thing.name)
        made[9 + thing.cell] = 1 + list(COLOURS).index(thing.colour)
    made[18] = list(GROUNDS).index(scene.ground)
    return made


class Writer:
    """Writes conversations into rows."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def ids(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def turn(self, rows: Rows, n: int, at: int, content: str, answer: str, picture: int | None, picture_last: bool = False) -> int:
        """Write one question with its answer from a place on; returns where the next begins, 0 if it does not fit."""
        sight, text = [IMAGE] * (TOKENS if picture is not None else 0), self.ids(content)
        user = [SPECIAL.index("<|user|>"), *(text + sight if picture_last else sight + text), SPECIAL.index("<|bot|>")]
        said = [*self.ids(answer), SPECIAL.index("</s>")]
        end = at + len(user) + len(said)
        if end > WIDTH:
            return 0
        rows.ids[n, at:end] = user + said
        rows.labels[n, end - len(said) : end] = said
        if picture is not None:
            first = at + 1 + (len(text) if picture_last else 0)
            rows.seen[n, first : first + TOKENS] = np.arange(TOKENS) + picture * TOKENS
        return end

    def conversation(self, rows: Rows, n: int, rng: random.Random, fonts: list[Any] | None) -> None:
        """Fill row n: one picture with several questions, sometimes a second picture later, sometimes a question without any."""
        rows.ids[n, 0], at, number = SPECIAL.index("<s>"), 1, 0
        if rng.random() < 0.03:
            _, scene = drawn(rng, fonts)
            at = self.turn(rows, n, at, asked(scene, rng)[0], BLIND, None)
        second = rng.choice((1, 2)) if rng.random() < 0.15 else 0
        picture, scene = drawn(rng, fonts)
        while True:
            show = number == 0 or number == second
            if show and number:
                picture, scene = drawn(rng, fonts)
            words, answer, _ = asked(scene, rng)
            words = typed(words, rng) if rng.random() < 0.2 else words
            at = self.turn(rows, n, at, words, answer, (1 if number else 0) if show else None, rng.random() < 0.1)
            if not at:
                return
            if show:
                seen = np.asarray(picture.resize((SIDE, SIDE), rng.choice((2, 3, 3, 4))), np.int16)
                noise = np.random.default_rng(rng.randrange(1 << 30)).integers(-4, 5, seen.shape, np.int16)
                rows.pixels[n, 1 if number else 0] = np.clip(seen + noise, 0, 255)
                rows.cells[n, 1 if number else 0] = numbers(scene)
            number += 1


def work(number: int, workers: int, seed: int, folder: str | None, tokenizer: str, queue: Any, size: int) -> None:
    """A worker process: writes chunks of rows until it is ended."""
    from tokenizers import Tokenizer

    writer, fonts = Writer(Tokenizer.from_str(tokenizer)), fonts_in(folder)
    for chunk in itertools.count(number, workers):
        rng, rows = random.Random((seed << 32) + chunk), Rows.empty(size)
        for n in range(size):
            writer.conversation(rows, n, rng, fonts)
        queue.put(rows.arrays)


class Ring:
    """The latest rows that the workers wrote, on the device."""

    def __init__(self, args: argparse.Namespace, tokenizer: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.device, self.kept, self.written, self.drawn = args.device, args.kept, 0, 0
        self.parts: list[torch.Tensor] | None = None
        self.lock = threading.Lock()  # nothing is copied to the device while a step is captured
        self._queue = context.Queue(maxsize=2 * args.workers)
        size = min(args.kept, 256)
        given = (args.workers, args.seed, args.fonts, tokenizer.to_str(), self._queue, size)
        self._workers = [context.Process(target=work, args=(i, *given), daemon=True) for i in range(args.workers)]
        for worker in self._workers:
            worker.start()
        self._thread, self._ended = threading.Thread(target=self._receive, daemon=True), False
        self._thread.start()

    def _receive(self) -> None:
        stream = torch.cuda.Stream() if self.device == "cuda" else None
        while not self._ended:
            if self.written >= self.kept and self.drawn < REUSED * self.written:
                time.sleep(0.05)
                continue
            found = [torch.from_numpy(part) for part in self._queue.get()]
            with self.lock, torch.cuda.stream(stream):
                if self.parts is None:
                    self.parts = [torch.zeros((self.kept, *part.shape[1:]), dtype=part.dtype, device=self.device) for part in found]
                at = self.written % self.kept
                count = min(len(found[0]), self.kept - at)
                for held, part in zip(self.parts, found):
                    held[at : at + count] = part[:count].to(self.device)
                if stream is not None:
                    stream.synchronize()
            self.written += count

    def draw(self, batch: int) -> list[torch.Tensor]:
        """Rows at random."""
        while self.written < min(self.kept, 4 * batch):
            time.sleep(0.05)
            if not any(worker.is_alive() for worker in self._workers):
                raise SystemExit("no worker process draws pictures any more: see what they wrote above")
        assert self.parts is not None
        self.drawn += batch
        chosen = torch.randint(min(self.written, self.kept), (batch,), device=self.device)
        return [part[chosen] for part in self.parts]

    def close(self) -> None:
        """End the workers."""
        self._ended = True
        for worker in self._workers:
            worker.terminate()


def features(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    """What the projector gets of pictures `(n, SIDE, SIDE, 3)`: the last block's output, without the tower's last norm."""
    frames = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
    return model.model.vision_tower(pixel_values=frames, output_hidden_states=True).hidden_states[-1]


def logits_of(model: Any, ids: torch.Tensor, seen: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
    """Logits `(B, WIDTH, V)` of rows."""
    inner = model.model
    rows = inner.multi_modal_projector(features(model, pixels.flatten(0, 1)))
    rows = rows.reshape(len(ids), 2 * TOKENS, -1)
    words = inner.language_model.embed_tokens(ids.long())
    sight = rows.gather(1, seen.long().clamp(min=0)[:, :, None].expand(-1, -1, rows.shape[-1]))
    mixed = torch.where((seen >= 0)[:, :, None], sight.to(words.dtype), words)
    return model.lm_head(inner.language_model(inputs_embeds=mixed, use_cache=False).last_hidden_state)


def loss_of(model: Any, parts: list[torch.Tensor], autocast: bool) -> torch.Tensor:
    """Cross-entropy of the answers."""
    ids, labels, seen, pixels, _ = parts
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
        logits = logits_of(model, ids, seen, pixels)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten().long(), ignore_index=-100)


class Namer(torch.nn.Module):
    """Says of each patch what is in its cell: the tower's first lesson. Thrown away afterwards."""

    cell: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = torch.nn.Linear(width, 1 + len(NAMES) + 1 + len(COLOURS) + len(GROUNDS))
        across = SIDE // PATCH
        cell = torch.arange(across) * 3 // across
        self.register_buffer("cell", (3 * cell[:, None] + cell).flatten())

    def loss(self, model: Any, pixels: torch.Tensor, cells: torch.Tensor, autocast: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross-entropy of pictures `(n, SIDE, SIDE, 3)`, and the share of patches whose thing and colour are right where there is one."""
        with torch.autocast(pixels.device.type, torch.bfloat16, enabled=autocast):
            said = self.out(features(model, pixels)).float()
        names, colours, grounds = said.split((1 + len(NAMES), 1 + len(COLOURS), len(GROUNDS)), -1)
        cells = cells.long()
        name, colour, ground = cells[:, self.cell], cells[:, 9 + self.cell], cells[:, 18:].expand(-1, len(self.cell))
        loss = sum(F.cross_entropy(a.flatten(0, 1), b.flatten()) for a, b in ((names, name), (colours, colour), (grounds, ground)))
        right = (names.argmax(-1) == name) & (colours.argmax(-1) == colour)
        return loss, right[name > 0].float().mean()  # pyright: ignore[reportReturnType]


def teach_tower(model: Any, ring: Ring, args: argparse.Namespace) -> None:
    """The tower's first lesson, for `args.tower` seconds."""
    namer = Namer(model.config.vision_config.hidden_size).to(args.device)
    learning = [*model.model.vision_tower.parameters(), *namer.parameters()]
    optimizer = torch.optim.AdamW(learning, lr=args.lr, betas=(0.9, 0.99), weight_decay=0.05)
    begun, step, shown = time.time(), 0, time.time()
    while (now := time.time()) - begun < args.tower:
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (now - begun) / args.tower)))
        *_, pixels, cells = ring.draw(2 * args.batch)
        loss, right = namer.loss(model, pixels[:, 0], cells[:, 0], args.autocast)
        optimizer.zero_grad()
        loss.backward()
        if bool(torch.isfinite(torch.nn.utils.clip_grad_norm_(learning, 1.0))):
            optimizer.step()
        step += 1
        if now - shown > args.every:
            shown = now
            print(
                f"tower: {now - begun:.0f} s, step {step}, loss {float(loss.detach()):.3f}, {float(right):.1%} of patches right", flush=True
            )


def checked(model: Any, parts: list[torch.Tensor], kinds: list[str]) -> dict[str, tuple[int, int]]:
    """(right, asked) by kind: a greedy answer is right to the letter if every token of it is the likeliest behind the true ones."""
    ids, labels, seen, pixels, _ = parts
    good: list[bool] = []
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        for at in range(0, len(ids), 250):
            cut = slice(at, at + 250)
            best = logits_of(model, ids[cut], seen[cut], pixels[cut])[:, :-1].argmax(-1)
            wanted = labels[cut, 1:]
            good += ((best == wanted) | (wanted == -100)).all(1).tolist()
    return {kind: (sum(g for g, k in zip(good, kinds) if k == kind), kinds.count(kind)) for kind in KINDS}


def train(args: argparse.Namespace) -> None:
    """Train until the time is over; writes the model now and then, and at the end."""
    begun = time.time()
    if args.threads:
        torch.set_num_threads(args.threads)
    tokenizer = tokenizer_of()
    ring = Ring(args, tokenizer)
    from transformers import LlavaForConditionalGeneration

    torch.manual_seed(args.seed)
    cuda = args.device == "cuda"
    vocab_size = -(-tokenizer.get_vocab_size() // 32) * 32
    model = LlavaForConditionalGeneration(config_of(vocab_size, args.size)).to(args.device)
    if args.start:
        model.load_state_dict(LlavaForConditionalGeneration.from_pretrained(args.start, dtype=torch.float32).state_dict())
    if not cuda:
        model.set_attn_implementation("eager")  # torch's fused attention took half of a step for its gradient (two cores: 0.26 to 0.18 s)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} million parameters on {args.device}, {args.workers} workers", flush=True)
    writer, test, kinds = Writer(tokenizer), Rows.empty(args.test), []
    for n, (picture, asks, answer, kind) in enumerate(held_out(args.test)):
        test.ids[n, 0] = SPECIAL.index("<s>")
        writer.turn(test, n, 1, asks, answer, 0)
        test.pixels[n, 0] = np.asarray(picture.resize((SIDE, SIDE), 3))
        kinds.append(kind)
    test_parts = test.tensors(args.device)
    plain = [p for p in model.parameters() if p.ndim < 2]
    shared = [p for p in model.parameters() if p.ndim >= 2]
    lr = torch.tensor(0.0, device=args.device) if cuda else 0.0
    optimizer = torch.optim.AdamW(
        [{"params": shared, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}],
        lr=lr, betas=(0.9, 0.99), fused=True, capturable=cuda,
    )  # fmt: skip
    if args.tower:
        teach_tower(model, ring, args)
    held = ring.draw(args.batch)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(model, held, args.autocast)
        loss.backward()
        sound = torch.isfinite(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True))
        for parameter in model.parameters():  # one step of infinite gradients would end everything
            if parameter.grad is not None:
                parameter.grad.copy_(torch.where(sound, parameter.grad, 0.0))
        optimizer.step()
        return loss

    def set_rate(rate: float) -> None:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    if args.compile:
        model.model.vision_tower.forward = torch.compile(model.model.vision_tower.forward)
        model.model.language_model.forward = torch.compile(model.model.language_model.forward)
    with ring.lock:
        run = captured(step) if cuda else step

    def kept(head: str, best: float) -> float:
        """Report; write the model if none before it was better."""
        right = report(model, test_parts, kinds, head)
        if right >= best:
            write(model, tokenizer, args.out)
        return max(best, right)

    best = 0.0
    set_rate(0.0)
    loss, shown, done = torch.zeros(()), time.time() - begun, 0
    print(f"first step after {shown:.1f} s", flush=True)
    first = shown
    while (now := time.time() - begun) < args.seconds and done < args.steps:
        part = max((now - first) / max(1e-9, args.seconds - first), done / args.steps)
        set_rate(args.lr * min(1.0, (done + 1) / 200) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * part))))
        for fixed, fresh in zip(held, ring.draw(args.batch)):
            fixed.copy_(fresh)
        loss = run()
        done += 1
        if done % 20 == 0 and now - shown > args.every:
            shown = now
            best = kept(f"{now:.0f} s, step {done}, loss {float(loss.detach()):.4f}, {ring.written} rows", best)
    ring.close()
    kept(f"end: {time.time() - begun:.0f} s, step {done}, loss {float(loss.detach()):.4f}, {ring.written} rows", best)


def captured(step: Any) -> Any:
    """The step as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        loss = step()

    def run() -> torch.Tensor:
        graph.replay()
        return loss

    return run


def report(model: Any, parts: list[torch.Tensor], kinds: list[str], head: str) -> float:
    """Say, and return, how many held-out answers are right."""
    found = checked(model, parts, kinds)
    right = sum(good for good, _ in found.values()) / len(kinds)
    print(f"{head}: {right:.1%} right; " + ", ".join(f"{kind} {good}/{all_}" for kind, (good, all_) in found.items()), flush=True)
    return right


def write(model: Any, tokenizer: Any, out: Path) -> None:
    """The files of a Llava, weights in fp16."""
    out.mkdir(parents=True, exist_ok=True)
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(out, state_dict={name: value.half() for name, value in model.state_dict().items()})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "dtype": "float16"}, indent=1))
    tokenizer.save(str(out / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": TEMPLATE}
    (out / "tokenizer_config.json").write_text(json.dumps(special, indent=1))
    rules = {"size": {"height": SIDE, "width": SIDE}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}
    (out / "preprocessor_config.json").write_text(json.dumps(rules, indent=1))
    (out / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2, "do_sample": False}))


def measure(path: Path, count: int, seed: int = 1, show: int = 0) -> dict[str, tuple[int, int]]:
    """(right, asked) by kind through exl2nb, greedily, to the letter; the first `show` wrong answers are printed."""
    import exl2nb as ex

    found: dict[str, tuple[int, int]] = {kind: (0, 0) for kind in KINDS}
    everything = held_out(count, seed)
    with ex.load(path, device="cpu", progress=None) as llm:
        while some := list(itertools.islice(everything, 16)):
            handles = [
                llm.chat([{"role": "user", "content": [picture, asks]}], stream=True, temperature=0, max_tokens=80)
                for picture, asks, _, _ in some
            ]
            for handle, (_, asks, answer, kind) in zip(handles, some):
                said = handle.result().text.strip()
                good, all_ = found[kind]
                found[kind] = good + (said == answer), all_ + 1
                if said != answer and show > 0:
                    show -= 1
                    print(f"{asks} -> {said!r}; right: {answer!r}", flush=True)
    return found


def package(source: Path, out: Path, *, bpw: float, vision_bits: int, count: int) -> None:
    """Convert to EXL2, measure both, write the card."""
    import exl2nb as ex

    rng = random.Random(3)
    talks = []
    for _ in range(600):
        _, scene = drawn(rng)
        talks.append("".join(f"<|user|>{words}<|bot|>{answer}</s>" for words, answer, _ in (asked(scene, rng) for _ in range(6))))
    done = ex.convert(
        source, out, bpw=bpw, head_bits=8, vision_bits=vision_bits, calibration=talks, rows=48, length=128, report_rows=4, progress=None
    )
    before, after = measure(source, count), measure(out, count)
    rows = [f"| {kind} | {share(*before[kind])} | {share(*after[kind])} | {after[kind][1]} |" for kind in KINDS]
    totals = [tuple(map(sum, zip(*found.values()))) for found in (before, after)]
    card = [
        "# A small model that sees",
        "",
        f"Llava, a SigLIP tower and a Llama decoder, {done.nbytes / 1e6:.1f} MB as EXL2: {done.bpw:.2f} bits per weight in the decoder,",
        f"{vision_bits} in the tower's blocks. It answers questions about pictures of shapes and digits.",
        "",
        "`tools/train_seeing_model.py` trained it on pictures and conversations that the script draws and writes, and on nothing else.",
        "MIT licence, as the package.",
        "",
        f"Answers that are right to the letter, greedily, through exl2nb, on {count} pictures that training never drew:",
        "",
        "| question | fp16 | EXL2 | asked |",
        "|---|---|---|---|",
        *rows,
        f"| all | {share(*totals[0])} | {share(*totals[1])} | {count} |",
        "",
        f"Pictures are resized to {SIDE} x {SIDE} pixels and read as {TOKENS} tokens. Names: {', '.join(SHAPES)}, digit 0 to digit 9.",
        f"Colours: {', '.join(COLOURS)}. One to four things, in a grid of three by three.",
        "Of photographs it knows nothing, and answers all the same.",
        "",
    ]
    (out / "README.md").write_text("\n".join(card))
    sys.stdout.write("\n".join(card))


def share(good: int, all_: int) -> str:
    """For people."""
    return f"{good / max(1, all_):.1%}"


def main(argv: list[str] | None = None) -> None:
    """Train, or measure."""
    parser = argparse.ArgumentParser(description="Train the small model that sees.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("train", help="make a model directory")
    one.add_argument("out", type=Path, help="model directory to write")
    one.add_argument("--size", choices=list(SIZES), default="full", help="small: for a CPU")
    one.add_argument("--seconds", type=float, default=560.0, help="end after so long, the start included")
    one.add_argument("--steps", type=int, default=10**9)
    one.add_argument("--batch", type=int, default=256)
    one.add_argument("--tower", type=float, default=40.0, help="seconds of them for the tower alone, at the start")
    one.add_argument("--kept", type=int, default=200_000, help="latest conversations to draw batches from")
    one.add_argument("--start", type=Path, help="a model that an earlier run wrote, to go on from; give --tower 0, too")
    one.add_argument("--lr", type=float, default=1e-3)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    one.add_argument("--fonts", help="folder of .ttf files to draw digits with, besides Pillow's own")
    one.add_argument("--test", type=int, default=1000, help="held-out questions")
    one.add_argument("--every", type=float, default=20.0, help="seconds between reports")
    one.add_argument("--autocast", action=argparse.BooleanOptionalAction, default=True, help="matrix products in bf16")
    one.add_argument("--threads", type=int, help="of torch")
    one.add_argument("--compile", action="store_true", help="torch.compile the tower and the decoder")
    one.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    two = verbs.add_parser("measure", help="answers on held-out pictures, through exl2nb")
    two.add_argument("model", type=Path)
    two.add_argument("--count", type=int, default=1000)
    two.add_argument("--seed", type=int, default=1)
    two.add_argument("--show", type=int, default=0, help="wrong answers to print")
    three = verbs.add_parser("package", help="make the EXL2 model and its card")
    three.add_argument("model", type=Path, help="what train wrote")
    three.add_argument("out", type=Path, help="directory to make")
    three.add_argument("--bpw", type=float, default=6.0)
    three.add_argument("--vision-bits", type=int, default=8)
    three.add_argument("--count", type=int, default=1000)
    args = parser.parse_args(argv)
    if args.verb == "train":
        train(args)
        return
    if args.verb == "package":
        package(args.model, args.out, bpw=args.bpw, vision_bits=args.vision_bits, count=args.count)
        return
    found = measure(args.model, args.count, args.seed, args.show)
    for kind, (good, all_) in found.items():
        sys.stdout.write(f"{kind}: {good} of {all_} ({good / max(1, all_):.1%})\n")
    good, all_ = (sum(pair[i] for pair in found.values()) for i in (0, 1))
    sys.stdout.write(f"all: {good} of {all_} ({good / max(1, all_):.1%})\n")


if __name__ == "__main__":
    main()
