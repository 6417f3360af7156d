"""Trial without a page: a message counts, and the bundle is there."""

from exl2nb.widgets import Trial


def test_a_message_counts():
    trial = Trial(count=3)
    trial._dispatch(None, {"type": "count_up", "by": 2}, [])
    assert (trial.count, trial.error) == (5, ""), "the message did not raise the count"
    assert "count_up" in str(trial._esm) and ".exl2nb-trial" in str(trial._css)
    assert '"count": 5' in trial.to_html() and "Trial(5)" in trial.to_html()
