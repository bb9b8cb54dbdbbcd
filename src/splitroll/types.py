"""The values that travel through a rollout: what is asked, and what comes back."""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from splitroll.errors import InvalidRequest, Problem


class Role(enum.Enum):
    """What an engine does for a group."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class RouteKind(enum.Enum):
    """How a sample came by the KV of its prompt."""

    SPLIT = "split"
    """It led its group: the KV was computed on the prefill engine and moved."""
    SHARED = "shared"
    """It joined a leader on the same engine and reused the KV that the leader moved."""
    LOCAL = "local"
    """The engine that decoded it also computed its prompt's KV."""
    MIGRATED = "migrated"
    """It moved to another engine, and its KV with it: between two segments, or between two turns,
    before the new part of its prompt was computed there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample, with vLLM's names and meanings.

    Attributes:
        seed: seed of the whole call; each sample's own seed is derived from it, the
            prompt's id and the sample's index. None draws one at random.
        stop: strings that end a sample; they are not part of its text.
    """

    max_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, kind in (("stop", str), ("stop_token_ids", int)):
            value: Any = getattr(self, name)
            if not isinstance(value, Sequence) or isinstance(value, str):
                raise InvalidRequest(
                    [Problem(f"sampling.{name}", repr(value), "a list", "write a list")]
                )
            if not all(type(item) is kind for item in value):
                allowed = f"a list of {kind.__name__}"
                raise InvalidRequest(
                    [Problem(f"sampling.{name}", repr(value), allowed, "correct it")]
                )
            if "" in value:
                hint = "leave it out: it would match everywhere"
                raise InvalidRequest([Problem("sampling.stop", "''", "texts, not empty", hint)])
            object.__setattr__(self, name, tuple(value))
        problems = [problem for rule in _SAMPLING_RULES if (problem := rule(self)) is not None]
        if problems:
            raise InvalidRequest(problems)


@dataclass(frozen=True, slots=True)
class _Range:
    """The rule that a numeric field lies in a range."""

    name: str
    low: float
    high: float = math.inf
    open_low: bool = False
    whole: bool = False

    def __call__(self, params: SamplingParams) -> Problem | None:
        value = getattr(params, self.name)
        kinds = (int,) if self.whole else (int, float)
        good_type = isinstance(value, kinds) and not isinstance(value, bool)
        if (
            good_type
            and math.isfinite(value)
            and self.low <= value <= self.high
            and not (self.open_low and value == self.low)
        ):
            return None
        kind = "a whole number" if self.whole else "a number"
        low = f"{'above' if self.open_low else 'from'} {self.low:g}"
        high = "" if self.high == math.inf else f" to {self.high:g}"
        return Problem(
            f"sampling.{self.name}", repr(value), f"{kind} {low}{high}", "choose one in that range"
        )


def _min_tokens_fit(params: SamplingParams) -> Problem | None:
    bounds: list[Any] = [params.min_tokens, params.max_tokens]
    if not all(isinstance(bound, int) for bound in bounds) or bounds[0] <= bounds[1]:
        return None
    return Problem(
        "sampling.min_tokens",
        str(params.min_tokens),
        f"at most max_tokens, which is {params.max_tokens}",
        "lower min_tokens or raise max_tokens",
    )


def _seed_fits(params: SamplingParams) -> Problem | None:
    if params.seed is None:
        return None
    return _Range("seed", 0, whole=True)(params)


