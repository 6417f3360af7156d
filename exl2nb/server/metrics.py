"""What is counted, for Prometheus and for the monitor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from exl2nb.generator.request import Completion

if TYPE_CHECKING:
    from exl2nb.llm.model import LLM

TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TOKEN_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5)


class Metrics:
    """One server's counters, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        made = self.registry
        self.requests = Counter("exl2nb_requests", "requests that ended", ["route", "outcome"], registry=made)
        self.prompt_tokens = Counter("exl2nb_prompt_tokens", "prompt tokens, those found in the cache included", registry=made)
        self.cached_tokens = Counter("exl2nb_cached_tokens", "prompt tokens found in the cache", registry=made)
        self.new_tokens = Counter("exl2nb_generated_tokens", "tokens generated", registry=made)
        self.drafted = Counter("exl2nb_draft_tokens", "draft tokens that were verified", registry=made)
        self.accepted = Counter("exl2nb_accepted_draft_tokens", "draft tokens that were accepted", registry=made)
        self.ttft = Histogram("exl2nb_time_to_first_token_seconds", "from the request to its first token", buckets=TTFT_S, registry=made)
        self.per_token = Histogram("exl2nb_time_per_token_seconds", "between tokens, mean of a request", buckets=TOKEN_S, registry=made)
        self.queue_s = Histogram("exl2nb_queue_seconds", "waiting for pages", buckets=TTFT_S, registry=made)
        self.active = Gauge("exl2nb_requests_active", "requests that run or wait", registry=made)
        self.running = Gauge("exl2nb_sequences_running", "sequences in the batch", registry=made)
        self.waiting = Gauge("exl2nb_sequences_waiting", "sequences that wait for the batch", registry=made)
        self.pages = Gauge("exl2nb_cache_pages", "pages of the KV cache", registry=made)
        self.pages_free = Gauge("exl2nb_cache_pages_free", "pages that no running request holds", registry=made)

    def count(self, completion: Completion) -> None:
        """A request is through."""
        timings = completion.timings
        self.prompt_tokens.inc(timings.prompt_tokens)
        self.cached_tokens.inc(timings.reused_tokens)
        self.new_tokens.inc(timings.new_tokens)
        self.ttft.observe(timings.first_token_s)
        self.queue_s.observe(timings.queue_s)
        if timings.new_tokens > 1:
            self.per_token.observe(timings.decode_s / (timings.new_tokens - 1))
        if completion.speculation is not None:
            self.drafted.inc(completion.speculation.proposed)
            self.accepted.inc(completion.speculation.accepted)

    def text(self, llm: LLM | None, active: int) -> bytes:
        """Everything in Prometheus' text format."""
        self.active.set(active)
        if llm is not None:
            scheduler, pages = llm.engine.loop.scheduler, llm.engine.pages
            self.running.set(len(scheduler.running))
            self.waiting.set(len(scheduler.waiting))
            self.pages.set(pages.num_pages)
            self.pages_free.set(pages.num_free)
        return generate_latest(self.registry)
