"""Numbers, batching, snapshots; a model of the browser replays what was sent, with losses."""

import random
import threading

from exl2nb.widgets.feed import FLUSH_S, Feed


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def make():
    sent, clock = [], Clock()
    return Feed(sent.append, clock=clock), sent, clock


def replay(messages):
    """What a page shows after `messages`, and whether it would ask for a snapshot."""
    items, run, seq, hole = [], -1, -1, False
    for m in messages:
        if m["type"] == "snapshot":
            items, run, seq, hole = list(m["items"]), m["run"], m["seq"], False
        elif m["type"] == "delta" and (m["run"], m["seq"]) == (run, seq + 1):
            items, seq = items + m["items"], seq + 1
        elif m["type"] == "delta" and m["run"] == run and m["seq"] <= seq:
            continue
        elif m["type"] == "delta" or (m["run"], m["seq"]) != (run, seq):
            hole = True
    return items, hole


def test_at_most_thirty_deltas_a_second():
    feed, sent, clock = make()
    feed.begin("p")
    for i in range(2000):  # one second at 2,000 tokens per second
        clock.now += 1 / 2000
        feed.add([i])
    feed.finish("done")
    deltas = [m for m in sent if m["type"] == "delta"]
    assert len(deltas) <= 1 / FLUSH_S + 2
    assert [m["seq"] for m in deltas] == list(range(len(deltas)))
    assert replay(sent) == (list(range(2000)), False)


def test_a_slow_source_sends_each_item_at_once():
    feed, sent, clock = make()
    feed.begin()
    for i in range(5):
        clock.now += 1
        feed.add([i])
        assert sent[-1]["items"] == [i]


def test_stats():
    feed, _, clock = make()
    feed.begin()
    assert feed.stats == {"n": 0, "tps": 0.0, "ttft_s": None}
    clock.now += 0.5
    feed.add(["a"])
    for _ in range(10):
        clock.now += 0.1
        feed.add(["b"])
    assert feed.stats == {"n": 11, "tps": 10.0, "ttft_s": 0.5}


def test_a_page_that_lost_any_messages_is_whole_after_one_snapshot():
    rng = random.Random(0)
    for _ in range(200):
        feed, sent, clock = make()
        feed.begin()
        for i in range(30):
            clock.now += rng.choice([0.001, 0.05])
            feed.add([i])
            if rng.random() < 0.1:
                feed.snapshot()
        feed.finish("done")
        arrived = [m for m in sent if rng.random() < 0.8]
        items, hole = replay(arrived)
        if not hole and arrived and arrived[-1]["type"] == "done":
            assert items == list(range(30)), "a loss nobody noticed"
        feed.snapshot()
        assert replay([*arrived, sent[-1]])[0] == list(range(30))


def test_deltas_are_brief_and_snapshots_whole():
    sent = []
    feed = Feed(sent.append, brief=lambda items: [-i for i in items], whole=lambda items: [10 * i for i in items])
    feed.begin()
    feed.add([1, 2])
    assert (feed.at(1, 1), feed.at(1, 2), feed.at(2, 0), feed.at(1, None)) == (2, None, None, None)
    feed.snapshot()
    assert feed.finish("done", speed=(12.345, 0.5)) == {"n": 2, "tps": 12.35, "ttft_s": 0.5}
    assert [m["items"] for m in sent if "items" in m] == [[], [-1, -2], [10, 20]]
    assert feed.items == [10, 20], "made once, at the end"


def test_runs_are_told_apart():
    feed, sent, _ = make()
    feed.begin("one")
    feed.add([1])
    feed.begin("two")
    assert (sent[-1]["run"], sent[-1]["items"], sent[-1]["prompt"]) == (2, [], "two")
    assert feed.items == []


def test_many_threads_keep_the_order():
    feed, sent, _ = make()
    feed.begin()
    snapshots = [threading.Thread(target=feed.snapshot) for _ in range(20)]
    writer = threading.Thread(target=lambda: [feed.add([i]) for i in range(500)])
    for thread in (writer, *snapshots):
        thread.start()
    for thread in (writer, *snapshots):
        thread.join()
    feed.finish("done")
    assert replay(sent) == (list(range(500)), False)
