"""Pictures on the GPU: the same logits as on the CPU, beside texts, in pieces and while decoding."""

import numpy as np
import PIL.Image
import pytest
import torch

import exl2nb as ex

from .zoo import ZOO, build, write

pytestmark = pytest.mark.gpu


def noise(width, height, seed):
    return PIL.Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ZOO)
def test_logits_equal_the_cpu_s(name, deterministic, tmp_path):
    folder = write(name, build(name), tmp_path)
    video = [{"type": "video", "video": [noise(24, 24, i) for i in range(5)]}] if name.startswith("qwen") else []
    talks = [
        [{"role": "user", "content": [noise(30, 20, 1), "w1 w2", *video, noise(17, 40, 2), "w3"]}],
        "w1 w2 w3",
        [{"role": "user", "content": [noise(40, 40, 3), "w9"]}],
        *["w4 w5"] * 4,
    ]
    options = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, "return_logits": True}
    found = {}
    for device in ("cpu", "cuda"):
        with ex.load(folder, device=device, progress=None, deterministic=deterministic) as llm:
            alone = [llm.chat(one, **options) for one in talks]
            llm.cache.clear()
            together = [handle.result() for handle in [llm.chat(one, stream=True, **options) for one in talks]]
            fast = [[token.id for token in llm.chat(one, temperature=0, max_tokens=4, ignore_eos=True).tokens] for one in talks]
        found[device] = alone, together
        for one, other, drawn in zip(alone, together, fast):
            assert np.abs(one.logits[0] - other.logits[0]).max() < 0.03 * one.logits[0].std()
            if [token.id for token in one.tokens] == [token.id for token in other.tokens]:
                assert np.abs(one.logits - other.logits).max() < 0.05 * one.logits.std()
                assert drawn[0] == one.tokens[0].id
    for cpu, gpu in zip(*(found[device][0] for device in ("cpu", "cuda"))):
        assert np.abs(cpu.logits[0] - gpu.logits[0]).max() < 0.03 * cpu.logits[0].std()
        same = [a.id == b.id for a, b in zip(cpu.tokens, gpu.tokens)]
        for step in range(1, 4):
            if all(same[:step]):
                assert np.abs(cpu.logits[step] - gpu.logits[step]).max() < 0.05 * cpu.logits[step].std()
    assert torch.cuda.is_available()


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "llava"])
def test_a_trace_reads_what_a_chat_reads(name, tmp_path):
    talk = [{"role": "user", "content": [noise(30, 20, 1), "w1 w2"]}]
    with ex.load(write(name, build(name), tmp_path), device="cuda", cache="fp16", progress=None) as llm:
        done = llm.chat(talk, temperature=0, max_tokens=1, ignore_eos=True, return_logits=True)
        found = llm.trace(talk, ["logits", "blocks.0.attn.hook_pattern"], cache="fp16")
        assert np.abs(found.logits[-1].numpy() - done.logits[0]).max() < 0.03 * done.logits[0].std()
        assert len(found.pictures) == 1
