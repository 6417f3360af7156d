"""Interrupts, stops and cancels at random moments of generate, stream, convert, load and the Playground: no page lost, answers right."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from .test_conversion_job import TEXT, write_model

SCRIPT = textwrap.dedent(
    '''
    import collections, gc, random, shutil, sys, threading, time
    from pathlib import Path
    sys.path.insert(0, sys.argv[6])
    import ctrl_c
    import exl2nb as ex
    from exl2nb.core.errors import Interrupted
    from exl2nb.widgets import Playground

    source, work, text, times, seed = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
    chance = random.Random(seed)
    presser = ctrl_c.Presser(chance)
    Playground.send = lambda self, content, buffers=None: None
    llm = ex.demo(cache_tokens=2048, progress=None)
    engine, options = llm.engine, dict(temperature=0, max_tokens=900, ignore_eos=True)
    right = llm.generate("The old man", max_tokens=12, temperature=0).text
    with ex.load(source, progress=None) as tiny:
        right_tiny = tiny.generate([5, 6, 7], max_tokens=6, temperature=0, ignore_eos=True).text
    play = Playground(llm, prompt="It was", max_tokens=900)
    threads, prompts, counts = threading.active_count(), ["It was", "He " * 120, "The rain " * 250], collections.Counter()

    def interrupted(what, span, work):
        counts[what if presser.interrupt(span, work) else what + ", too late"] += 1

    def read(prompt):
        for _ in llm.stream(prompt, **options):
            pass

    def load():
        with ex.load(source, progress=None) as one:
            assert one.generate([5, 6, 7], max_tokens=6, temperature=0, ignore_eos=True).text == right_tiny

    def job():
        return ex.ConversionJob(source, work / "out", bpw=4.0, calibration=[text], rows=6, length=32)

    def converted():
        """A conversion that came to its end is whole; the next one starts anew."""
        if (work / "out" / "config.json").exists():
            with ex.load(work / "out", progress=None) as one:
                one.generate([5, 6, 7], max_tokens=2)
            counts["converted"] += 1
            shutil.rmtree(work / "out")

    def stop_playing(i):
        play.start(chance.choice(prompts))
        time.sleep(chance.random() * 0.05)
        play._dispatch(None, {"type": "stop"}, [])
        play.wait(20)
        assert play.status in ("stopped", "done"), (play.status, play.error)
        counts["stop"] += 1

    def cancel_converting(i):
        one = job()
        timer = threading.Timer(chance.random() * 0.4, one.cancel)
        timer.start()
        try:
            one.run()
        except Interrupted:
            counts["cancel of a conversion"] += 1
        timer.cancel()
        timer.join()
        converted()

    def cancel(i):
        handle = llm.stream(chance.choice(prompts), **options)
        time.sleep(chance.random() * 0.02)
        handle.cancel()
        handle.result()
        counts["cancel"] += 1

    def abandon(i):
        stream = iter(llm.stream(chance.choice(prompts), **options))
        for _ in range(chance.randrange(3)):
            next(stream)
        del stream
        counts["abandon"] += 1

    def play_interrupted():
        play.start("It was")
        play.wait()

    def interrupt_playing(i):
        interrupted("interrupt of the playground", 0.05, play_interrupted)
        play.stop()
        play.wait(20)

    def interrupt_converting(i):
        interrupted("interrupt of convert", 0.4, lambda: job().run())
        converted()

    ways = [
        lambda i: interrupted("interrupt of generate", 0.03, lambda: llm.generate(chance.choice(prompts), **options)),
        lambda i: interrupted("interrupt of stream", 0.03, lambda: read(chance.choice(prompts))),
        lambda i: interrupted("interrupt of a batch", 0.03, lambda: llm.generate([*prompts[:2], "She said"], **options)),
        lambda i: interrupted("interrupt of load", 0.1, load),
        interrupt_converting, interrupt_playing, stop_playing, cancel_converting, cancel, abandon,
    ]

    begun = time.monotonic()
    for i in range(times):
        ways[i % len(ways)](i)
        if i % 10 == 9:
            gc.collect()
            assert engine.wait_idle(30), "still busy"
            assert engine.pages.num_free == engine.pages.num_pages, f"pages leaked: {engine.pages.num_free} of {engine.pages.num_pages}"
            assert llm.generate("The old man", max_tokens=12, temperature=0).text == right, "wrong answer"
    load()
    job().run()
    converted()
    play.close()
    llm.close()
    deadline = time.monotonic() + 5
    while threading.active_count() > threads - 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= threads, threading.enumerate()
    counts["pressed again"], counts["seconds"] = presser.again, round(time.monotonic() - begun)
    print(dict(counts))
    '''
)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("times", "seed"), [(30, 0), pytest.param(1000, 1, marks=pytest.mark.slow)])
def test_interrupts_and_cancels_at_random_moments(tmp_path, times, seed):
    source = write_model(tmp_path / "tiny")
    command = [sys.executable, "-c", SCRIPT, str(source), str(tmp_path), TEXT[0], str(times), str(seed), str(Path(__file__).parents[1])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60 + 3 * times)
    assert result.returncode == 0, result.stderr[-3000:]
    counts = ast.literal_eval(result.stdout.splitlines()[-1])
    hits = sum(n for what, n in counts.items() if what.startswith(("interrupt", "stop", "cancel", "abandon")) and not what.endswith("late"))
    late = sum(n for what, n in counts.items() if what.endswith("late"))
    assert counts["converted"] >= 1, "the conversion after all interrupts must come to its end"
    assert hits >= 0.6 * times, counts
    assert hits + late >= 0.85 * times, counts  # a conversion that ends before its cancel counts nowhere
    assert counts["pressed again"] <= 3 + times // 50, counts
