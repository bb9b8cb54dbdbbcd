"""Rules of the section `router`."""

from __future__ import annotations

import difflib
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from splitroll.config.fields import field_names
from splitroll.config.schema import Config
from splitroll.errors import Problem

_OWNED = {
    "worker_urls": "set router.worker_urls",
    "prefill_urls": "set router.prefill_urls",
    "decode_urls": "set router.decode_urls",
    "vllm_pd_disaggregation": "set disaggregation.enabled",
    "kv_connector": "set disaggregation.transfer_backend",
    "host": "it listens on loopback",
    "port": "set router.port",
    "policy": "set router.policy",
    "prefill_policy": "set router.prefill_policy",
    "decode_policy": "set router.decode_policy",
    "prometheus_host": "it listens on loopback",
    "health_check_interval_secs": "set router.health_interval_s",
    "health_failure_threshold": "set router.health_failures",
    "cb_failure_threshold": "set router.circuit_breaker_failures",
    "disable_circuit_breaker": "set router.circuit_breaker_failures",
    "disable_retries": "set router.retries",
    "retry_max_retries": "set router.retries",
}
"""Options of vllm-router that splitroll sets, with what to do instead."""


def outside_servers(config: Config) -> tuple[str, ...]:
    """Return the addresses of what was not started by us."""
    section = config.router
    joined = () if section.url is None else (section.url,)
    return (*joined, *section.prefill_urls, *section.decode_urls, *section.worker_urls)


def router_problems(config: Config) -> Iterator[Problem]:
    """Return what cannot work in the static router mode, or is of no use without it."""
    section = config.router
    lists = {name: getattr(section, name) for name in ("prefill_urls", "decode_urls")}
    lists["worker_urls"] = section.worker_urls
    yield from _url_problems({"url": (section.url,) if section.url else (), **lists})
    if section.mode == "splitroll":
        for name, value in {"url": section.url, **lists}.items():
            if value:
                hint = "set router.mode=vllm-router, or leave it out"
                yield Problem(f"router.{name}", repr(value), "nothing, in this mode", hint)
        return
    yield from _place_problems(config, lists)
    yield from _topology_problems(config)
    yield from _weight_problems(config)
    yield from _argument_problems(config)
    if section.url is None and importlib.util.find_spec("vllm_router") is None:
        hint = "install splitroll[router], or join a router that runs: router.url"
        yield Problem("router.mode", "'vllm-router'", "with vllm-router installed", hint)


def _url_problems(urls: dict[str, Sequence[str]]) -> Iterator[Problem]:
    for name, values in urls.items():
        for value in values:
            try:
                parts = urlsplit(value)
                right = parts.scheme in ("http", "https") and bool(parts.hostname)
                right = right and parts.port is not None and not parts.path.strip("/")
            except ValueError:
                right = False
            if not right:
                allowed = "http://HOST:PORT"
                yield Problem(f"router.{name}", repr(value), allowed, "write it in full")


def _place_problems(config: Config, lists: dict[str, Sequence[str]]) -> Iterator[Problem]:
    split = config.disaggregation.enabled
    for name, values in lists.items():
        if not values:
            continue
        if config.router.url is not None:
            hint = "leave one of them out: a router that runs knows its servers"
            yield Problem(f"router.{name}", repr(values), "nothing, with router.url", hint)
        elif split is (name == "worker_urls"):
            mode = str(split).lower()
            allowed = f"nothing, with disaggregation.enabled: {mode}"
            other = "prefill_urls and decode_urls" if split else "worker_urls"
            yield Problem(f"router.{name}", repr(values), allowed, f"use router.{other}")


def _topology_problems(config: Config) -> Iterator[Problem]:
    section = config.disaggregation
    if not section.enabled:
        return
    if section.transfer_backend == "connector":
        where, hint = "disaggregation.transfer_backend", "choose one that vllm-router knows"
        yield Problem(where, "'connector'", "nixl or mooncake, with router.mode", hint)
    if section.mixed:
        found = f"{len(section.mixed)} of them"
        hint = "leave it out: vllm-router's servers have one role each"
        yield Problem("disaggregation.mixed", found, "nothing, with router.mode", hint)


def _weight_problems(config: Config) -> Iterator[Problem]:
    weights = config.weights
    if weights.transport not in ("shm", "disk"):
        hint = "servers are not told apart by rank: use shm or disk"
        found = repr(weights.transport)
        yield Problem("weights.transport", found, "shm or disk, with router.mode", hint)
    if weights.in_flight == "keep":
        hint = "behind a router KV of two versions could meet: use drain or abort"
        yield Problem("weights.in_flight", "'keep'", "drain or abort, with router.mode", hint)
    if weights.verify != "none":
        hint = "a server's HTTP API returns no checksums"
        yield Problem("weights.verify", repr(weights.verify), "'none', with router.mode", hint)


def _argument_problems(config: Config) -> Iterator[Problem]:
    known = router_arguments()
    for name, value in config.router.arguments.items():
        where = f"router.arguments.{name}"
        if name in _OWNED:
            yield Problem(where, repr(value), "nothing: splitroll sets it", _OWNED[name])
        elif known and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "remove it"
            yield Problem(where, "an unknown key", "an argument of vllm-router", hint)


@functools.cache
def router_arguments() -> frozenset[str]:
    """Return the names of vllm-router's arguments; see `field_names`."""
    return field_names("vllm_router", "router_args.py", ("RouterArgs",))
