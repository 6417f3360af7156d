"""Towers, projectors and whole models with pictures against Transformers, on the zoo's tiny random models."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch

from exl2nb.cache.pool import KVCache
from exl2nb.model.batch import Batch, SequenceSlice
from exl2nb.model.loader import load_model
from exl2nb.model.vision.encoder import load_encoder
from exl2nb.model.vision.pictures import Picture
from exl2nb.model.vision.prompt import assign_picture_tokens
from exl2nb.model.vision.tower import patches_of

from ..test_model import error, same
from .zoo import QWEN, ZOO, build, write

# height and width of several pictures, as the tower sees them; Qwen's also as videos of two patches in time
SIZES = {"gemma3": [(32, 32)] * 2, "llava": [(24, 24)] * 2, "llava-siglip": [(24, 24)] * 2, "pixtral": [(12, 20), (4, 8), (28, 4)]}
SIZES |= {"mistral3": [(16, 24), (8, 16)]}
SIZES |= {name: [(8, 24), (16, 8), (24, 40)] for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")}


def frames_of(name, seed=0):
    """Normalised pixels of the entry's pictures, the last of Qwen's a video of six frames."""
    generator = torch.Generator().manual_seed(seed)
    counts = [2, 2, 6] if name.startswith("qwen") else [1] * 9
    return [torch.randn(count, 3, *size, generator=generator) for count, size in zip(counts, SIZES[name])]


def picture(seed, video=False):
    return Picture((), (0.0, 0.5, 1.0, 1.5, 2.0, 2.5) if video else (), bytes([seed]) * 32)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Name -> the model in Transformers, its directory, ours and its tower; made once."""

    @functools.cache
    def make(name):
        twin = build(name)
        folder = write(name, twin, tmp_path_factory.mktemp(name))
        model = load_model(folder)
        return twin, folder, model, load_encoder(folder, model.config)

    return make


