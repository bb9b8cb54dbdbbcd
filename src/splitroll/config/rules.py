"""Rules between sections, and between the configuration, the model and vLLM's own arguments.

Everything here is checked before Ray or an engine starts.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from splitroll.config.fields import field_names
from splitroll.config.grpo import grpo_problems
from splitroll.config.router import router_problems
from splitroll.config.schema import Config
from splitroll.errors import ConfigError, Problem
from splitroll.model import ModelFacts

_OWNED = {
    "model": "set the top-level `model`",
    "tokenizer": "the model's own tokenizer is used",
    "tensor_parallel_size": "set it in disaggregation.prefill, disaggregation.decode or colocated",
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
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "speculative_config": None,
    "enable_lora": False,
}
"""Engine arguments that are not supported yet beyond the value given."""

_SHORTEST_MODEL_LEN = 16
"""The start-up proof needs a prompt and a few tokens."""

_MUST_MATCH = ("block_size", "dtype", "kv_cache_dtype", "hf_overrides", "quantization", "revision")
"""Engine arguments that make KV of one engine meaningless to the other when they differ."""


def check_config(config: Config, facts: ModelFacts) -> None:
    """Check all rules that need no cluster.

    Raises:
        ConfigError: with every problem found.
    """
    problems = [
        *_engine_argument_problems(config),
        *_lease_problems(config),
        *_parallel_problems(config, facts),
        *_match_problems(config),
        *_length_problems(config, facts),
        *_group_problems(config),
        *_weight_problems(config),
        *router_problems(config),
        *grpo_problems(config.train.grpo),
    ]
    if problems:
        raise ConfigError(problems)


def role_arguments(config: Config) -> dict[str, Mapping[str, Any]]:
    """Return the merged engine arguments of each role's section, by the section's path."""
    return {path: {**config.engine, **section.engine} for path, section in _role_sections(config)}


def max_model_len(config: Config, facts: ModelFacts) -> int:
    """Return the longest sequence, in tokens, that every engine of the fleet can hold."""
    lengths = [arguments.get("max_model_len") for arguments in role_arguments(config).values()]
    return min(length if length is not None else facts.max_model_len for length in lengths)


def _role_sections(config: Config) -> Iterator[tuple[str, Any]]:
    if config.disaggregation.enabled:
        yield "disaggregation.prefill", config.disaggregation.prefill
        yield "disaggregation.decode", config.disaggregation.decode
    else:
        yield "colocated", config.colocated


def _engine_argument_problems(config: Config) -> Iterator[Problem]:
    known = vllm_engine_arguments()
    sections = [("engine", config.engine)]
    sections += [(f"{path}.engine", section.engine) for path, section in _role_sections(config)]
    for path, arguments in sections:
        for name, value in arguments.items():
            where = f"{path}.{name}"
            if name in _OWNED:
                yield Problem(where, repr(value), "nothing: splitroll sets it", _OWNED[name])
            elif name in _UNSUPPORTED and value != _UNSUPPORTED[name]:
                allowed = repr(_UNSUPPORTED[name])
                yield Problem(where, repr(value), allowed, "not supported yet: remove it")
            elif known and name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
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
    if section.enabled and section.transfer_backend == "mooncake":
        yield Problem(
            "disaggregation.transfer_backend",
            "'mooncake'",
            "'nixl'",
            "the Mooncake backend is not available in this version; use nixl",
        )


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


def _parallel_problems(config: Config, facts: ModelFacts) -> Iterator[Problem]:
    for path, section in _role_sections(config):
        size = section.tensor_parallel_size
        heads, kv_heads = facts.num_attention_heads, facts.num_kv_heads
        kv_fits = kv_heads % size == 0 or size % kv_heads == 0
        if heads % size == 0 and kv_fits:
            continue
        works = [n for n in range(1, heads + 1) if heads % n == 0 and kv_heads % n == 0]
        yield Problem(
            f"{path}.tensor_parallel_size",
            str(size),
            f"a divisor of {heads} attention heads and {kv_heads} KV heads: "
            + ", ".join(map(str, works)),
            f"choose one of these for {facts.name}",
        )
    sizes = [section.tensor_parallel_size for _, section in _role_sections(config)]
    if max(sizes) % min(sizes):
        yield Problem(
            "disaggregation.{prefill,decode}.tensor_parallel_size",
            " and ".join(map(str, sizes)),
            "sizes of which one divides the other",
            "KV is moved between whole numbers of ranks: change one of them",
        )


def _match_problems(config: Config) -> Iterator[Problem]:
    if not config.disaggregation.enabled:
        return
    (_, prefill), (_, decode) = role_arguments(config).items()
    for name in _MUST_MATCH:
        if prefill.get(name) != decode.get(name):
            yield Problem(
                f"disaggregation.{{prefill,decode}}.engine.{name}",
                f"{prefill.get(name, 'the default')} for prefill and "
                f"{decode.get(name, 'the default')} for decode",
                "the same value for both roles",
                "set it once, in the common `engine` section: KV is moved between the roles as is",
            )


def _length_problems(config: Config, facts: ModelFacts) -> Iterator[Problem]:
    sections = {"": config.engine}
    sections |= {f"{path}.": section.engine for path, section in _role_sections(config)}
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
    replicas = (
        config.disaggregation.decode_replicas
        if config.disaggregation.enabled
        else config.colocated.replicas
    )
    if (config.dispatch.decode_engines_per_group or 1) > replicas:
        yield Problem(
            "dispatch.decode_engines_per_group",
            str(config.dispatch.decode_engines_per_group),
            f"1 to {replicas}, the number of engines that decode",
            "lower it or start more engines",
        )


@functools.cache
def vllm_engine_arguments() -> frozenset[str]:
    """Return the names of vLLM's engine arguments, read from its source without importing it.

    Importing vLLM takes seconds; a typing error should be told at once. Empty where vLLM is not
    installed (then the engine itself reports an unknown argument).
    """
    return field_names("vllm", "engine/arg_utils.py", ("EngineArgs", "AsyncEngineArgs"))
