"""The order of a weight update over a fleet, as a pure state machine.

    gate -> settle -> pause -> load -> verify -> clear -> publish -> resume

Each phase is entered by the whole fleet at once and left when every engine has answered. All
engines or none: where one fails before any has changed, the others resume with the weights that
they have; where one fails later, all load the old version again (`rollback`) or the fleet stays
shut (`fence`). An engine that dies drops out, and is brought to the current version before it
serves again; so does one that fails while the old version is restored, or does not resume. A
version that no engine lived to publish is not published: it may be what killed them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

FLEET = "the fleet"
"""Stands for the fleet as a whole in phases that no engine takes part in."""


class Phase(enum.Enum):
    GATE = "gate"
    """No further work is let in."""
    SETTLE = "settle"
    """No KV handle is in flight: pulled, or cancelled on both sides."""
    PAUSE = "pause"
    """No engine computes."""
    LOAD = "load"
    """The trainer has written all, and every engine has loaded it."""
    VERIFY = "verify"
    CLEAR = "clear"
    """No cache holds anything that the old weights computed."""
    PUBLISH = "publish"
    """Every engine stamps what it computes with the new version."""
    RESUME = "resume"
    END = "end"


class Outcome(enum.Enum):
    PUBLISHED = "published"
    KEPT = "kept"
    """The update failed; the fleet serves the version that it had."""
    FENCED = "fenced"
    """The update failed; nothing serves until another one succeeds."""


_ORDER = tuple(Phase)
_OF_THE_FLEET = (Phase.GATE, Phase.SETTLE)
_NOTHING_CHANGED = (Phase.GATE, Phase.SETTLE, Phase.PAUSE)


@dataclass(frozen=True, slots=True)
class Done:
    """An engine, or the fleet, finished the phase."""

    who: str


@dataclass(frozen=True, slots=True)
class Failed:
    """An engine, or the fleet, could not finish the phase, and lives on."""

    who: str
    cause: str


@dataclass(frozen=True, slots=True)
class Died:
    """An engine is gone."""

    who: str


Event = Done | Failed | Died


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong first: where, when and why."""

    who: str
    phase: Phase
    cause: str


@dataclass(frozen=True, slots=True)
class Update:
    """One update under way; `after` an event it is another.

    Attributes:
        engines: that take part still.
        waiting: that have not finished the phase.
        fenced: the fleet was, when it began: its engines hold no version that can be served.
        restoring: the old version is being loaded again.
        lost: engines that live but can no longer be trusted: they are to be restarted.
        died: engines that died meanwhile.
        outcome: set at the end.
    """

    engines: frozenset[str]
    on_failure: Literal["rollback", "fence"]
    phase: Phase = Phase.GATE
    waiting: frozenset[str] = frozenset({FLEET})
    failures: tuple[Failure, ...] = ()
    fenced: bool = False
    restoring: bool = False
    lost: frozenset[str] = frozenset()
    died: frozenset[str] = frozenset()
    outcome: Outcome | None = None

    @classmethod
    def begin(
        cls,
        engines: Iterable[str],
        on_failure: Literal["rollback", "fence"],
        *,
        fenced: bool = False,
    ) -> Update:
        return cls(frozenset(engines), on_failure, fenced=fenced)

    def after(self, event: Event) -> Update:
        """Return the update after an event; one of nobody that it waits for changes nothing,
        but for a death, and nothing changes an update that ended."""
        if self.outcome is not None:
            return self
        match event:
            case Done(who):
                return self._without(who) if who in self.waiting else self
            case Died(who):
                if who not in self.engines:
                    return self
                dropped = replace(self, engines=self.engines - {who}, died=self.died | {who})
                return dropped._without(who)
            case Failed(who, cause):
                if who not in self.waiting:
                    return self
                failure = Failure(who, self.phase, cause)
                failed = replace(self, failures=(*self.failures, failure))
                if self.restoring or self.phase is Phase.RESUME:
                    failed = replace(failed, engines=self.engines - {who}, lost=self.lost | {who})
                return failed._without(who)

    def _without(self, who: str) -> Update:
        left = replace(self, waiting=self.waiting - {who})
        return left if left.waiting else left._leave()

    def _leave(self) -> Update:
        """Go on to the next phase, past phases that nobody takes part in."""
        if self.failures and not self.restoring and self.phase is not Phase.RESUME:
            if self.phase in _NOTHING_CHANGED and not self.fenced:
                return self._enter(Phase.RESUME)
            if self.on_failure == "fence":
                return replace(self, phase=Phase.END, outcome=Outcome.FENCED)
            return replace(self, restoring=True)._enter(Phase.LOAD)
        return self._enter(_ORDER[_ORDER.index(self.phase) + 1])

    def _enter(self, phase: Phase) -> Update:
        if phase is Phase.END:
            changed = not self.failures or all(f.phase is Phase.RESUME for f in self.failures)
            outcome = Outcome.PUBLISHED if changed else Outcome.KEPT
            return replace(self, phase=phase, waiting=frozenset(), outcome=outcome)
        who = frozenset({FLEET}) if phase in _OF_THE_FLEET else self.engines
        if phase is Phase.LOAD and who and not self.restoring:
            who |= {FLEET}
        entered = replace(self, phase=phase, waiting=who)
        return entered if who else self._end_with_nobody()

    def _end_with_nobody(self) -> Update:
        told = (Failure(FLEET, self.phase, "no engine is left that serves"),)
        left = replace(self, failures=self.failures or told)
        return left._enter(Phase.END)