def features(name, twin, frames, encoder):
    """What Transformers makes of each picture: rows, and the deeper ones."""
    out = []
    for one in frames:
        if name.startswith("qwen"):
            grid = torch.tensor([[len(one) // 2, one.shape[2] // 4, one.shape[3] // 4]])
            got = twin.model.get_image_features(patches_of(encoder.vision.tower, one), grid, return_dict=True)
            out.append((got.pooler_output[0], [part[0] for part in getattr(got, "deepstack_features", [])]))
        else:
            sizes = {"image_sizes": torch.tensor([one.shape[2:]])} if name in ("pixtral", "mistral3") else {}
            out.append((twin.model.get_image_features(one, return_dict=True, **sizes).pooler_output[0], []))
    return out


@pytest.mark.parametrize("name", ZOO)
def test_towers_equal_transformers(name, made):
    twin, _, _, encoder = made(name)
    frames = frames_of(name)
    with torch.no_grad():
        wants = features(name, twin, frames, encoder)
    for one, (rows, deep) in zip(frames, wants):
        found, grid = encoder.encode(one)
        assert len(found.rows) == encoder.vision.tokens(grid) == len(rows)
        for got, want in zip((found.rows, *found.deep), (rows, *deep), strict=True):
            assert float((got - want).abs().max()) < 1e-4 * float(want.abs().max())


def prompt(name, model, encoder, frames, *, whole=True):
    """Ids of text, pictures and text again, and where the pictures are."""
    generator = torch.Generator().manual_seed(3)

    def words(count):
        return torch.randint(3, 130, (count,), generator=generator).tolist()

    encoded = [encoder.encode(one) for one in frames]
    pictures = [picture(i, video=name.startswith("qwen") and i == 2) for i in range(len(frames))]
    ids = words(7)
    for one, (found, grid) in zip(pictures, encoded):
        token = QWEN["video_token_id"] if one.is_video else 140
        count = len(found.rows)
        if name in ("pixtral", "mistral3"):
            row = [token] * (grid[2] // encoder.vision.merge)
            ids += [*([*row, 144] * (count // len(row))), 145]
        elif one.is_video and encoder.vision.marks.style == "frames":
            each = count // grid[0]
            ids += [t for _ in range(grid[0]) for t in (*words(3), 142, *[token] * each, 143)]
        else:
            ids += [142, *[token] * count, 143]
        ids += words(4)
    config = model.config
    return ids, assign_picture_tokens(
        ids, encoder.vision, pictures, encoded, whole=config.sees_whole and whole, axes=config.mrope is not None
    )


def truth(name, twin, ids, frames, encoder):
    """Transformers' logits of the same prompt."""
    row = torch.tensor([ids])
    kinds = (row == 140).int() + 2 * (row == 141).int()
    inputs = {"input_ids": row}
    if name.startswith("qwen"):
        grids = [[len(one) // 2, one.shape[2] // 4, one.shape[3] // 4] for one in frames]
        patches = [patches_of(encoder.vision.tower, one) for one in frames]
        inputs |= {"pixel_values": torch.cat(patches[:2]), "image_grid_thw": torch.tensor(grids[:2]), "mm_token_type_ids": kinds}
        inputs |= {"pixel_values_videos": patches[2], "video_grid_thw": torch.tensor(grids[2:])}
        if name == "qwen2_5_vl":
            inputs["second_per_grid_ts"] = torch.tensor([1.0])
    elif name in ("pixtral", "mistral3"):
        height, width = (max(one.shape[side] for one in frames) for side in (2, 3))
        padded = [torch.nn.functional.pad(one, (0, width - one.shape[3], 0, height - one.shape[2])) for one in frames]
        inputs |= {"pixel_values": torch.cat(padded), "image_sizes": torch.tensor([one.shape[2:] for one in frames])}
    else:
        inputs["pixel_values"] = torch.cat(frames)
        if name == "gemma3":
            inputs["token_type_ids"] = kinds
    with torch.no_grad():
        return twin(**inputs).logits[0]


def step(ids, pictures, start=0, end=None, **more):
    """A step of one prompt's tokens from `start` on."""
    end = len(ids) if end is None else end
    batch = Batch.single(ids[start:end], start=start, pages=[0, 1], logit_rows="all")
    positions = torch.from_numpy(pictures.positions(start, end - start))
    return replace(batch, positions=positions, pictures=pictures.within(start, end - start, 0))


@pytest.mark.parametrize("name", ZOO)
def test_logits_with_pictures_equal_transformers(name, made):
    twin, _, model, encoder = made(name)
    frames = frames_of(name)
    ids, pictures = prompt(name, model, encoder, frames)
    want = truth(name, twin, ids, frames, encoder)
    assert error(model.forward(step(ids, pictures), KVCache(model.cache_spec(512, mode="fp32"))), want) < 1e-4
    # the pictures matter
    blind = model.forward(Batch.single(ids, start=0, pages=[0, 1], logit_rows="all"), KVCache(model.cache_spec(512, mode="fp32")))
    assert error(blind, want) > 0.1


@pytest.mark.parametrize("name", ZOO)
def test_any_cut_gives_the_same_bits(name, made):
    """Where the tokens of a picture see each other, the cuts are at its ends."""
    _, _, model, encoder = made(name)
    ids, pictures = prompt(name, model, encoder, frames_of(name))
    once = model.forward(step(ids, pictures), KVCache(model.cache_spec(512)))
    cuts = sorted({pictures.block_end(at) for at in (5, 9, 20, 21, 40, len(ids) - 1) if at < len(ids)} | {0, len(ids)})
    cache = KVCache(model.cache_spec(512))
    parts = [model.forward(step(ids, pictures, a, b), cache) for a, b in itertools.pairwise(cuts)]
    assert same(torch.cat(parts), once)


@pytest.mark.parametrize("name", ZOO)
def test_texts_beside_pictures_have_the_same_bits(name, made):
    _, _, model, encoder = made(name)
    ids, pictures = prompt(name, model, encoder, frames_of(name))
    once = model.forward(step(ids, pictures), KVCache(model.cache_spec(512)))
    text = [5, 9, 11, 30, 31]
    alone = model.forward(Batch.single(text, start=0, pages=[0], logit_rows="all"), KVCache(model.cache_spec(256)))
    spans = [SequenceSlice(ids=text, start=0, pages=[0], logit_rows="all"), SequenceSlice(ids=ids, start=0, pages=[1, 2], logit_rows="all")]
    batch = Batch.build([*spans, SequenceSlice(ids=text, start=0, pages=[3], logit_rows="last")])
    positions = batch.positions.clone()
    positions[5 : 5 + len(ids)] = torch.from_numpy(pictures.positions(0, len(ids)))
    batch = replace(batch, positions=positions, pictures=pictures.within(0, len(ids), 5))
    first, seen, last = model.forward(batch, KVCache(model.cache_spec(1024))).split([5, len(ids), 1])
    assert same(first, alone)
    assert same(seen, once)
    assert same(last, alone[-1:])
