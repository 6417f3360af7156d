"""llm.trace and llm.patch on the demo model: what a notebook sees, beside running requests, across bitrates."""

from pathlib import Path

import pytest
import torch

import exl2nb as ex
from exl2nb.core.errors import EngineClosed, OptionError

EXL2 = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"
TEXT = "It was a dark night, and the old man walked to the river."


@pytest.fixture(scope="module")
def low():
    with ex.load(EXL2, progress=None) as model:
        yield model


def test_a_trace_reads_as_a_mapping_and_as_plain_text(llm, device, near):
    found = llm.trace(TEXT, ["blocks.*.hook_resid_post", "blocks.0.attn.hook_pattern"])
    assert "".join(found.texts) == TEXT and len(found) == 13 and found.logits.shape == (1, 4096)
    assert repr(found).startswith(f"Trace({len(found.ids)} tokens of demo_model, 13 tensors, ")
    assert "blocks.0.attn.hook_pattern" in found._repr_html_() and "<script" not in found._repr_html_()
    frame = found.to_frame()
    assert list(frame.name) == list(found) and frame["max"].gt(0).all()
    lens = found.lens(11)[-1:]
    assert torch.equal(lens, found.logits) if device == "cpu" else torch.allclose(lens, found.logits, atol=near)
    with pytest.raises(KeyError, match=r"hook_embed' was not captured; this trace has blocks.0.attn"):
        found["hook_embed"]
    with pytest.raises(OptionError, match="capture=\\['blocks.3.hook_resid_mid'\\]"):
        found.lens(3, "hook_resid_mid")
    with pytest.raises(OptionError, match="capture 'logits' in both"):
        found.kl(llm.trace(TEXT, "logits"))
    assert llm.trace_points[0] == "hook_embed" and llm.trace_points[-1] == "logits"


def test_the_logits_are_those_of_score(llm, device, near):
    found, scored = llm.trace(TEXT, "logits"), llm.score(TEXT)
    logprobs = found.logits.log_softmax(-1)
    for at, token in enumerate(scored.tokens[1:]):
        assert float(logprobs[at, token.id]) == pytest.approx(token.logprob, abs=1e-5 if device == "cpu" else near)


def test_layers_of_another_bitrate(llm, low):
    """A layer that runs with the weights of the dense model; with all of them only the head is left."""
    want = llm.trace(TEXT, "logits")
    loss = float(want.kl(low.trace(TEXT, "logits")).mean())
    some = [float(want.kl(low.trace(TEXT, "logits", patch={f"blocks.{i}": llm})).mean()) for i in (1, 3)]
    with low.patch({f"blocks.{i}": llm for i in range(12)}) as patched:
        rest = float(want.kl(patched.trace(TEXT, "logits")).mean())
        assert repr(patched).startswith("Patched(demo-exl2-4.0bpw: blocks.0, blocks.1")
    assert max(some) < loss and rest < 0.01 * loss


def test_requests_beside_a_patch_keep_their_bits(fresh_llm):
    llm, options = fresh_llm, {"max_tokens": 40, "seed": 5, "top_logprobs": 2}
    alone = llm.generate(TEXT, **options)
    llm.cache.clear()
    handle = llm.stream(TEXT, **options)
    with llm.patch({"blocks.*.hook_mlp_out": 0.0}) as patched:
        broken = [patched.trace(TEXT, "logits").logits for _ in range(3)]
        text = patched.generate(TEXT, max_tokens=4)
    beside = handle.result()
    assert beside.text == alone.text != text
    assert [token.logprob for token in beside.tokens] == [token.logprob for token in alone.tokens]
    assert torch.equal(broken[0], broken[2]) and not torch.equal(broken[0], llm.trace(TEXT, "logits").logits)


def test_a_patch_ends_with_its_block_and_refuses(llm):
    with llm.patch({}) as patched:
        assert patched.generate(TEXT, max_tokens=8) == llm.generate(TEXT, max_tokens=8, temperature=0).text
    with pytest.raises(EngineClosed, match="this with block has ended"):
        patched.trace(TEXT)
    for patch, message in [
        ({"blocks.0.nothing": 0}, "patch: no point 'blocks.0.nothing'"),
        ({"hook_embed": llm}, "is given a model; expected the name of a layer"),
        ([1], "expected a mapping of names"),
    ]:
        with pytest.raises(OptionError, match=message):
            llm.patch(patch)


def test_an_error_in_a_function_comes_out_and_the_model_goes_on(llm):
    def fail(value, hook):
        raise KeyError(hook.name)

    with pytest.raises(KeyError, match="blocks.2.hook_attn_out"):
        llm.trace(TEXT, patch={"blocks.2.hook_attn_out": fail})
    assert len(llm.trace(TEXT)) == 12
