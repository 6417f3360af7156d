"""BitMap's Python half: cells from every kind of source, experts folded, the static twin."""

from pathlib import Path

import pytest

from exl2nb.core.errors import OptionError
from exl2nb.widgets import BitMap, BitrateExplorer, ProgressView, WeightBrowser, WeightHistogram, bitgrid
from tests.widgets.page import state

EXL2 = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"


def matrix(key: str, bpw: float, **more):
    return {"key": key, "bpw": bpw, "in_features": 64, "out_features": 64, **more}


PLAIN = [
    matrix("model.layers.0.self_attn.q_proj", 5.0, groups=[(6, 32), (4, 32)], share=0.3),
    matrix("model.layers.1.self_attn.q_proj", 3.0, groups=[(3, 32), (3, 32)], share=0.5),
    matrix("lm_head", 6.0, groups=[(6, 64)], share=0.2),
]


def test_a_plan_is_a_map_of_bits_and_shares(measurement):
    plan = measurement.solve(bpw=3.5)
    shown = BitMap(plan)
    assert shown.grid.metrics == ("bpw", "share")
    frame = shown.to_frame()
    assert len(frame) == len(plan.choices)
    assert frame.share.sum() == pytest.approx(1, abs=1e-3)
    for cell, choice in zip(shown.grid.cells, plan.choices):
        assert cell.bpw == pytest.approx(choice.bpw, abs=1e-4)
        assert sum(run.rows * run.groups for run in cell.parts[0].runs) == choice.in_features
        assert sum(run.rows * run.groups * run.bits for run in cell.parts[0].runs) == sum(b * r for b, r in choice.groups)
    assert shown.grid.bpw == pytest.approx(plan.bpw, abs=0.05)
    assert BitMap(plan.to_dict()).grid.cells == shown.grid.cells, "the same from plain data"


def test_headers_of_a_directory(llm):
    shown = BitMap(llm.path)
    assert {cell.parts[0].format for cell in shown.grid.cells} == {"float16"}
    assert {"q", "down", "embedding"} <= set(shown.grid.matrices)
    assert shown.grid.layers == tuple(range(llm.config.num_layers))


def test_experts_of_a_layer_are_one_cell():
    key = "model.layers.0.block_sparse_moe.experts.{}.w1"
    grid = bitgrid.grid_of([matrix(key.format(i), 2.0 + i % 2) for i in range(40)])
    (cell,) = grid.cells
    assert (cell.matrix, cell.experts, cell.bpw) == ("gate (experts)", 40, 2.5)
    assert len(cell.parts) == bitgrid.PARTS_SHOWN
    assert cell.parts[3].name == "expert 3"


def test_traits_choice_and_difference():
    shown, heard = BitMap(PLAIN, other=[matrix("model.layers.0.self_attn.q_proj", 4.0)], metric="difference"), []
    assert state(shown, "_other") == [4.0, None, None]
    assert state(shown, "_metrics") == ["bpw", "share", "difference"]
    shown.on_select(heard.append)
    shown.select(1, "q")
    assert (shown.selected, heard) == ([1, "q"], [[1, "q"]])
    with pytest.raises(OptionError, match="no matrix 'up' in layer 1"):
        shown.select(1, "up")
    assert repr(shown) == "BitMap(3 cells, 4.00 bits per weight, 3.0 to 5.0)"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (3, "got 'int'"),
        ([], "expected a model directory"),
        ([{"key": "a", "bpw": 0}], "bpw 0"),
        ([{"key": "a", "bpw": float("nan")}], "bpw nan"),
        ([matrix("a", 3.0, groups=[("x", 1)])], "expected .bits, rows. for each group"),
        ([matrix("a", 3.0, groups=[(99, 1)])], "1 to 16 bits"),
    ],
)
def test_bad_sources_are_named(source, message):
    with pytest.raises(OptionError, match=message):
        BitMap(source)


def test_unknown_metric():
    with pytest.raises(OptionError, match="expected one of bpw, share"):
        BitMap(PLAIN, metric="error")


def test_static_twin_and_export(tmp_path):
    nasty = matrix("model.layers.0.<script>alert(1)</script>", 4.0)
    shown = BitMap([*PLAIN, nasty], title="<img src=x>")
    data, _ = shown._repr_mimebundle_()
    assert "<script" not in data["text/html"]
    assert "<img" not in data["text/html"]
    assert "1 group of 6 bits, 1 of 4" in data["text/html"]
    assert data["text/plain"].startswith("BitMap(")
    shown.to_html(tmp_path / "map.html")
    page = (tmp_path / "map.html").read_text()
    assert len(page) < 200_000
    assert "https://" not in page.replace("https://www.w3.org", "")
    assert "<script>alert" not in page


def test_a_large_model_stays_small():
    names = [
        f"model.layers.{i}.mlp.{m}"
        for i in range(80)
        for m in ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj")
    ]
    shown = BitMap([matrix(name, 4.0, groups=[(6, 32)] * 20 + [(4, 32)] * 236) for name in names])
    assert len(shown.to_html() or "") < 200_000
    assert bitgrid.summary(shown.grid).startswith("560 cells")


def test_a_chosen_cell_opens_in_linked_widgets(measurement):
    """In the weight browser the matrix, in the explorer the same cell, and back."""
    browser, explorer, histogram = WeightBrowser(EXL2), BitrateExplorer(measurement), WeightHistogram(EXL2)
    shown = BitMap(EXL2).link(browser, explorer, histogram)
    shown.select(3, "down")
    assert (histogram.layer, histogram.matrix) == (3, "mlp.down_proj")
    assert (browser.layer, browser.matrix, browser.key) == (3, "mlp.down_proj", "model.layers.3.mlp.down_proj")
    assert explorer.selected == [3, "down"]
    explorer.selected = [1, "k"]
    assert shown.selected == [1, "k"] and browser.matrix == "self_attn.k_proj"
    shown.select(-1, "embedding")  # is not quantised: the browser stays
    assert browser.matrix == "self_attn.k_proj"
    shown.select(None)
    assert explorer.selected == []
    with pytest.raises(OptionError, match="BitMap.link: got 'ProgressView'"):
        shown.link(ProgressView())
    browser.close()