_SAMPLING_RULES = (
    _Range("max_tokens", 1, whole=True),
    _Range("temperature", 0.0, 2.0),
    _Range("top_p", 0.0, 1.0, open_low=True),
    _Range("top_k", 0, whole=True),
    _Range("min_p", 0.0, 1.0),
    _Range("repetition_penalty", 0.0, open_low=True),
    _Range("presence_penalty", -2.0, 2.0),
    _Range("frequency_penalty", -2.0, 2.0),
    _Range("min_tokens", 0, whole=True),
    _min_tokens_fit,
    _seed_fits,
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as token ids. `metadata` is the caller's own and is never read."""

    id: str
    token_ids: tuple[int, ...]
    text: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


def derive_seed(*parts: int | str) -> int:
    """Derive a seed in [0, 2**63) from parts; equal parts give equal seeds on any machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True)
class Route:
    """Where a sample was computed; `prefill` and `decode` are engine names.

    Attributes:
        decode: where it began to decode; `moved_to`: where it went on after a segment, in order.
        why: what the policy estimated when it chose: "policy"; "local_ms" and "handoff_ms", from
            then until all known work is done, by the best route without and with a handoff; and
            "moved_ms", by one that moves what is cached elsewhere first.
    """

    kind: RouteKind
    prefill: str
    decode: str
    moved_to: tuple[str, ...] = ()
    why: Mapping[str, Any] = field(default_factory=dict)

    @property
    def last(self) -> str:
        """The engine that it ended on."""
        return self.moved_to[-1] if self.moved_to else self.decode


@dataclass(frozen=True, slots=True)
class Timing:
    """Where a sample's time went, in seconds.

    Attributes:
        queued_s: from acceptance to the start of the leg that completed it.
        prefill_s: the prefill leg; of a local sample, from being scheduled to its first token.
        transfer_s: from reaching the decode engine until its prompt's KV was there to decode
            from: the pull of a leader, the wait for the leader of a sibling.
        decode_s: from its first token (split and shared: from its KV) to its last.
    """

    queued_s: float
    prefill_s: float
    transfer_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of a sample, all computed by weights of one version."""

    version: int
    start: int
    end: int


def version_spans(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """Return the spans of a version per token."""
    spans: list[VersionSpan] = []
    for i, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, i + 1)
        else:
            spans.append(VersionSpan(version, i, i + 1))
    return tuple(spans)


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a group.

    Attributes:
        id: the prompt's id.
        sample: index in the group, from 0.
        logprobs: one per token of `token_ids`, natural logarithm, of the distribution that
            the token was drawn from: after penalties, temperature, top-k, top-p and min-p.
        finish_reason: "stop" (EOS, a stop string or a stop token), "length" (truncated), or
            "abort": a weight update ended it early (`weights.in_flight: abort`); give its group
            to `generate` again to continue it.
        weight_version: of the weights that computed its last token.
        prefill_version: of the weights that computed its prompt's KV for its first token.
        weight_versions: of the weights that computed each of its tokens, as spans in order.
        score: what the task gave it, None where no task scored it.
    """

    id: str
    sample: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    finish_reason: str
    seed: int
    weight_version: int
    prefill_version: int
    weight_versions: tuple[VersionSpan, ...]
    route: Route
    timing: Timing
    score: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the sample as the JSON object of one line of a samples file."""
        row = {f.name: getattr(self, f.name) for f in fields(self)}
        row["route"] = {**asdict(self.route), "kind": self.route.kind.value}
        row["timing"] = {k: round(v, 6) for k, v in asdict(self.timing).items()}
        row["weight_versions"] = [asdict(span) for span in self.weight_versions]
        if self.score is None:
            del row["score"]
        return row


@dataclass(frozen=True, slots=True)
class Group:
    """All n samples of one prompt, in order of their index."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    recomputed_tokens: int = 0
    """Prompt tokens that a decode engine computed again although their KV had been offered,
    beyond the last token, which every handoff recomputes."""

    @property
    def id(self) -> str:
        return self.prompt.id

    @property
    def is_complete(self) -> bool:
        """Whether every sample ended by itself; see `Sample.finish_reason`."""
        return all(sample.finish_reason != "abort" for sample in self.samples)


@dataclass(frozen=True, slots=True)
class FailedGroup:
    """A group that no route could complete."""

    prompt: Prompt
    error: Exception

    @property
    def id(self) -> str:
        return self.prompt.id
