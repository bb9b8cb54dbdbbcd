"""Rules between sections, and between the configuration, the model and vLLM's own arguments.

Everything here is checked before Ray or an engine starts.
"""

from __future__ import annotations

import ctypes
import difflib
import functools
import importlib.util
import ipaddress
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from splitroll.config.fields import field_names, first_arguments
from splitroll.config.grpo import grpo_problems
from splitroll.config.pools import pools, replicas
from splitroll.config.router import router_problems
from splitroll.config.schema import Config, Connector, Disaggregation
from splitroll.config.topology import topology_problems
from splitroll.errors import ConfigError, Problem
from splitroll.model import ModelFacts
from splitroll.types import Role

_SIZES = "set it in disaggregation.prefill, .decode or .mixed, or in colocated"
_OWNED = {
    "model": "set the top-level `model`",
    "tokenizer": "the model's own tokenizer is used",
    "tensor_parallel_size": _SIZES,
    "pipeline_parallel_size": _SIZES,
    "data_parallel_size": _SIZES,
    "enable_expert_parallel": "set expert_parallel in the same section",
    "kv_transfer_config": "set disaggregation.transfer_backend",
    "logprobs_mode": "samples carry log-probabilities of the distribution sampled from",
    "generation_config": "sampling parameters come with each call, never from the model's files",
    "enable_prefix_caching": "groups share their prompt through it; it is always on",
    "disable_log_stats": "the summary is made from them",
    "weight_transfer_config": "set weights.transport",
    "max_logprobs": "the start-up proof asks for the 5 most likely tokens",
}
"""Engine arguments that splitroll sets itself, with what to do instead."""

_UNSUPPORTED = {
    "prefill_context_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "speculative_config": None,
    "enable_lora": False,
}
"""Engine arguments that are not supported yet beyond the value given."""

_SHORTEST_MODEL_LEN = 16
"""The start-up proof needs a prompt and a few tokens."""


def check_config(config: Config, facts: ModelFacts) -> None:
    """Check all rules that need no cluster.

    Raises:
        ConfigError: with every problem found.
    """
    problems = [
        *_engine_argument_problems(config),
        *_lease_problems(config),
        *_backend_problems(config),
        *_network_problems(config),
        *_replica_problems(config),
        *topology_problems(config, facts),
        *_length_problems(config, facts),
        *_group_problems(config),
        *_weight_problems(config),
        *router_problems(config),
        *grpo_problems(config.train.grpo),
    ]
    if problems:
        raise ConfigError(problems)


def max_model_len(config: Config, facts: ModelFacts) -> int:
    """Return the longest sequence, in tokens, that every engine of the fleet can hold."""
    lengths = [pool.arguments(config).get("max_model_len") for pool in pools(config)]
    known = (length if length is not None else facts.max_model_len for length in lengths)
    return min(known, default=facts.max_model_len)


def _engine_argument_problems(config: Config) -> Iterator[Problem]:
    known = vllm_engine_arguments()
    sections = [("engine", config.engine)]
    sections += [(f"{pool.path}.engine", pool.section.engine) for pool in pools(config)]
    for path, arguments in sections:
        for name, value in arguments.items():
            where = f"{path}.{name}"
            if name in _OWNED:
                yield Problem(where, repr(value), "nothing: splitroll sets it", _OWNED[name])
            elif name in _UNSUPPORTED and value != _UNSUPPORTED[name]:
                allowed = repr(_UNSUPPORTED[name])
                yield Problem(where, repr(value), allowed, "not supported yet: remove it")
            elif known and name not in known:
                near = difflib.get_close_matches(name, known - _OWNED.keys(), n=1, cutoff=0.5)
                hint = f"did you mean {near[0]}?" if near else "remove it"
                yield Problem(where, "an unknown key", "an argument of vLLM's engine", hint)


def _lease_problems(config: Config) -> Iterator[Problem]:
    section = config.disaggregation
    if section.enabled and section.kv_lease_s <= section.handoff_timeout_s:
        yield Problem(
            "disaggregation.kv_lease_s",
            f"{section.kv_lease_s:g}",
            f"more than handoff_timeout_s, which is {section.handoff_timeout_s:g}",
            "raise kv_lease_s: KV must outlive the handoff that pulls it",
        )


