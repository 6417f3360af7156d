"""WeightBrowser's Python half: true to the file, going elsewhere, bad places, the static twin."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import exl2nb
from exl2nb.core.errors import ModelNotFound, OptionError
from exl2nb.io.shards import TensorStore
from exl2nb.quant.exl2 import Exl2Tensors
from exl2nb.widgets import WeightBrowser
from tests.widgets.page import state, tell

QUANTISED = Path(__file__).parents[1] / "data" / "demo-exl2-4.0bpw"
ORIGINAL = Path(exl2nb.__file__).parent / "demo_model"


@pytest.fixture
def glass():
    widget = WeightBrowser(QUANTISED, ORIGINAL, layer=2, matrix="mlp.down_proj", column=17)
    yield widget
    widget.close()


@pytest.mark.parametrize(
    "place",
    [
        {"layer": 0, "matrix": "self_attn.q_proj", "group": 0, "column": 255},
        {"layer": 5, "matrix": "mlp.down_proj", "group": 23, "column": 0},
        {"layer": 3, "matrix": "mlp.gate_proj", "row": 100, "column": 700},
        {"layer": -1, "matrix": "lm_head", "group": 1, "unit": 3, "column": 4095},
    ],
)
def test_what_it_shows_is_what_reconstruct_says(glass, place):
    glass.look(**place)
    frame = glass.to_frame()
    with TensorStore(QUANTISED) as store, TensorStore(ORIGINAL) as original:
        read = Exl2Tensors.read(store, glass.key)
        name = f"{glass.key}.weight" if f"{glass.key}.weight" in original else "model.embed_tokens.weight"
        truth = original.read(name)[glass.column].float()
    rows = frame.row.tolist()
    assert torch.equal(torch.tensor(frame.weight.tolist()), read.reconstruct()[rows, glass.column].float())
    assert torch.equal(torch.tensor(frame.original.tolist()), truth[rows])
    assert frame.code.tolist() == read.codes()[frame.stored_row.tolist(), glass.column].tolist()
    assert (frame.error == frame.weight - frame.original).all()
    assert 0 < frame.error.abs().max() < 0.1


def test_a_row_is_found_and_followed(glass):
    glass.look(row=123)
    assert glass.to_frame().row[glass.value] == 123


def test_traits_go_there_and_bad_ones_change_nothing(glass):
    heard = []
    glass.on_look(lambda browser: heard.append(browser.group))
    glass.group = 5
    glass.column = 18
    assert state(glass, "_slice")["group"] == 5
    assert state(glass, "_slice")["column"] == 18
    assert heard == [5, 5]
    before = dict(state(glass, "_slice"))
    with pytest.raises(OptionError, match="group is 99; expected 0 to 23"):
        glass.group = 99
    with pytest.raises(OptionError, match="no EXL2 matrix 'x'; it has self_attn.q_proj"):
        glass.matrix = "x"
    with pytest.raises(OptionError, match="layer is 77"):
        glass.layer = 77
    assert (glass.group, glass.matrix, glass.layer) == (5, "mlp.down_proj", 2)
    assert state(glass, "_slice") == before


def test_the_page_cannot_go_outside(glass):
    message = {"type": "look", "layer": 2, "matrix": "mlp.down_proj", "group": 10**9, "unit": -5, "column": 10**9}
    tell(glass, message)
    assert (glass.group, glass.unit, glass.column, glass.status) == (23, 0, 255, "idle")
    tell(glass, {**message, "matrix": "no such"})
    assert (glass.matrix, glass.status) == ("self_attn.q_proj", "idle")
    tell(glass, {**message, "layer": 99})
    assert glass.status == "error"
    assert "layer is 99" in glass.error
    tell(glass, {**message, "group": "1"})
    assert "an invalid place" in glass.error
    glass.look(column=1)
    assert (glass.status, glass.error) == ("idle", "")


def test_sources():
    with WeightBrowser(SimpleNamespace(path=QUANTISED, source=ORIGINAL)).weights as known:
        assert known.has_original
    with WeightBrowser(QUANTISED).weights as alone:
        assert not alone.has_original
    with pytest.raises(OptionError, match="found matrices in float16, expected EXL2 ones"):
        WeightBrowser(ORIGINAL)
    with pytest.raises(OptionError, match="is an EXL2 model too"):
        WeightBrowser(QUANTISED, QUANTISED)
    with pytest.raises(OptionError, match="got 'int'"):
        WeightBrowser(3)
    with pytest.raises(ModelNotFound):
        WeightBrowser("/no/such/folder")


def test_without_an_original_nothing_is_made_up():
    glass = WeightBrowser(QUANTISED)
    assert state(glass, "_slice")["original"] == []
    assert glass.to_frame().error.isna().all()
    assert "original" not in glass._repr_mimebundle_()[0]["text/html"]
    glass.close()


def test_static_twin_and_export(glass, tmp_path):
    data, _ = glass._repr_mimebundle_()
    assert "<script" not in data["text/html"]
    assert f"{state(glass, '_slice')['words'][0]:08X}" in data["text/html"]
    assert data["text/plain"] == "WeightBrowser(model.layers.2.mlp.down_proj: group 0, rows 0 to 31, column 17, 8 bits)"
    glass.to_html(tmp_path / "weights.html")
    assert (tmp_path / "weights.html").stat().st_size < 200_000
    json.dumps(state(glass, "_slice"), allow_nan=False)
