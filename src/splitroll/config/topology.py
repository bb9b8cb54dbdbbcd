"""Which engines can exist, and which of them can hand KV to which: one table of rules, for every
KV backend. Pure; checked before anything starts.

What breaks when a rule is broken was read in vLLM 0.32 (`distributed/kv_transfer/kv_connector`),
and is told with each rule: few of these fail when an engine starts, most at the first handoff, some
hang, and some give wrong tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from splitroll.config.pools import Pool, pools
from splitroll.config.schema import Config
from splitroll.errors import Problem
from splitroll.model import ModelFacts
from splitroll.types import Role

MUST_MATCH = (
    "block_size",
    "dtype",
    "kv_cache_dtype",
    "hf_overrides",
    "quantization",
    "revision",
    "disable_hybrid_kv_cache_manager",
)
"""Engine arguments that make KV of one engine meaningless to another when they differ. Different
block sizes give wrong tokens without an error on CPU, and elsewhere after a partial prefix hit."""

NIXL, MOONCAKE, NAMED = "nixl", "mooncake", "connector"
"""A connector that is named answers with NIXL's handles, and is held to NIXL's rules."""


@dataclass(frozen=True, slots=True)
class KvRoles:
    """Which engines hand KV out, and which load it, by their role; none in a colocated fleet."""

    sources: frozenset[Role] = frozenset()
    loaders: frozenset[Role] = frozenset()


def kv_roles(config: Config) -> KvRoles:
    """Return which engines of a fleet take part in handoffs, and how."""
    if not config.disaggregation.enabled:
        return KvRoles()
    if config.dispatch.roles == "elastic":
        return KvRoles(frozenset(Role), frozenset(Role))
    return KvRoles(frozenset((Role.PREFILL, Role.BOTH)), frozenset((Role.DECODE, Role.BOTH)))


@dataclass(frozen=True, slots=True)
class Pair:
    """Engines of which one hands KV out, and one loads it."""

    source: Pool
    loader: Pool
    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class EngineRule:
    """What every engine must keep, whatever the backend.

    Attributes:
        found: says how a pool breaks it, with the key of its section that is wrong, or None.
        allowed, hint: as in `Problem`; `allowed` may name what would work.
    """

    name: str
    found: Callable[[Pool, ModelFacts], tuple[str, str] | None]
    allowed: Callable[[ModelFacts], str]
    hint: str


@dataclass(frozen=True, slots=True)
class PairRule:
    """What two engines must keep so that one can load the other's KV.

    Attributes:
        backends: that have the rule.
        key: of both sections, that the rule is about.
        broken: whether a pair breaks it.
        allowed: what would work.
    """

    name: str
    backends: tuple[str, ...]
    key: str
    broken: Callable[[Pair], bool]
    allowed: str
    hint: str


def _heads(pool: Pool, facts: ModelFacts) -> tuple[str, str] | None:
    size = pool.section.tensor_parallel_size
    return None if _is_whole(size, facts) else ("tensor_parallel_size", str(size))


def _is_whole(size: int, facts: ModelFacts) -> bool:
    fits = facts.num_kv_heads % size == 0 or size % facts.num_kv_heads == 0
    return facts.num_attention_heads % size == 0 and (fits or facts.is_mla)


def _layers(pool: Pool, facts: ModelFacts) -> tuple[str, str] | None:
    size = pool.section.pipeline_parallel_size
    if size == 1 or not facts.num_layers or size <= facts.num_layers:
        return None
    return "pipeline_parallel_size", str(size)


def _experts(pool: Pool, facts: ModelFacts) -> tuple[str, str] | None:
    if not pool.section.expert_parallel or facts.num_experts:
        return None
    return "expert_parallel", "true"


def _tensor_sizes(facts: ModelFacts) -> str:
    heads, kv_heads = facts.num_attention_heads, facts.num_kv_heads
    works = [str(size) for size in range(1, heads + 1) if _is_whole(size, facts)]
    told = f"a divisor of {heads} attention heads that divides {kv_heads} KV heads, or they it"
    return f"{told}: {', '.join(works)}"


ENGINE_RULES = (
    EngineRule(
        "heads are whole on every tensor-parallel rank",
        _heads,
        _tensor_sizes,
        "choose one of these for {model}",
    ),
    EngineRule(
        "every pipeline stage has a layer",
        _layers,
        lambda facts: f"1 to {facts.num_layers}, the layers of {facts.name}",
        "lower it",
    ),
    EngineRule(
        "experts are spread only where there are any",
        _experts,
        lambda facts: f"false: {facts.name} is no mixture of experts",
        "leave it out",
    ),
)


def _uneven(pair: Pair) -> bool:
    sizes = sorted(
        (pair.source.section.tensor_parallel_size, pair.loader.section.tensor_parallel_size)
    )
    return sizes[1] % sizes[0] != 0


def _replicated_source(pair: Pair) -> bool:
    source = pair.source.section.tensor_parallel_size
    loader = pair.loader.section.tensor_parallel_size
    return not pair.facts.is_mla and source > loader and source > pair.facts.num_kv_heads


def _in_stages(pair: Pair) -> bool:
    return (
        max(pair.source.section.pipeline_parallel_size, pair.loader.section.pipeline_parallel_size)
        > 1
    )


PAIR_RULES = (
    PairRule(
        # NIXL: the handshake fails at the first handoff. Mooncake: the decode request hangs.
        "whole ranks",
        (NIXL, MOONCAKE, NAMED),
        "tensor_parallel_size",
        _uneven,
        "sizes of which one divides the other",
        "KV is moved between whole numbers of ranks: change one of them",
    ),
    PairRule(
        # The handshake fails on an assertion without a text.
        "replicated heads",
        (NIXL, NAMED),
        "tensor_parallel_size",
        _replicated_source,
        "no more ranks than KV heads on an engine that hands KV to one with fewer ranks",
        "NIXL's connector cannot read KV heads that several ranks hold (one that is named is held "
        "to its rules): lower the larger size, raise the smaller one to it, or use "
        "transfer_backend: mooncake",
    ),
    PairRule(
        # A decode engine does not start; a prefill engine's KV has too few layers for its peer;
        # with roles for both, a stage may read blocks that are free already.
        "one stage",
        (NIXL, NAMED),
        "pipeline_parallel_size",
        _in_stages,
        "1, with NIXL",
        "NIXL's connector moves the KV of all layers at once (one that is named is held to its "
        "rules): use tensor parallelism, or transfer_backend: mooncake",
    ),
)


def topology_problems(config: Config, facts: ModelFacts) -> Iterator[Problem]:
    """Yield what the table says against a configuration."""
    found = pools(config)
    for pool in found:
        for rule in ENGINE_RULES:
            if (broken := rule.found(pool, facts)) is not None:
                key, value = broken
                hint = rule.hint.format(model=facts.name)
                yield Problem(f"{pool.path}.{key}", value, rule.allowed(facts), hint)
    if config.disaggregation.enabled:
        pairs = [Pair(source, loader, facts) for source, loader in handoffs(config)]
        yield from _pair_problems(config, pairs)
        yield from _match_problems(config)


def handoffs(config: Config) -> list[tuple[Pool, Pool]]:
    """Return every two pools between which KV may be moved, in that direction."""
    roles, found = kv_roles(config), pools(config)
    return [
        (source, loader)
        for source in found
        for loader in found
        if source.role in roles.sources
        and loader.role in roles.loaders
        and (source is not loader or source.replicas > 1)
    ]


def _pair_problems(config: Config, pairs: list[Pair]) -> Iterator[Problem]:
    backend = config.disaggregation.transfer_backend
    told: set[tuple[str, frozenset[str]]] = set()
    for rule in PAIR_RULES:
        for pair in pairs if backend in rule.backends else ():
            paths = frozenset((pair.source.path, pair.loader.path))
            if (rule.name, paths) in told or not rule.broken(pair):
                continue
            told.add((rule.name, paths))
            hint = rule.hint
            if pair.source.role is Role.DECODE or pair.loader.role is Role.PREFILL:
                hint += "; with dispatch.roles: strict no KV goes this way"
            yield Problem(_joint_path(pair, rule.key), _both(pair, rule.key), rule.allowed, hint)


def _match_problems(config: Config) -> Iterator[Problem]:
    if not (found := pools(config)):
        return  # told elsewhere
    first, *others = found
    mine = first.arguments(config)
    for name in MUST_MATCH:
        for other in others:
            theirs = other.arguments(config)
            if mine.get(name) == theirs.get(name):
                continue
            yield Problem(
                f"{_joint(first.path, other.path)}.engine.{name}",
                f"{mine.get(name, 'the default')} for {_called(first)} and "
                f"{theirs.get(name, 'the default')} for {_called(other)}",
                "the same value for all engines",
                "set it once, in the common `engine` section: KV is moved between engines as is",
            )


def _joint_path(pair: Pair, key: str) -> str:
    return f"{_joint(pair.source.path, pair.loader.path)}.{key}"


def _joint(one: str, other: str) -> str:
    if one == other:
        return one
    names = [path.removeprefix("disaggregation.") for path in (one, other)]
    return f"disaggregation.{{{','.join(names)}}}"


def _both(pair: Pair, key: str) -> str:
    source, loader = getattr(pair.source.section, key), getattr(pair.loader.section, key)
    if pair.source is pair.loader:
        return str(source)
    return (
        f"{source} for {_called(pair.source)}, which hands KV to {_called(pair.loader)} with "
        + (str(loader))
    )


def _called(pool: Pool) -> str:
    return pool.path.removeprefix("disaggregation.")
