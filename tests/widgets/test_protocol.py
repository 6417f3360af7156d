"""The types on both sides of the wire are the same ones."""

import gc
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from exl2nb.generator.speculation import AdaptiveLength
from exl2nb.generator.speculation import Speculation as Settings
from exl2nb.widgets import protocol, typescript
from exl2nb.widgets.attention import AttentionView
from exl2nb.widgets.bitmap import BitMap
from exl2nb.widgets.caches import CacheExplorer
from exl2nb.widgets.compare import Compare
from exl2nb.widgets.errorflow import ErrorFlow
from exl2nb.widgets.explorer import BitrateExplorer
from exl2nb.widgets.histogram import WeightHistogram
from exl2nb.widgets.layerlens import LayerLens
from exl2nb.widgets.lora import LoraExplorer
from exl2nb.widgets.microscope import SamplerMicroscope
from exl2nb.widgets.outliers import OutlierMap
from exl2nb.widgets.pagetable import PageTable
from exl2nb.widgets.playground import Playground
from exl2nb.widgets.progress import ProgressView
from exl2nb.widgets.servermonitor import ServerMonitor
from exl2nb.widgets.speculation import Speculation
from exl2nb.widgets.weights import WeightBrowser
from tests.widgets.page import tell

WIDGETS = Path(__file__).parents[2] / "widgets"
DATA = Path(__file__).parents[1] / "data"
ANSWER = SimpleNamespace(tokens=(), prompt="", tokens_per_second=0.0, text="", speculation=AdaptiveLength(Settings()).acceptance("ngram"))


def test_committed_typescript_is_what_python_generates():
    assert (WIDGETS / "src" / "protocol.gen.ts").read_text() == protocol.typescript(), "run `npm run protocol` in widgets/ and commit"


STATES = [
    (Playground, protocol.PlaygroundState),
    (ProgressView, protocol.ProgressState),
    (partial(BitMap, [{"key": "a", "bpw": 4.0}]), protocol.BitMapState),
    (BitrateExplorer, protocol.ExplorerState),
    (CacheExplorer, protocol.CachesState),
    (Compare, protocol.CompareState),
    (partial(PageTable, {"pages": [], "requests": [], "page_size": 256, "evictions": 0, "preemptions": 0}), protocol.PageTableState),
    (partial(SamplerMicroscope, np.zeros(4, np.float32)), protocol.MicroscopeState),
    (partial(ServerMonitor, {}), protocol.ServerMonitorState),
    (partial(Speculation, ANSWER), protocol.SpeculationState),
    (partial(ErrorFlow, result={}), protocol.ErrorFlowState),
    (partial(LayerLens, result={}), protocol.LayerLensState),
    (partial(LoraExplorer, result={}), protocol.LoraExplorerState),
    (partial(AttentionView, result={"patterns": []}), protocol.AttentionViewState),
    (partial(OutlierMap, result={}), protocol.OutlierMapState),
    (partial(WeightHistogram, DATA / "demo-exl2-4.0bpw"), protocol.WeightHistogramState),
    (partial(WeightBrowser, DATA / "demo-exl2-4.0bpw"), protocol.WeightsState),
]


@pytest.mark.parametrize(("widget", "state"), STATES)
def test_state_types_name_the_synced_traits(widget, state):
    import anywidget

    ours = set(widget().keys) - set(anywidget.AnyWidget().keys) - {"_esm", "_css"}
    controls = {one["name"] for one in protocol.SAMPLERS} if state is protocol.PlaygroundState else set()
    assert set(state.__annotations__) | controls == ours


@pytest.mark.parametrize("widget", [widget for widget, _ in STATES])
def test_a_closed_widget_is_freed(widget):
    made = widget()
    made.close()
    left = weakref.ref(made)
    del made
    gc.collect()
    assert left() is None


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
    text = protocol.typescript()
    assert (
        "export type TokenItem = [text: string, id: number, prob: number | null, rank: number | null, top: Alternative[] | null];" in text
    )
    assert '  type: "delta";\n  run: number;' in text
    assert "export type FromKernel = Delta | Snapshot | Done | Pong | Tops | Fates;" in text
    with pytest.raises(TypeError, match="no TypeScript spelling"):
        typescript.spelling(set[int], {})
