"""A second opinion on `exl2nb serve`, by locust: half of the answers are streams. Beside `serve.py`, whose load client costs less.

    pip install locust                                        # in an environment of its own
    exl2nb serve demo --template chatml --max-sequences 32 --cache-tokens 16384 --max-queue 4096 --quiet
    locust -f benchmarks/locustfile.py --headless --host http://127.0.0.1:5000 --users 32 --spawn-rate 32 --run-time 30s

locust is Python and shares the machine: its figures say what clients saw, tokens per second are a lower bound.
"""

import itertools
import time

from locust import HttpUser, events, task

TOKENS = 64
numbers = itertools.count()


class Client(HttpUser):
    """Asks again as soon as an answer is complete."""

    def body(self, stream):
        text = f"The old man went home for the {next(numbers)}th time and said that it was"
        return {"prompt": text, "max_tokens": TOKENS, "temperature": 0.8, "ignore_eos": True, "stream": stream}

    @task
    def whole(self):
        self.client.post("/v1/completions", json=self.body(False), name="whole")

    @task
    def streamed(self):
        begun, first = time.perf_counter(), None
        with self.client.post("/v1/completions", json=self.body(True), name="streamed", stream=True, catch_response=True) as answer:
            last = b""
            for line in answer.iter_lines():
                if first is None:
                    first = time.perf_counter() - begun
                last = line or last
            if last != b"data: [DONE]":
                answer.failure(f"ended with {last[:80]!r}")
        if first is not None:
            events.request.fire(request_type="SSE", name="first token", response_time=1000 * first, response_length=0, exception=None)
