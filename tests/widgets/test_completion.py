"""Tab in a notebook: options of calls and of widgets, and nothing but ours in `dir` of a widget."""

import pytest
from fakes import FakeModel
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import exl2nb
from exl2nb import widgets as w


@pytest.mark.parametrize("jedi", [True, False])
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("LLM.generate('a', temp", {"temperature=", "temperature_last=", "temp_exponent="}),
        ("LLM.chat('a', templ", {"template=", "template_options="}),
        ("w.Playground(None, max_t", {"max_tokens=", "max_temp="}),
        ("w.SamplerMicroscope(x, top_", {"top_k=", "top_p=", "top_a="}),
        ("w.BitMap(x, metr", {"metric="}),
        ("ex.convert('a', 'b', calib", {"calibration="}),
        ("ex.measure('a', eff", {"effort="}),
    ],
)
def test_options_complete(jedi, code, expected):
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell(config=config)
    shell.Completer.use_jedi = jedi
    shell.user_ns.update(ex=exl2nb, w=w, LLM=exl2nb.LLM)
    with provisionalcompleter():
        found = {one.text for one in shell.Completer.completions(code, len(code))}
    shell.history_manager.end_session()
    assert {one for one in found if one.endswith("=")} == expected


def test_dir_lists_what_is_ours():
    play = w.Playground(FakeModel())
    names = [name for name in dir(play) if not name.startswith("__")]
    assert {"start", "stop", "wait", "temperature", "to_html", "observe", "close"} <= set(names)
    assert not {"comm", "keys", "trait_names", "send_state", "cross_validation_lock", "_dispatch"} & set(names)
    assert all(hasattr(type(play), name) or name in vars(play) for name in names)
    assert callable(play.trait_names), "what is not listed still works"
