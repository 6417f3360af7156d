"""Two sets of RoPE factors, chosen by how long a sequence is: answers are Transformers' on either side of the switch and across it."""

import pytest
import torch

from exl2nb.generator.engine import Engine
from exl2nb.generator.request import Request
from exl2nb.model.loader import load_model
from exl2nb.tokenizer.tokenizer import Tokenizer

from .tiny import ids_of, truth
from .zoo import LONGROPE, build, write, write_tokenizer

SWITCH = 128


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    directory = tmp_path_factory.mktemp("phi3")
    twin = build("phi3", rope_parameters=dict(LONGROPE), original_max_position_embeddings=SWITCH, sliding_window=None)
    write_tokenizer(write("phi3", twin, directory))
    return twin, load_model(directory, context=512), Tokenizer.load(directory)


def request(ids, count, **kwargs):
    return Request.of(ids, where="test", temperature=0, max_tokens=count, ignore_eos=True, return_logits=True, **kwargs)


def check(twin, completion, prompt):
    """Every token's logits are those of the whole text before it, run at once."""
    ids = [*prompt, *(token.id for token in completion.tokens)]
    for at in range(len(prompt), len(ids)):
        want = truth(twin, torch.tensor([ids[:at]]))[0, -1]
        got = torch.as_tensor(completion.logits[at - len(prompt)])
        assert float((got - want).abs().max() / want.std()) < 5e-3, at


def test_short_long_and_across(pair):
    twin, model, tokenizer = pair
    assert model.rope_switch == SWITCH
    engine = Engine(model, tokenizer, model.cache_spec(8 * 256), context=512)
    try:
        text = ids_of(93, 1, 300, 4)[0].tolist()
        # side by side, and with equal beginnings: no page of a short sequence serves a long one
        prompts = [text[:40], text[:125], text[:128], text[:129], text[:290]]
        for prompt, handle in list(zip(prompts, engine.submit_many([request(p, 6) for p in prompts]))):
            check(twin, handle.result(), prompt)
        again = engine.submit(request(text[:290], 2)).result()
        assert again.timings.reused_tokens >= 256
        check(twin, again, text[:290])
        check(twin, engine.submit(request(text[:126], 8, speculation="ngram")).result(), text[:126])
    finally:
        engine.close()
    assert engine.pages.num_free == engine.pages.num_pages
