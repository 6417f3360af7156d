"""What models declare that they can do: on the CPU, split, streamed and as ranks; and that others cannot ask for the rest."""

from pathlib import Path

import pytest

import exl2nb as ex
from exl2nb.core.errors import OptionError
from exl2nb.model.loader import load_model
from exl2nb.model.model import LayerRange
from exl2nb.model.parallel import load_parallel
from exl2nb.model.runner import GPU_CHUNKS, HOST_CHUNKS, Capabilities
from exl2nb.ops.placement import Placement

from .zoo import build, write

DEMO = Path(ex.__file__).parent / "demo_model"


def test_a_model_on_the_cpu():
    model = load_model(DEMO)
    can = model.capabilities
    assert can == Capabilities(placement=Placement.on("cpu", 12), fused_draw=True, draws_ahead=True)
    assert can.chunks is HOST_CHUNKS and not can.captures
    assert model.new_cache(model.cache_spec(256)).placement == can.placement
    can.require("adapters")


def test_a_split_model_draws_on_the_host_and_refuses_by_name():
    model = load_model(DEMO, spans=[LayerRange("cpu", 0, 5), LayerRange("cpu", 5, 12)])
    can = model.capabilities
    assert can.placement == Placement.on("cpu", 12)
    assert can.fused_draw and not can.draws_ahead and not can.captures_drafts
    words = r"the model is split \(layers 0 to 4 on cpu, layers 5 to 11 on cpu\), which this does not know yet; load it on one device"
    for feature, call in (
        ("adapters", lambda: model.network_and_program),
        ("adapters", lambda: model.set_adapters([])),
        ("trace and patch", lambda: model.layer(0, 1)),
    ):
        with pytest.raises(OptionError, match=f"^{feature}: {words}"):
            call()


def test_ranks_refuse_what_needs_the_whole_model(tmp_path):
    model = load_parallel(write("llama", build("llama"), tmp_path), ["cpu", "cpu"], context=None)
    try:
        assert not (model.capabilities.fused_draw or model.capabilities.draws_ahead or model.capabilities.captures)
        for feature, call in (
            ("hidden states", lambda: model.forward_by_ops(None, None)),
            ("trace and patch", lambda: model.trace(None, None)),
            ("trace and patch", lambda: model.layer(0, 1)),
            ("matrices", lambda: model.matrix(0, "qkv")),
            ("the logit lens", lambda: model.unembed(None)),
            ("adapters", lambda: model.set_adapters([])),
        ):
            with pytest.raises(OptionError, match=f"^{feature}: the model runs as 2 ranks, which this does not know yet"):
                call()
    finally:
        model.close()


def test_chunk_policies():
    assert (HOST_CHUNKS.max_tokens, GPU_CHUNKS.max_tokens) == (512, 2048)
    assert HOST_CHUNKS.timed and not GPU_CHUNKS.timed
