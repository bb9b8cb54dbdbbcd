"""The vLLM arguments and the environment of every engine. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from splitroll.config.pools import pool_of, pools
from splitroll.config.schema import Config
from splitroll.engines.process import ENGINE_ENV, WEIGHT_TRANSFER
from splitroll.model import ModelFacts
from splitroll.placement import EngineSpec
from splitroll.types import Role

_COMMON: dict[str, Any] = {
    # The distribution that the token was drawn from, temperature included.
    "logprobs_mode": "processed_logprobs",
    # Sampling comes with each request, never from the model's generation_config.json.
    "generation_config": "vllm",
    "enable_prefix_caching": True,
    "disable_log_stats": False,
}

_CPU: dict[str, Any] = {
    "enforce_eager": True,
    # The default of 128 makes every sibling of a group recompute up to 128 prompt tokens.
    "block_size": 32,
    "kv_cache_memory_bytes": 512 * 1024**2,
    "max_num_seqs": 64,
}

_CPU_ENV = {
    # Engines are placed on cores by us, not by vLLM's own binding.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

_OF_A_NODE = ("VLLM_HOST_IP", "VLLM_NIXL_SIDE_CHANNEL_HOST")


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """What the KV connector of one engine needs: vLLM's `kv_transfer_config`, and environment."""

    config: Mapping[str, Any]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """How to start one engine.

    Attributes:
        vllm: keyword arguments of vLLM's AsyncEngineArgs; `kv_transfer_config` as a mapping.
        env: environment variables of the actor and of all its processes, on all its nodes.
        own_env: those of the actor and its processes on the same node only.
        cores: CPU cores to stay on; empty leaves the choice to the system.
        forks: whether its processes are forks of the actor; else vLLM starts them its own way.
    """

    name: str
    role: Role
    vllm: Mapping[str, Any]
    env: Mapping[str, str]
    cores: tuple[int, ...]
    own_env: Mapping[str, str] = field(default_factory=dict)
    forks: bool = False


def engine_arguments(
    config: Config,
    facts: ModelFacts,
    spec: EngineSpec,
    transfer: KvTransfer | None,
) -> EngineArguments:
    """Return how to start the engine of a spec; `transfer` is None in a colocated fleet."""
    on_cpu = not spec.gpus
    vllm: dict[str, Any] = {**_COMMON, **(_CPU if on_cpu else {})}
    vllm["distributed_executor_backend"] = _executor(spec)
    pool = pool_of(config, spec.pool)
    vllm.update(pool.arguments(config))
    native = config.weights.transport in ("nccl", "ipc")
    vllm.update(
        model=facts.path,
        tensor_parallel_size=spec.tensor_parallel_size,
        weight_transfer_config={"backend": config.weights.transport if native else WEIGHT_TRANSFER},
    )
    if spec.pipeline_parallel_size > 1:
        vllm["pipeline_parallel_size"] = spec.pipeline_parallel_size
    if spec.data_parallel_size > 1:
        vllm["data_parallel_size"] = spec.data_parallel_size
    if pool.section.expert_parallel:
        vllm["enable_expert_parallel"] = True
    if transfer is not None:
        vllm["kv_transfer_config"] = transfer.config
    env = _environment(spec, transfer, on_cpu) | _compile_environment(vllm)
    # vLLM hands the actor's environment to its ranks on other nodes, which have other addresses.
    own = {name: env.pop(name) for name in _OF_A_NODE if name in env} if spec.shares else {}
    forks = on_cpu and config.devices.fork and not vllm.get("numa_bind")
    return EngineArguments(spec.name, spec.role, vllm, env, spec.cores, own, forks)


def front_end_arguments(config: Config, facts: ModelFacts, *, on_cpu: bool) -> EngineArguments:
    """Return how to set up vLLM's front end, which computes nothing, over the decode engines."""
    pool = next(pool for pool in pools(config) if pool.role is not Role.PREFILL)
    vllm = {**_COMMON, **(_CPU if on_cpu else {}), **pool.arguments(config)}
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return EngineArguments("front", pool.role, {**vllm, "model": facts.path}, env, ())


def _executor(spec: EngineSpec) -> str:
    """Return what runs an engine's ranks. Always named: vLLM takes "ray" where it finds itself in a
    placement group, which its CPU platform does not know."""
    if spec.shares:
        return "ray"
    # With one worker, the worker lives in EngineCore: other executors' processes spin on CPU.
    return "uni" if spec.world_size == 1 else "mp"


def _compile_environment(vllm: Mapping[str, Any]) -> dict[str, str]:
    """Without this, the sampler compiles its helpers at the first token, eager mode or not:
    17 s at a first start on two cores, 2.5 s at later ones."""
    return {"TORCHDYNAMO_DISABLE": "1"} if vllm.get("enforce_eager") else {}


def _environment(spec: EngineSpec, transfer: KvTransfer | None, on_cpu: bool) -> dict[str, str]:
    env = {
        ENGINE_ENV: spec.name,
        "VLLM_HOST_IP": spec.host,
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(spec.threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if on_cpu:
        env.update(_CPU_ENV)
        if spec.world_size == 1:
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # On GPUs Ray sets CUDA_VISIBLE_DEVICES to what it has granted the engine's placement group.
    if transfer is not None:
        env.update(transfer.env)
    return env
