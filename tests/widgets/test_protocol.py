"""The types on both sides of the wire are the same ones."""

import gc
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from exl2nb import widgets
from exl2nb.generator.speculation import AdaptiveLength
from exl2nb.generator.speculation import Speculation as Settings
from exl2nb.widgets import (
    AttentionView,
    BitMap,
    BitrateExplorer,
    CacheExplorer,
    Compare,
    ErrorFlow,
    LayerLens,
    LoraExplorer,
    OutlierMap,
    PageTable,
    Playground,
    ProgressView,
    SamplerMicroscope,
    ServerMonitor,
    Speculation,
    WeightBrowser,
    WeightHistogram,
    protocol,
    typescript,
)
from tests.widgets.page import tell

WIDGETS = Path(__file__).parents[2] / "widgets"
DATA = Path(__file__).parents[1] / "data"
ANSWER = SimpleNamespace(tokens=(), prompt="", tokens_per_second=0.0, text="", speculation=AdaptiveLength(Settings()).acceptance("ngram"))


def test_committed_typescript_is_what_python_generates():
    for name, text in (("protocol", typescript.typescript()), ("constants", typescript.typescript_constants())):
        committed = (WIDGETS / "src" / f"{name}.gen.ts").read_text(encoding="utf-8")
        assert committed == text, f"{name}.gen.ts is stale: run `npm run protocol` in widgets/ and commit"


@pytest.mark.parametrize("name", [name for name in widgets.__all__ if name != "ExlWidget"])
def test_state_types_name_the_synced_traits(name):
    import anywidget

    kind = getattr(widgets, name)
    ours = kind.class_traits(sync=True).keys() - anywidget.AnyWidget.class_traits(sync=True).keys()
    controls = {one["name"] for one in protocol.SAMPLER_FIELDS} if kind is Playground else set()
    declared = typescript.state_types()[name]
    assert set(declared.__annotations__) | controls == ours, f"{declared.__name__} and the traits of {name} differ"


MADE = [
    Playground,
    ProgressView,
    partial(BitMap, [{"key": "a", "bpw": 4.0}]),
    BitrateExplorer,
    CacheExplorer,
    Compare,
    partial(PageTable, {"pages": [], "requests": [], "page_size": 256, "evictions": 0, "preemptions": 0}),
    partial(SamplerMicroscope, np.zeros(4, np.float32)),
    partial(ServerMonitor, {}),
    partial(Speculation, ANSWER),
    partial(ErrorFlow, result={}),
    partial(LayerLens, result={}),
    partial(LoraExplorer, result={}),
    partial(AttentionView, result={"patterns": []}),
    partial(OutlierMap, result={}),
    partial(WeightHistogram, DATA / "demo-exl2-4.0bpw"),
    partial(WeightBrowser, DATA / "demo-exl2-4.0bpw"),
]


def test_closed_widgets_are_freed():
    left = []
    for widget in MADE:
        made = widget()
        made.close()
        left.append(weakref.ref(made))
        del made
    gc.collect()
    assert [one() for one in left] == [None] * len(MADE)


def test_a_closed_widget_of_a_model_is_freed(llm):
    def used():
        made = Playground(llm)
        made.max_tokens = 3
        tell(made, {"type": "generate", "run": 1, "prompt": "It was", "settings": {}})
        made.wait(60)
        made.close()
        table = PageTable(llm, period_s=0.05)
        table.start()
        table.stop()
        table.wait(60)
        table.close()
        return weakref.ref(made), weakref.ref(table)

    left = used()
    gc.collect()
    assert [one() for one in left] == [None, None]


def test_declarations():
    text = typescript.typescript()
    assert (
        "export type TokenItem = [text: string, id: number, prob: number | null, rank: number | null, top: Alternative[] | null];" in text
    )
    assert '  type: "delta";\n  run: number;' in text
    assert "export type FromKernel = Delta | Snapshot | Done | Pong | Tops | Fates;" in text
    assert "export type ToKernel = LookAt | LookInto | Ready | Resync | Ping | Stop | Generate" in text
    with pytest.raises(TypeError, match="no TypeScript spelling"):
        typescript.spelling(set[int], {})
