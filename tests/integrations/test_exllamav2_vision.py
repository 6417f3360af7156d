"""exllamav2's vision tower over ours: the same answers as `llm.chat`, whatever the order of the embeddings."""

import numpy as np
import PIL.Image
import pytest
import torch

import exl2nb as ex
from exl2nb.core.errors import OptionError
from exl2nb.integrations.exllamav2 import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Config,
    ExLlamaV2Tokenizer,
    ExLlamaV2VisionTower,
)
from exl2nb.integrations.exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from tests.model.vision.zoo import build, write

pytestmark = pytest.mark.cpu


def noise(seed):
    return PIL.Image.fromarray(np.random.default_rng(seed).integers(0, 256, (20, 30, 3), dtype=np.uint8))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "mistral3"])
def test_jobs_see_what_chats_see(name, tmp_path, monkeypatch):
    monkeypatch.setenv("EXL2NB_DEVICE", "cpu")
    folder = write(name, build(name), tmp_path)
    with ex.load(folder, progress=None) as llm:
        talk = [{"role": "user", "content": [noise(1), "w1 w2", noise(2), "w3"]}]
        want = llm.chat(talk, temperature=0, max_tokens=6, ignore_eos=True)
        text = llm.render_chat(talk)
    config = ExLlamaV2Config(str(folder))
    tower = ExLlamaV2VisionTower(config)
    with pytest.raises(OptionError, match="call load"):
        tower.get_image_embeddings(None, None, noise(1))
    tower.load()
    model = ExLlamaV2(config)
    cache = ExLlamaV2Cache(model, lazy=True, max_seq_len=512)
    model.load_autosplit(cache)
    tokenizer = ExLlamaV2Tokenizer(config)
    first, second = (tower.get_image_embeddings(model, tokenizer, noise(i)) for i in (1, 2))
    prompt = text
    for one in (first, second):
        prompt = prompt.replace(one.expanded, one.text_alias, 1)
    assert prompt.count("<$EMB_") == 2
    ids = tokenizer.encode(prompt, embeddings=[second, first], encode_special_tokens=True)
    assert int(ids.max()) == second.first_index + second.mm_length - 1
    generator = ExLlamaV2DynamicGenerator(model=model, cache=cache, tokenizer=tokenizer)
    settings = ExLlamaV2Sampler.Settings.greedy()
    job = ExLlamaV2DynamicJob(ids, 6, gen_settings=settings, embeddings=[second, first])
    generator.enqueue(job)
    found = []
    while generator.num_remaining_jobs():
        for result in generator.iterate():
            found += result.get("token_ids", torch.empty(1, 0)).view(-1).tolist()
    assert [int(i) for i in found] == [token.id for token in want.tokens]
    with pytest.raises(OptionError, match="times; expected once"):
        tokenizer.encode("w1", embeddings=[first])
    with pytest.raises(OptionError, match="2 embeddings, 0 of them"):
        generator.enqueue(ExLlamaV2DynamicJob(torch.tensor([[5, 6]]), 3, embeddings=[first, second]))
    with pytest.raises(OptionError, match="not in embeddings"):
        generator.enqueue(ExLlamaV2DynamicJob(ids, 3, embeddings=[first]))
    model.unload()
    tower.unload()


def test_a_model_without_a_tower_is_named(monkeypatch):
    from pathlib import Path

    monkeypatch.setenv("EXL2NB_DEVICE", "cpu")
    with pytest.raises(OptionError, match="no vision tower"):
        ExLlamaV2VisionTower(ExLlamaV2Config(str(Path(ex.__file__).parent / "demo_model"))).load()
