"""The vLLM arguments and the environment of every engine. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
        env: environment variables of the actor and of all its processes.
        cores: CPU cores to stay on; empty leaves the choice to the system.
    """

    name: str
    role: Role
    vllm: Mapping[str, Any]
    env: Mapping[str, str]
    cores: tuple[int, ...]


def engine_arguments(
    config: Config,
    facts: ModelFacts,
    spec: EngineSpec,
    transfer: KvTransfer | None,
) -> EngineArguments:
    """Return how to start the engine of a spec; `transfer` is None in a colocated fleet."""
    on_cpu = not spec.gpus
    vllm: dict[str, Any] = {**_COMMON, **(_CPU if on_cpu else {})}
    if on_cpu:
        # With one worker, the worker lives in EngineCore: the default executor's processes spin.
        vllm["distributed_executor_backend"] = "uni" if spec.tensor_parallel_size == 1 else "mp"
    vllm.update(config.engine)
    vllm.update(_role_section(config, spec.role))
    native = config.weights.transport in ("nccl", "ipc")
    vllm.update(
        model=facts.path,
        tensor_parallel_size=spec.tensor_parallel_size,
        weight_transfer_config={"backend": config.weights.transport if native else WEIGHT_TRANSFER},
    )
    if transfer is not None:
        vllm["kv_transfer_config"] = transfer.config
    return EngineArguments(
        name=spec.name,
        role=spec.role,
        vllm=vllm,
        env=_environment(spec, transfer, on_cpu) | _compile_environment(vllm),
        cores=spec.cores,
    )


def front_end_arguments(config: Config, facts: ModelFacts, *, on_cpu: bool) -> EngineArguments:
    """Return how to set up vLLM's front end, which computes nothing, over the decode engines."""
    role = Role.DECODE if config.disaggregation.enabled else Role.BOTH
    vllm = {**_COMMON, **(_CPU if on_cpu else {}), **config.engine, **_role_section(config, role)}
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return EngineArguments("front", role, {**vllm, "model": facts.path}, env, ())


def _role_section(config: Config, role: Role) -> Mapping[str, Any]:
    match role:
        case Role.PREFILL:
            return config.disaggregation.prefill.engine
        case Role.DECODE:
            return config.disaggregation.decode.engine
        case Role.BOTH:
            return config.colocated.engine


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
        if spec.tensor_parallel_size == 1:
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    else:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(spec.gpus)
        # Exact devices come from the placement; Ray must not overwrite them.
        env["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    if transfer is not None:
        env.update(transfer.env)
    return env
