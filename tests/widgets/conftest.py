import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for fakes.py: pytest's importlib mode leaves the path alone


@pytest.fixture(scope="session")
def measurement():
    import exl2nb as ex

    return ex.demo_measurement()


@pytest.fixture
def sent(monkeypatch):
    """Messages that widgets send to the page, in order."""
    import ipywidgets

    messages = []
    monkeypatch.setattr(ipywidgets.Widget, "send", lambda self, content, buffers=None: messages.append(content))
    return messages
