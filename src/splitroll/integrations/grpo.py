"""TRL's GRPOConfig as sampling parameters, and the settings of it that cannot be honoured.

Pure: a GRPOConfig is only read as a dataclass; TRL is not imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

from splitroll.config import collecting
from splitroll.errors import ConfigError, InvalidRequest, Problem
from splitroll.types import SamplingParams

_OFF = {
    "use_vllm": "the samples come from splitroll's engines: leave it out",
    "use_transformers_continuous_batching": "splitroll's engines generate: leave it out",
    "use_transformers_paged": "splitroll's engines generate: leave it out",
    "transformers_continuous_batching_config": "splitroll's engines generate: leave it out",
    "cache_implementation": "it belongs to transformers' own generation: leave it out",
    "max_tool_calling_iterations": "it belongs to TRL's tools: give TrlBridge an environment",
    "deepspeed": "weights are taken from a whole model: train without it",
    "fsdp": "weights are taken from a whole model: train without it",
    "ds3_gather_for_generation": "it belongs to DeepSpeed: leave it out",
}
"""Settings that must stand at their default, with what to do."""

_WITHOUT_EFFECT = ("vllm_importance_sampling_correction",)
"""TRL corrects only samples of its own vLLM: False says what happens in any case."""

_ELSEWHERE = {
    "seed": "set `seed` of GRPOConfig; every sample's own is derived from it",
    "temperature": "set `temperature` of GRPOConfig: the trainer divides its logits by that one",
    "n": "set `num_generations` of GRPOConfig",
    "num_return_sequences": "set `num_generations` of GRPOConfig",
    "max_new_tokens": "vLLM's name is max_tokens; or set `max_completion_length`",
    "min_new_tokens": "vLLM's name is min_tokens",
    "eos_token_id": "vLLM's name is stop_token_ids; the model's own ends are always among them",
    "stop_strings": "vLLM's name is stop",
    "do_sample": "leave it out: samples are always drawn",
    "num_beams": "beams are not samples of the policy: leave it out",
}
"""Keys of `generation_kwargs` that are refused, with what to do."""

_GENERATION_KEYS = tuple(
    field.name for field in fields(SamplingParams) if field.name not in _ELSEWHERE
)

_CONFIG_NAMES = {"max_tokens": "max_completion_length"}
"""Names of GRPOConfig where they differ from SamplingParams'."""


def check_settings(args: Any) -> None:
    """Check all of a GRPOConfig that needs no trainer.

    Raises:
        ConfigError: with every setting that cannot be honoured.
    """
    problems = list(refusals(args))
    with collecting(problems):
        sampling_params(args, ())
    if problems:
        raise ConfigError(problems)


def refusals(args: Any) -> Iterator[Problem]:
    """Yield every setting of a GRPOConfig that splitroll cannot honour.

    TRL's own vLLM and everything about it is refused, also where TRL would merely ignore it.
    """
    for field in fields(args):
        value, default = getattr(args, field.name), _default(field)
        if value in (default, None, "", []) or field.name in _WITHOUT_EFFECT:
            continue
        if field.name in _OFF:
            yield Problem(field.name, repr(value), repr(default), _OFF[field.name])
        elif field.name.startswith("vllm_"):
            hint = "it belongs to TRL's own vLLM, which is not used: leave it out"
            yield Problem(field.name, repr(value), repr(default), hint)
    if args.world_size > 1:
        hint = "start the script without a launcher; the engines are the parallel part"
        yield Problem("number of processes", str(args.world_size), "1", hint)


def sampling_params(args: Any, eos_token_ids: Sequence[int]) -> SamplingParams:
    """Return what a GRPOConfig asks for, without a seed.

    Args:
        eos_token_ids: all tokens that end a completion for the trainer
            (`GRPOTrainer.eos_token_ids`); they end one for the engines too.

    Raises:
        ConfigError: with every value that the engines do not take, by its name in GRPOConfig.
    """
    asked = {
        "max_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": 0.0 if args.min_p is None else args.min_p,
        "repetition_penalty": args.repetition_penalty,
    }
    extra = dict(args.generation_kwargs or {})
    problems = [_refused_key(key) for key in extra if key not in _GENERATION_KEYS]
    extra = {key: value for key, value in extra.items() if key in _GENERATION_KEYS}
    if args.temperature == 0:
        hint = "raise it: the trainer divides its logits by it"
        problems.append(Problem("temperature", "0", "above 0", hint))
    params = SamplingParams()
    try:
        params = SamplingParams(**{**asked, **extra})
        ends = () if params.ignore_eos else tuple(eos_token_ids)
        stops = tuple(dict.fromkeys((*params.stop_token_ids, *ends)))
        params = SamplingParams(**{**asked, **extra, "stop_token_ids": stops})
    except InvalidRequest as exc:
        problems += [_renamed(problem, extra) for problem in exc.problems]
    if problems:
        raise ConfigError(problems)
    return params


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def _refused_key(key: str) -> Problem:
    near = difflib.get_close_matches(key, _GENERATION_KEYS, n=1)
    hint = _ELSEWHERE.get(key) or (f"did you mean {near[0]}?" if near else "leave it out")
    allowed = ", ".join(_GENERATION_KEYS)
    return Problem(f"generation_kwargs.{key}", "a setting that is not served", allowed, hint)


def _renamed(problem: Problem, extra: dict[str, Any]) -> Problem:
    name = problem.path.removeprefix("sampling.")
    path = f"generation_kwargs.{name}" if name in extra else _CONFIG_NAMES.get(name, name)
    return Problem(path, problem.found, problem.allowed, problem.hint)
