"""Every error that splitroll raises.

SplitrollError
├── ConfigError           the configuration or the request cannot work; nothing was started
│   ├── InvalidRequest    a prompt or its sampling parameters cannot be served
│   └── Conflict          it cannot be done now; at another time it can
├── FleetError            the fleet as a whole cannot start or go on
│   ├── EngineStartError  an engine did not come up
│   ├── EngineDied        an engine that was up is gone
│   ├── ProofError        a prefill/decode pair does not hand off KV correctly
│   ├── WeightUpdateFailed  an update did not reach every engine; the fleet is consistent
│   └── FleetFenced       an update failed, and nothing serves until one succeeds
├── LegError              one prefill or decode leg failed; the engine itself lives
│   ├── LegTimeout        it exceeded its limit
│   ├── KvLoadFailed      decode could not load the KV that prefill offered
│   └── HandleRefused     the KV handle is used, too old, or of another weight version
└── GroupFailed           a group could not be completed by any route
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MAX_TOLD = 30
"""Problems that a message spells out; all are in `ConfigError.problems`."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with what the user gave.

    Attributes:
        path: where, as a dotted path or a flag.
        found: what stands there.
        allowed: what may stand there.
        hint: what to do.
    """

    path: str
    found: str
    allowed: str
    hint: str

    def __str__(self) -> str:
        return f"{self.path}: found {self.found}; allowed: {self.allowed}; {self.hint}"


class SplitrollError(Exception):
    """Base of all errors raised by splitroll."""


class ConfigError(SplitrollError):
    """The configuration cannot work. Carries all problems at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        lines = [f"{head}:", *(f"  - {problem}" for problem in self.problems[:_MAX_TOLD])]
        if count > _MAX_TOLD:
            lines.append(f"  ... and {count - _MAX_TOLD} more")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class InvalidRequest(ConfigError):
    """A prompt or its sampling parameters cannot be served by this fleet."""


class Conflict(ConfigError):
    """What was asked for cannot be done in the state that the fleet is in."""


class FleetError(SplitrollError):
    """The fleet cannot start or go on."""


class EngineError(FleetError):
    """Something happened to one engine."""

    what = "failed"

    def __init__(self, engine: str, cause: str) -> None:
        self.engine = engine
        self.cause = cause
        super().__init__(f"engine {engine} {self.what}: {cause}")

    def __reduce__(self) -> tuple[type[EngineError], tuple[str, str]]:
        return type(self), (self.engine, self.cause)


class EngineStartError(EngineError):
    """An engine did not come up; `cause` is its own error."""

    what = "did not start"


class NoPlace(EngineStartError):
    """There is no room for an engine now; there may be later."""


class EngineDied(EngineError):
    """An engine that was up is gone."""

    what = "died"


class ProofError(FleetError):
    """A prefill/decode pair does not hand off KV, or hands off wrong KV.

    Attributes:
        proofs: what was seen of every pair (`splitroll.fleet.prove.PairProof`).
    """

    def __init__(self, message: str, proofs: Sequence[Any] = ()) -> None:
        self.proofs = tuple(proofs)
        super().__init__(message)


class WeightUpdateFailed(FleetError):
    """A weight update failed.

    Attributes:
        version: that was not published.
        serving: the version that the fleet serves, None when it is fenced.
        causes: what went wrong, each naming the engine, the phase, the parameter if one was at
            fault, and the cause.
    """

    def __init__(self, version: int, serving: int | None, causes: Sequence[str]) -> None:
        self.version = version
        self.serving = serving
        self.causes = tuple(causes)
        now = (
            "the fleet is fenced: push weights again"
            if serving is None
            else f"the fleet serves version {serving}"
        )
        super().__init__(f"weight version {version} failed: {'; '.join(self.causes)}; {now}")

    def __reduce__(self) -> tuple[type[WeightUpdateFailed], tuple[int, int | None, Any]]:
        return type(self), (self.version, self.serving, self.causes)


class FleetFenced(FleetError):
    """A weight update failed with `weights.on_failure: fence`; push weights again."""

    def __init__(self, cause: str) -> None:
        self.cause = cause
        super().__init__(f"the fleet is fenced since a weight update failed: {cause}")


class LegError(SplitrollError):
    """A prefill or decode leg failed on an engine that lives on."""

    what = "failed"

    def __init__(self, engine: str, cause: str) -> None:
        self.engine = engine
        self.cause = cause
        super().__init__(f"{engine}: {self.what}: {cause}")

    def __reduce__(self) -> tuple[type[LegError], tuple[str, str]]:
        return type(self), (self.engine, self.cause)


class LegTimeout(LegError):
    """A leg exceeded its time limit."""

    what = "exceeded its time limit"


class KvLoadFailed(LegError):
    """Decode could not load the KV that prefill offered."""

    what = "could not load the KV"


class HandleRefused(LegError):
    """A KV handle that must not be used: used before, too old, or of another weight version."""

    what = "refused the KV handle"


class GroupFailed(SplitrollError):
    """A group could not be completed by any route.

    Attributes:
        group_id: the prompt's id.
        causes: what went wrong at each attempt, first to last.
    """

    def __init__(self, group_id: str, causes: Sequence[str]) -> None:
        self.group_id = group_id
        self.causes = tuple(causes)
        super().__init__(f"group {group_id} failed: " + "; then ".join(self.causes))

    def __reduce__(self) -> tuple[type[GroupFailed], tuple[str, tuple[str, ...]]]:
        return type(self), (self.group_id, self.causes)