def _backend_problems(config: Config) -> Iterator[Problem]:
    section = config.disaggregation
    if not section.enabled:
        return
    yield from _connector_problems(section)
    if section.transfer_backend == "mooncake" and (missing := _mooncake_lacks()) is not None:
        found, hint = missing
        allowed = "'nixl', or 'mooncake' with its transfer engine"
        yield Problem("disaggregation.transfer_backend", f"'mooncake' {found}", allowed, hint)


def _connector_problems(section: Disaggregation) -> Iterator[Problem]:
    where, name = "disaggregation.connector.name", section.connector.name
    asked = section.transfer_backend == "connector"
    if not asked:
        if section.connector != Connector():
            hint = "leave the section out, or set transfer_backend: connector"
            allowed = f"nothing, with transfer_backend: {section.transfer_backend}"
            yield Problem("disaggregation.connector", repr(name), allowed, hint)
        return
    known = vllm_connectors()
    own = {"NixlConnector": "nixl", "NixlPullConnector": "nixl", "MooncakeConnector": "mooncake"}
    if name is None:
        hint = "name one, for instance MultiConnector"
        yield Problem(where, "null", "a connector of vLLM's", hint)
    elif name in own:
        hint = f"set transfer_backend: {own[name]}; it sets the connector's arguments itself"
        yield Problem(where, repr(name), "a connector that is no backend of its own", hint)
    elif (path := section.connector.module_path) is not None:
        if not _is_module(path):
            hint = "install it, or correct the path"
            where = "disaggregation.connector.module_path"
            yield Problem(where, repr(path), "a module that can be imported", hint)
    elif known and name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "set module_path too, or choose one of these"
        yield Problem(where, repr(name), ", ".join(sorted(known)), hint)
    yield from _children_problems(name, section.connector.arguments)


