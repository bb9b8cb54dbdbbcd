"""What Prometheus is told: few series of the fleet's own, and vLLM's of every engine."""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from splitroll.engines.protocol import Engine, EngineCounters, EngineLoad
from splitroll.errors import SplitrollError
from splitroll.rollout import Rollout
from splitroll.types import Sample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ASK_TIMEOUT_S = 5.0
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_PHASES = ("queue", "prefill", "transfer", "decode")
_SKIPPED = ("python_", "process_", "http_")
"""Of engines' own series: what concerns their processes, not vLLM."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one engine said at a scrape."""

    role: str
    counters: EngineCounters
    load: EngineLoad | None
    vllm: str


@dataclass(slots=True, eq=False)
class Metrics(Collector):  # type: ignore[misc]
    """Collects from a running rollout; see docs/serve.md for the series."""

    rollout: Rollout
    _samples: Tally[tuple[str, str]] = field(default_factory=Tally)
    _tokens: Tally[str] = field(default_factory=Tally)
    _engines: dict[str, _Seen] = field(default_factory=dict)
    _registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    _seconds: Histogram = field(init=False)

    def __post_init__(self) -> None:
        self._seconds = Histogram(
            "splitroll_sample_seconds",
            "Where a sample's time went.",
            ("phase",),
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._registry.register(self)
        self.rollout.dispatcher.on_sample(self.note)

    def note(self, sample: Sample) -> None:
        """Count a sample that has ended."""
        self._samples[sample.route.kind.value, sample.finish_reason] += 1
        self._tokens["prompt"] += len(sample.prompt_token_ids)
        self._tokens["generated"] += len(sample.token_ids)
        timing = sample.timing
        spent = (timing.queued_s, timing.prefill_s, timing.transfer_s, timing.decode_s)
        for phase, seconds in zip(_PHASES, spent, strict=True):
            self._seconds.labels(phase).observe(max(0.0, seconds))

    async def text(self) -> bytes:
        """Return all series in Prometheus' text format."""
        counters = await self.rollout.fleet.counters_within(_ASK_TIMEOUT_S)
        engines = self.rollout.fleet.ready()
        found = await asyncio.gather(*(self._ask(engine) for engine in engines))
        self._engines = {
            engine.info.name: _Seen(
                engine.info.role.value,
                counters.get(engine.info.name, EngineCounters()),
                load,
                vllm,
            )
            for engine, (load, vllm) in zip(engines, found, strict=True)
        }
        return bytes(generate_latest(self._registry))

    async def _ask(self, engine: Engine) -> tuple[EngineLoad | None, str]:
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                return await engine.load(), await engine.metrics()
        except (SplitrollError, TimeoutError):
            return None, ""  # it has just died, or hangs: its state says so

    def collect(self) -> Iterator[Metric]:
        yield from self._of_the_work()
        yield from self._of_the_fleet()
        yield from self._of_engines()
        yield from _relabelled(self._engines)

    def _of_the_work(self) -> Iterator[Metric]:
        dispatcher = self.rollout.dispatcher
        stats = dispatcher.stats
        samples = _counter("samples", "Samples that ended.", "route", "finish_reason")
        for labels, count in self._samples.items():
            samples.add_metric(labels, count)
        yield samples
        tokens = _counter("tokens", "Tokens of ended samples.", "kind")
        for kind, count in self._tokens.items():
            tokens.add_metric([kind], count)
        yield tokens
        for name, count, what in (
            ("handoffs", stats.handoffs, "KV transfers between engines that arrived."),
            ("handles_cancelled", dispatcher.cancelled_handles, "Handles given back, not pulled."),
            ("moves", stats.moves, "Samples that moved to another engine with their KV."),
            ("retries", stats.retries, "Attempts at a group beyond its first."),
            (
                "recomputed_tokens",
                stats.recomputed_tokens,
                "Prompt tokens computed again although their KV was handed off.",
            ),
        ):
            yield _counter(name, what, value=count)
        in_flight = _gauge("tokens_in_flight", "Given to an engine and not ended.", "engine")
        for engine, count in dispatcher.load.items():
            in_flight.add_metric([engine], count)
        yield in_flight

    def _of_the_fleet(self) -> Iterator[Metric]:
        fleet = self.rollout.fleet
        state = _gauge("engine_state", "1 for the state that an engine is in.", "engine", "state")
        restarts = _counter("engine_restarts", "Restarts of an engine.", "engine")
        for name, member in fleet.members.items():
            state.add_metric([name, member.state.value], 1)
            restarts.add_metric([name], member.restarts)
        yield state
        yield restarts
        yield _gauge("weight_version", "Of the weights that serve.", value=fleet.weight_version)
        yield _gauge("paused", "1 while the fleet is paused.", value=int(self.rollout.is_paused))
        report = self.rollout.last_update
        if report is not None:
            seconds = _gauge("weight_update_seconds", "Of the last weight update.", "phase")
            for phase, spent in report.seconds.items():
                seconds.add_metric([phase], spent)
            yield seconds

    def _of_engines(self) -> Iterator[Metric]:
        prompt = _counter(
            "prompt_tokens",
            "Prompt tokens by where their KV came from.",
            "engine",
            "role",
            "source",
        )
        series = {
            "generated_tokens": _counter("generated_tokens", "Generated.", "engine", "role"),
            "preemptions": _counter("preemptions", "Requests preempted.", "engine", "role"),
            "kv_bytes": _counter("kv_bytes", "Bytes of KV pulled.", "engine", "role"),
            "kv_failures": _counter("kv_failures", "Transfers that failed.", "engine", "role"),
            "kv_expired": _counter("kv_expired", "Handles nobody pulled.", "engine", "role"),
        }
        load = {
            "running": _gauge("engine_running", "Requests that run.", "engine", "role"),
            "waiting": _gauge("engine_waiting", "Requests that wait.", "engine", "role"),
            "held_blocks": _gauge("engine_held_blocks", "KV blocks in use.", "engine", "role"),
            "pinned": _gauge("engine_open_handles", "Handles to be pulled.", "engine", "role"),
        }
        for name, seen in self._engines.items():
            labels = [name, seen.role]
            for source, count in (
                ("computed", seen.counters.computed_tokens),
                ("cache", seen.counters.cache_hit_tokens),
                ("moved", seen.counters.pulled_tokens),
            ):
                prompt.add_metric([*labels, source], count)
            for key, family in series.items():
                family.add_metric(labels, getattr(seen.counters, key))
            if seen.load is not None:
                for key, gauge in load.items():
                    gauge.add_metric(labels, getattr(seen.load, key))
        yield prompt
        yield from series.values()
        yield from load.values()


def _relabelled(engines: Mapping[str, _Seen]) -> Iterable[Metric]:
    """Return engines' own series, each with its engine and its role."""
    families: dict[str, Metric] = {}
    for name, seen in engines.items():
        for family in text_string_to_metric_families(seen.vllm):
            if family.name.startswith(_SKIPPED):
                continue
            whole = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                labels = {**sample.labels, "engine": name, "role": seen.role}
                whole.add_sample(sample.name, labels, sample.value)
    return families.values()


def _counter(name: str, what: str, *labels: str, value: float | None = None) -> CounterMetricFamily:
    return CounterMetricFamily(f"splitroll_{name}", what, value=value, labels=labels or None)


def _gauge(name: str, what: str, *labels: str, value: float | None = None) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"splitroll_{name}", what, value=value, labels=labels or None)
