"""KeyboardInterrupt, as the notebook's stop button sends it, at random moments on the real demo model."""

import subprocess
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).parent

SCRIPT = textwrap.dedent(
    """
    import gc, random, sys, threading, time
    sys.path.insert(0, sys.argv[1])
    import ctrl_c
    import exl2nb as ex

    chance = random.Random(1)
    threads = threading.active_count()
    llm = ex.demo(cache_tokens=2048)
    engine, options = llm.engine, dict(temperature=0, max_tokens=900, ignore_eos=True)
    right = llm.generate("The old man", max_tokens=12, temperature=0).text
    prompts = ["It was", "He " * 120, "The rain " * 250]
    counts = dict(interrupt=0, abandon=0, cancel=0)
    presser = ctrl_c.Presser(chance)

    def interrupted(work):
        counts["interrupt"] += presser.interrupt(0.03, work)

    def read(prompt):
        for _ in llm.stream(prompt, **options):
            pass

    for i in range(100):
        prompt, way = chance.choice(prompts), i % 5
        if way == 0:
            interrupted(lambda: llm.generate(prompt, **options))
        elif way == 1:
            interrupted(lambda: read(prompt))
        elif way == 2:
            interrupted(lambda: llm.generate([prompt, "It was", "She said"], **options))
        elif way == 3:
            stream = iter(llm.stream(prompt, **options))
            for _ in range(chance.randrange(3)):
                next(stream)
            del stream
            counts["abandon"] += 1
        else:
            handle = llm.stream(prompt, **options)
            time.sleep(chance.random() * 0.02)
            handle.cancel()
            handle.result()
            counts["cancel"] += 1
        if i % 20 == 19:
            gc.collect()
            assert engine.wait_idle(30), "still busy"
            assert engine.pages.num_free == engine.pages.num_pages, "pages leaked"
            assert llm.generate("The old man", max_tokens=12, temperature=0).text == right, "wrong answer"
    llm.close()
    del interrupted
    time.sleep(0.1)
    assert threading.active_count() == threads, threading.enumerate()
    assert presser.again <= 3, presser.again
    print(counts)
    """
)


def test_a_hundred_interrupts():
    result = subprocess.run([sys.executable, "-c", SCRIPT, str(HERE.parent)], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    counts = eval(result.stdout)
    assert counts["interrupt"] >= 58  # of 60: one inside a destructor is swallowed by Python itself and comes too late
    assert (counts["abandon"], counts["cancel"]) == (20, 20)


PREAMBLE = """
import atexit, sys, threading, time, _thread
sys.path.insert(0, sys.argv[1])
import fakes
"""


def run(script):
    script = PREAMBLE + textwrap.dedent(script)
    return subprocess.run([sys.executable, "-c", script, str(HERE)], capture_output=True, text=True, timeout=120)


def test_an_interrupt_returns_at_once():
    """The caller does not wait for a long step."""
    result = run(
        """
        engine = fakes.engine(fakes.FakeModel(step_s=1.5))
        for stream in (True, False):
            handle = engine.submit(fakes.greedy([5], 50, stream=stream))
            threading.Timer(0.3, _thread.interrupt_main).start()
            start = time.monotonic()
            try:
                list(handle) if stream else handle.result()
            except KeyboardInterrupt:
                print(time.monotonic() - start < 0.8)
        assert engine.wait_idle(10) and engine.pages.num_free == engine.pages.num_pages
        """
    )
    assert result.stdout.split() == ["True", "True"], result.stderr


def test_an_exit_is_not_delayed():
    """A kernel that restarts while the engine works: the thread is a daemon and atexit runs."""
    result = run(
        """
        engine = fakes.engine(fakes.FakeModel(step_s=0.01))
        handle = engine.submit(fakes.greedy([5], 4000))
        next(handle)
        atexit.register(print, "atexit ran")
        """
    )
    assert (result.returncode, result.stdout.strip()) == (0, "atexit ran"), result.stderr