def _children_problems(name: str | None, arguments: Mapping[str, Any]) -> Iterator[Problem]:
    where = "disaggregation.connector.arguments.connectors"
    children = arguments.get("connectors")
    if children is None and name != "MultiConnector":
        return
    if not isinstance(children, Sequence) or isinstance(children, str) or not children:
        hint = "name NixlConnector first, and what is to be beside it"
        yield Problem(where, repr(children), "a list of {kv_connector: NAME, ...}", hint)
        return
    for index, child in enumerate(children):
        own = child.get("kv_connector_extra_config", {}) if isinstance(child, Mapping) else None
        if not isinstance(own, Mapping) or not isinstance(child.get("kv_connector"), str):
            allowed = "{kv_connector: NAME, kv_connector_extra_config: {...}}"
            yield Problem(f"{where}.{index}", repr(child), allowed, "write it so")
            return
    named = [str(child["kv_connector"]) for child in children]
    known = vllm_connectors()
    for index, (child, one) in enumerate(zip(children, named, strict=True)):
        if known and one not in known and "kv_connector_module_path" not in child:
            near = difflib.get_close_matches(one, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "choose one of these"
            at = f"{where}.{index}.kv_connector"
            yield Problem(at, repr(one), ", ".join(sorted(known)), hint)
    if not any(one.startswith("Nixl") for one in named):
        hint = "add {kv_connector: NixlConnector}: it moves the KV of handoffs"
        yield Problem(where, ", ".join(named), "a chain with NIXL in it", hint)


def _is_module(path: str) -> bool:
    try:
        return importlib.util.find_spec(path) is not None
    except (ImportError, ValueError):
        return False


@functools.cache
def vllm_connectors() -> frozenset[str]:
    """Return the names of vLLM's KV connectors, read from its source without importing it; empty
    where vLLM is not installed."""
    path = "distributed/kv_transfer/kv_connector/factory.py"
    return first_arguments("vllm", path, "register_connector")


@functools.cache
def _mooncake_lacks() -> tuple[str, str] | None:
    """Return what Mooncake lacks on this machine, and what to do; None if nothing."""
    if importlib.util.find_spec("mooncake") is None:
        return "without its package", "pip install splitroll[mooncake]"
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return "without libibverbs, which it links", "apt-get install libibverbs1"
    return None


def _network_problems(config: Config) -> Iterator[Problem]:
    network, cluster = config.network, config.ray.address
    if cluster not in (None, "auto") and re.fullmatch(r"[^/\s]+:\d{1,5}", cluster or "") is None:
        hint = "name its head node's port, which `ray start --head` tells; not that of Ray's client"
        allowed = "null, auto, or HOST:PORT of a Ray cluster that runs"
        yield Problem("ray.address", repr(cluster), allowed, hint)
    if network.subnet is not None:
        try:
            ipaddress.ip_network(network.subnet)
        except ValueError as exc:
            allowed = 'a subnet, such as "10.0.0.0/8"'
            yield Problem("network.subnet", f"{network.subnet!r} ({exc})", allowed, "write one")
    for node, address in network.addresses.items():
        try:
            ipaddress.ip_address(address)
        except ValueError:
            where = f"network.addresses.{node}"
            yield Problem(where, repr(address), "an IP address", "write one, without a port")


def _weight_problems(config: Config) -> Iterator[Problem]:
    weights = config.weights
    if weights.transport == "disk" and weights.path is None:
        hint = "name a folder that every node sees"
        yield Problem("weights.path", "null", "a folder, with transport disk", hint)
    if weights.transport == "shm" and weights.path is not None:
        hint = "leave it out, or set weights.transport to disk"
        yield Problem("weights.path", repr(weights.path), "null, with transport shm", hint)
    if weights.transport in ("nccl", "ipc"):
        if config.devices.kind == "cpu":
            hint = "use shm or disk"
            allowed = "shm or disk, with devices.kind cpu"
            yield Problem("weights.transport", repr(weights.transport), allowed, hint)
        if weights.verify != "none":
            hint = "vLLM's own transports report no checksums: use shm or disk, or none"
            allowed = f"'none', with transport {weights.transport}"
            yield Problem("weights.verify", repr(weights.verify), allowed, hint)
        if weights.on_failure == "rollback" and weights.path is None:
            yield Problem(
                "weights.on_failure",
                "'rollback'",
                f"'fence', with transport {weights.transport} and no weights.path",
                "GPU memory keeps no old version: set weights.path to keep one in files, or fence",
            )


def _replica_problems(config: Config) -> Iterator[Problem]:
    section = config.disaggregation
    if not section.enabled:
        return
    for role in ("prefill", "decode"):
        shapes, number = getattr(section, role), getattr(section, f"{role}_replicas")
        if not isinstance(shapes, list):
            continue
        if number is not None:
            hint = "leave it out: every group of the list has its own `replicas`"
            allowed = f"null, with a list in disaggregation.{role}"
            yield Problem(f"disaggregation.{role}_replicas", str(number), allowed, hint)
        if not shapes:
            hint = "name a group, or set disaggregation.enabled to false for engines that do both"
            yield Problem(f"disaggregation.{role}", "[]", "at least one group", hint)


def _length_problems(config: Config, facts: ModelFacts) -> Iterator[Problem]:
    sections = {"": config.engine}
    sections |= {f"{pool.path}.": pool.section.engine for pool in pools(config)}
    for path, arguments in sections.items():
        length = arguments.get("max_model_len")
        if length is None:
            continue
        longest = math.inf if "hf_overrides" in arguments else facts.max_model_len
        if not isinstance(length, int) or not _SHORTEST_MODEL_LEN <= length <= longest:
            yield Problem(
                f"{path}engine.max_model_len",
                repr(length),
                f"{_SHORTEST_MODEL_LEN} to {facts.max_model_len}, the longest that {facts.name} "
                "was made for",
                "change it; a longer one needs engine.hf_overrides",
            )


def _group_problems(config: Config) -> Iterator[Problem]:
    decoding = replicas(config, Role.DECODE, Role.BOTH)
    if decoding and (config.dispatch.decode_engines_per_group or 1) > decoding:
        yield Problem(
            "dispatch.decode_engines_per_group",
            str(config.dispatch.decode_engines_per_group),
            f"1 to {decoding}, the number of engines that decode",
            "lower it or start more engines",
        )


@functools.cache
def vllm_engine_arguments() -> frozenset[str]:
    """Return the names of vLLM's engine arguments, read from its source without importing it.

    Importing vLLM takes seconds; a typing error should be told at once. Empty where vLLM is not
    installed (then the engine itself reports an unknown argument).
    """
    return field_names("vllm", "engine/arg_utils.py", ("EngineArgs", "AsyncEngineArgs"))
