"""A widget as its page sees it: the messages that the page sends, the state that it gets, the file that it is exported to."""

import json
import re
import threading
from unittest.mock import patch


def tell(widget, message) -> None:
    """Deliver a message over the widget's comm. ipywidgets would only log an error of the receiver; here it is raised."""

    def again(*_args, **_kwargs):
        raise

    with patch.object(widget.log, "warning", again):
        widget.comm.handle_msg({"content": {"data": {"method": "custom", "content": message}}, "buffers": []})


def state(widget, name: str):
    """One synced trait as it travels to the page: tuples are lists."""
    return widget.get_state(name)[name]


def exported(widget) -> dict:
    """The traits that `to_html` writes into the page. NaN and infinity, which browsers cannot read, fail."""

    def refuse(constant):
        raise AssertionError(f"{type(widget).__name__} exports {constant}, which is no JSON")

    data = re.search(r'id="exl2nb-export">(.*?)</script>', widget.to_html(), re.DOTALL)[1]
    return json.loads(data, parse_constant=refuse)["state"]


def join_thread(owner: str) -> None:
    """Wait for the thread of a widget's work, if it runs. owner: as in the thread's name."""
    for thread in threading.enumerate():
        if thread.name == f"exl2nb-{owner}":
            thread.join(20)
            assert not thread.is_alive(), f"the thread of {owner} still runs after 20 s"
