"""Converted models keep their tower and see with it."""

import numpy as np
import PIL.Image
import pytest

import exl2nb as ex
from exl2nb.model.loader import load_model
from exl2nb.model.vision.encoder import load_encoder

from .zoo import build, write

TEXT = " ".join(f"w{(i * i + 7 * i) % 90}" for i in range(2000))


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
