"""What one group has so far, and the pieces of work that carry it on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from splitroll.dispatch.allocator import Allocator, Piece
from splitroll.dispatch.assembly import GroupWork, Leg, assemble
from splitroll.dispatch.books import DecodeTicket, PrefillTicket
from splitroll.engines.protocol import Engine
from splitroll.errors import InvalidRequest
from splitroll.handoff.handle import KvHandle
from splitroll.handoff.legs import NOTHING_YET
from splitroll.types import RouteKind, Sample


@dataclass(slots=True)
class DispatchStats:
    """What was dispatched, by engine name where it is a Counter.

    Attributes:
        routes: samples by the route that completed them; see `RouteKind`.
        moves: of samples to another engine with their KV: between two segments or two turns.
        saved_s: estimated seconds by which the chosen routes were to end sooner than the best ones
            without a handoff; negative where a policy hands off in spite of them.
    """

    prefills: Counter[str] = field(default_factory=Counter)
    decodes: Counter[str] = field(default_factory=Counter)
    routes: Counter[str] = field(default_factory=Counter)
    handoffs: int = 0
    moves: int = 0
    saved_s: float = 0.0
    retries: int = 0
    recomputed_tokens: int = 0


@dataclass(slots=True)
class Progress:
    """What one group has so far.

    Attributes:
        begun: samples that are to go on: given so, or after a segment; `begun_s`: when it ended.
        running: requests that engines have now.
        ending: its caller wants what there is, and no more.
    """

    work: GroupWork
    piece: Piece
    accepted_s: float
    weight_version: int
    begun: dict[int, Sample] = field(default_factory=dict)
    begun_s: dict[int, float] = field(default_factory=dict)
    done: dict[int, Sample] = field(default_factory=dict)
    running: dict[str, Engine] = field(default_factory=dict)
    causes: list[str] = field(default_factory=list)
    avoid: set[str] = field(default_factory=set)
    refused: InvalidRequest | None = None
    engine_died: bool = False
    interrupted: bool = False
    ending: bool = False
    on_sample: Callable[[], object] = lambda: None
    recomputed_tokens: int = 0

    @property
    def missing(self) -> list[int]:
        return [i for i in range(self.work.n) if i not in self.done]


class Places:
    """The load of some samples of a piece on one engine, each taken off once."""

    def __init__(
        self,
        allocator: Allocator,
        clock: Callable[[], float],
        piece: Piece,
        engine: int,
        indices: Sequence[int],
    ) -> None:
        self._allocator = allocator
        self._clock = clock
        self.piece = piece
        self.indices = tuple(indices)
        self._tickets: dict[int, DecodeTicket] = {}
        self.take(engine)

    def release(self, index: int) -> None:
        self._allocator.books.end_decode(self._tickets[index], self._clock())

    def take(self, engine: int) -> None:
        """Count the load of all samples on an engine."""
        self.engine = engine
        now = self._clock()
        self._tickets = {
            index: self._allocator.begin_decode(engine, self.piece, now) for index in self.indices
        }

    def close(self) -> None:
        for index in self._tickets:
            self.release(index)


@dataclass(eq=False, slots=True)
class Crossing:
    """KV on its way from one engine to another: from asking for a prefill until it is decoded."""

    task: asyncio.Task[Any]
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """Where the KV of a decode leg comes from.

    Attributes:
        handle: None computes the prompt on the decode engine, as far as it is not in its cache.
        kind: of the samples' routes; siblings of a leader are shared.
        ticket: the load of computing the prompt, where it was counted before.
        moved: (engine that its cached part was moved from before, seconds that this took).
    """

    handle: KvHandle | None
    kind: RouteKind
    started_s: float
    why: Mapping[str, Any]
    crossing: Crossing | None = None
    ticket: PrefillTicket | None = None
    moved: tuple[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a segment has just ended, and the handle to what was generated, if there is one."""

    engine: Engine
    handle: KvHandle | None


def ended_early(progress: Progress, index: int) -> Sample:
    """Return a sample that was stopped, with what was generated before."""
    begun = progress.begun.get(index)
    if begun is not None:
        return replace(begun, finish_reason="abort")
    at_s = progress.accepted_s
    leg = Leg(RouteKind.LOCAL, "", "", 0.0, at_s, at_s, 0.0, progress.weight_version, {})
    return assemble(progress.work, index, leg, NOTHING_YET, None)
