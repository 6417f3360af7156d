"""Converted models keep their tower and see with it."""

import json
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

import exl2nb as ex
from exl2nb.core.errors import OptionError
from exl2nb.model.loader import load_model
from exl2nb.model.vision.encoder import load_encoder, plan_encoder
from exl2nb.model.vision.pictures import Picture

from .zoo import build, write

TEXT = " ".join(f"w{(i * i + 7 * i) % 90}" for i in range(2000))


@pytest.mark.cpu
def test_the_tower_s_linears_as_exl2(tmp_path):
    source, options = write("llava-siglip", build("llava-siglip"), tmp_path / "dense"), {"calibration": [TEXT], "rows": 4, "length": 32}
    done = {bits: ex.convert(source, tmp_path / f"{bits}", bpw=6.0, vision_bits=bits, progress=None, **options) for bits in (3, 8, None)}
    config = load_model(source).config
    towers = {bits: load_encoder(one.path, config) for bits, one in done.items()}
    assert {tower.weight_bytes for tower in towers.values()} == {towers[None].weight_bytes}
    assert {plan_encoder(one.path, config) for one in done.values()} == {plan_encoder(source, config)}
    size = {bits: sum(file.stat().st_size for file in one.path.glob("*.safetensors")) for bits, one in done.items()}
    assert size[3] < size[8] < size[None]
    picture = Picture.of(np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8))
    exact = towers[None](picture)[0].rows
    error = {bits: float((tower(picture)[0].rows - exact).norm() / exact.norm()) for bits, tower in towers.items()}
    assert error[None] == 0 < error[8] < 0.3 * error[3] < 0.1
    assert json.loads((done[8].path / "config.json").read_text())["quantization_config"]["vision_bits"] == 8
    with ex.load(done[8].path, device="cpu", progress=None) as llm:
        assert llm.chat([{"role": "user", "content": [picture, "w1"]}], max_tokens=2).timings.prompt_tokens > 9


def test_bits_of_a_tower_that_cannot_be(tmp_path):
    with pytest.raises(OptionError, match="vision_bits is 7; expected one of"):
        ex.convert(tmp_path, tmp_path / "out", bpw=4, vision_bits=7)
    with pytest.raises(OptionError, match="has no vision tower; leave it out"):
        ex.convert(Path(ex.__file__).parent / "demo_model", tmp_path / "out", bpw=4, vision_bits=6, progress=None)


@pytest.mark.cpu
@pytest.mark.parametrize(
    "name", ["qwen2_5_vl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "llava", "pixtral", "mistral3", "qwen3_vl"))]
)
def test_a_converted_model_sees_what_the_original_sees(name, tmp_path):
    source = write(name, build(name), tmp_path / "dense")
    done = ex.convert(source, tmp_path / "exl2", bpw=6.0, calibration=[TEXT], rows=4, length=32, progress=None)
    for file in source.glob("*preprocessor_config.json"):
        assert (done.path / file.name).read_bytes() == file.read_bytes()
    before, after = (load_encoder(path, load_model(path).config) for path in (source, done.path))
    pictures = [PIL.Image.fromarray(np.random.default_rng(i).integers(0, 256, (30, 20, 3), dtype=np.uint8)) for i in range(2)]
    talks = [[{"role": "user", "content": [one, "w1 w2"]}] for one in pictures]
    logits = []
    for path in (source, done.path):
        with ex.load(path, device="cpu", cache="fp32", progress=None) as llm:
            logits.append([llm.chat(one, max_tokens=1, temperature=0, ignore_eos=True, return_logits=True).logits[0] for one in talks])
            assert llm.vision.weight_bytes == before.weight_bytes == after.weight_bytes
    for dense, exl2 in zip(*logits):
        assert np.corrcoef(dense, exl2)[0, 1] > 0.98
    assert np.abs(logits[1][0] - logits[1][1]).max() > 0.01 * logits[1][0].std()  # another picture, another answer
