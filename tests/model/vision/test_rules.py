"""Preprocessing against Transformers' image processors, on pictures of odd sizes."""

import json

import numpy as np
import PIL.Image
import pytest
import torch

from exl2nb.core.errors import ConfigError, PictureError
from exl2nb.model.config_fields import Fields
from exl2nb.model.vision.families import read_vision
from exl2nb.model.vision.pictures import Picture
from exl2nb.model.vision.rules import BILINEAR_FILTER, HALF_PER_CHANNEL, Rules, read_rules
from exl2nb.model.vision.tower import TowerConfig, patches_of

from .zoo import ZOO, build, write

SIZES = [(37, 53), (224, 224), (301, 97), (640, 480), (65, 500), (9, 11)]


def noise(size, seed=0):
    """A smooth random picture of this width and height."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return PIL.Image.fromarray(small).resize(size, PIL.Image.Resampling.BICUBIC)


def patches(frames, patch, temporal, merge):
    tower = TowerConfig(layers=1, width=8, heads=1, patch=patch, temporal=temporal, merge=merge, names=None, embed="")
    return patches_of(tower, frames)


def close(got, want):
    assert got.shape == want.shape
    assert float((got - want).abs().max()) < 2e-6


@pytest.mark.parametrize("size", SIZES)
def test_clip(size):
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    theirs = CLIPImageProcessorPil(size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64})
    given = Fields({"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}})
    rules = Rules(fit="exact", unit=14, height=64, width=64).read(given)
    close(rules.frames(Picture.of(noise(size))), theirs(noise(size), return_tensors="pt")["pixel_values"])


@pytest.mark.parametrize("size", SIZES)
def test_clip_on_a_padded_square(size):
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    settings = {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}, "do_pad": True}
    rules = Rules(fit="exact", unit=14, height=64, width=64).read(Fields(settings))
    close(rules.frames(Picture.of(noise(size))), LlavaImageProcessorPil(**settings)(noise(size), return_tensors="pt")["pixel_values"])


@pytest.mark.parametrize("size", SIZES)
def test_siglip_and_gemma(size):
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    rules = Rules(fit="exact", unit=14, height=56, width=56, mean=HALF_PER_CHANNEL, std=HALF_PER_CHANNEL, resample=BILINEAR_FILTER)
    theirs = Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    close(rules.frames(Picture.of(noise(size))), theirs(noise(size), return_tensors="pt")["pixel_values"])


@pytest.mark.parametrize("unit", [16, 28])
@pytest.mark.parametrize("size", SIZES)
def test_pixtral(size, unit):
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    rules = Rules(fit="longest", unit=unit, longest=200)
    theirs = PixtralImageProcessorPil(size={"longest_edge": 200}, patch_size={"height": unit, "width": unit})
    got = rules.frames(Picture.of(noise(size)))
    close(got, theirs(noise(size), return_tensors="pt")["pixel_values"])
    assert rules.size_for(*size) == (got.shape[3], got.shape[2])


@pytest.mark.parametrize("size", SIZES)
def test_qwen(size):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    settings = {"min_pixels": 56 * 56 * 4, "max_pixels": 28 * 28 * 60}
    rules = Rules(fit="pixels", unit=28, temporal=2, low=1, high=2).read(Fields(settings))
    got = rules.frames(Picture.of(noise(size)))
    want = Qwen2VLImageProcessorPil(**settings)(noise(size), return_tensors="pt")
    close(patches(got, 14, 2, 2), want["pixel_values"])
    assert want["image_grid_thw"].tolist() == [[1, got.shape[2] // 14, got.shape[3] // 14]]


@pytest.mark.parametrize("frames", [2, 4, 9])
@pytest.mark.parametrize("size", [*SIZES, (1280, 720), (20, 31)])
def test_videos_of_qwen3_count_the_pixels_of_all_frames(frames, size):
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    rules = Rules(fit="pixels", unit=32, temporal=2, low=128 * 32 * 32, high=768 * 32 * 32, whole=True)
    width, height = size
    want = smart_resize(frames, height, width, factor=32, min_pixels=rules.low, max_pixels=rules.high)
    assert rules.size_for(width, height, frames) == (want[1], want[0])


def test_an_odd_number_of_frames_repeats_the_last():
    rules = Rules(fit="pixels", unit=8, temporal=2, low=64, high=64 * 64)
    got = rules.frames(Picture.video([noise((40, 24), i) for i in range(3)]))
    assert len(got) == 4
    assert torch.equal(got[2], got[3])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"image_mean": [1, 2]}, "three numbers"),
        ({"image_std": [0.5, 0, 0.5]}, "above 0"),
        ({"size": {"longest_edge": 10, "shortest_edge": 99}}, "least number"),
        ({"resample": 9}, "0 to 5"),
        ({"min_pixels": -1}, "1 to"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        Rules(fit="pixels", unit=28, temporal=2, low=1, high=2).read(Fields(settings))


@pytest.mark.parametrize(
    "rules",
    [
        Rules(fit="pixels", unit=28, low=1 << 34, high=1 << 34),
        Rules(fit="shortest", unit=1, shortest=4096, height=4096, width=4096),
        Rules(fit="exact", unit=1, height=4096, width=4096, square=True),
    ],
)
def test_settings_that_blow_pictures_up_are_refused(rules):
    long = Picture.of(noise((100, 16000)))
    with pytest.raises(PictureError, match=r"preprocessor_config\.json makes"):
        rules.frames(long)


def test_pictures_of_millions_of_tokens_are_refused_before_their_text_is_made():
    from exl2nb.model.vision.prompt import MAX_TOKENS, expand_placeholders

    class Huge:
        marks = None

        def tokens(self, grid):
            return grid[0]

    with pytest.raises(PictureError, match="give fewer"):
        expand_placeholders("x", Huge(), [], [(MAX_TOKENS, 1, 1), (1, 1, 1)], str)


def test_frames_of_a_video_are_counted_together(monkeypatch):
    monkeypatch.setattr("exl2nb.model.vision.rules.MAX_TOTAL", 1000)
    with pytest.raises(PictureError, match="expected at most"):
        Rules(fit="exact", unit=1, height=20, width=20).frames(Picture.video([noise((8, 8))] * 3))


def test_settings_are_found_in_either_file(tmp_path):
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {"min_pixels": 7}}))
    assert read_rules(tmp_path).raw == {"min_pixels": 7}
    assert read_rules(tmp_path, "video") is None
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert read_rules(tmp_path).raw == {}


@pytest.mark.parametrize(
    ("name", "part", "changes", "says"),
    [
        ("llava", "vision_config", {"model_type": "resnet"}, "siglip_vision_model"),
        ("llava", "vision_config", {"hidden_size": 33}, "multiple of 2 heads"),
        ("llava", "vision_config", {"hidden_act": "relu9"}, "quick_gelu"),
        ("llava", "", {"vision_feature_layer": 99}, "layers from"),
        ("llava", "", {"vision_feature_select_strategy": "some"}, "default or full"),
        ("llava", "vision_config", {"image_size": 32}, "expected image_size 32"),
        ("mistral3", "", {"vision_feature_layer": [-1, -2]}, "one layer"),
        ("gemma3", "", {"mm_tokens_per_image": 15}, "divisor of the 8 patches"),
        ("qwen2_5_vl", "vision_config", {"fullatt_block_indexes": "all"}, "list of blocks"),
        ("qwen2_5_vl", "vision_config", {"window_size": 4}, "at least 8"),
        ("qwen3_vl", "vision_config", {"deepstack_visual_indexes": [7]}, "0 to 2"),
        ("qwen3_vl", "vision_config", {"depth": 0}, "from 1"),
    ],
)
def test_towers_that_cannot_be_read_are_refused(name, part, changes, says, tmp_path, configs):
    raw = json.loads(configs(name))
    (raw[part] if part else raw).update(changes)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(ZOO[name].processor))
    with pytest.raises(ConfigError, match=says):
        read_vision(ZOO[name].cls, raw, tmp_path)


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Name -> the text of its config.json."""
    import functools

    @functools.cache
    def read(name):
        folder = tmp_path_factory.mktemp(name)
        return (write(name, build(name), folder, tokenizer=False) / "config.json").read_text()

    return read


def test_a_class_without_a_tower_sees_nothing(tmp_path):
    assert read_vision("LlamaForCausalLM", {"vision_config": {}}, tmp_path) is None
    assert read_vision("LlavaForConditionalGeneration", {}, tmp_path) is None
