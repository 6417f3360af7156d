"""A trace of messages with pictures reads what a chat reads: the same logits, and it says which tokens are pictures."""

import numpy as np
import PIL.Image
import pytest
import torch

import exl2nb as ex
from exl2nb.core.errors import OptionError
from exl2nb.model.vision.pictures import Picture

from .zoo import ZOO, build, write

LOOKED = "blocks.1.attn.hook_pattern"


def noise(width, height, seed):
    return PIL.Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("name", [name for name in ZOO if name != "gemma3"])
def test_logits_are_the_chat_s(name, tmp_path):
    with ex.load(write(name, build(name), tmp_path), device="cpu", cache="fp32", progress=None) as llm:
        talk = [{"role": "user", "content": [noise(24, 24, 1), "w1 w2", noise(40, 16, 2), "w3"]}]
        done = llm.chat(talk, temperature=0, max_tokens=1, ignore_eos=True, return_logits=True)
        found = llm.trace(talk, ["logits", LOOKED, "hook_embed"])
        assert np.abs(found.logits[-1].numpy() - done.logits[0]).max() < 1e-4 * done.logits[0].std()
        pictures = [Picture.of(part) for part in talk[0]["content"] if not isinstance(part, str)]
        assert [len(one.tokens) for one in found.pictures] == [llm.vision.tokens(picture) for picture in pictures]
        assert [one.grid for one in found.pictures] == [llm.vision.grid(picture) for picture in pictures]
        values, _ = llm.vision(pictures[0])
        assert torch.allclose(found["hook_embed"][list(found.pictures[0].tokens)], values.rows, atol=1e-6)
        assert torch.allclose(found[LOOKED].sum(-1), torch.ones(()), atol=1e-4)
        blind = llm.trace("w1 w2 w3", "logits")
        assert blind.pictures == ()
        answered = llm.trace([*talk, {"role": "assistant", "content": "w4 w5"}])
        assert answered.ids[: len(found.ids)] == found.ids
        assert len(answered.ids) > len(found.ids)


def test_a_picture_whose_tokens_see_each_other_is_refused(tmp_path):
    with ex.load(write("gemma3", build("gemma3"), tmp_path), device="cpu", progress=None) as llm:
        with pytest.raises(OptionError, match="see each other"):
            llm.trace([{"role": "user", "content": [noise(24, 24, 1), "w1"]}])
        assert len(llm.trace([{"role": "user", "content": "w1 w2"}]).ids) > 2
