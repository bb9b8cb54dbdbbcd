"""What one group has so far, and the pieces of work that carry it on."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from splitroll.dispatch.allocator import Allocator, Piece
from splitroll.dispatch.assembly import GroupWork, Leg, assemble, can_segment
from splitroll.dispatch.books import DecodeTicket, PrefillTicket
from splitroll.engines.protocol import DecodeOutput, Engine, Tokens
from splitroll.errors import InvalidRequest, SplitrollError
from splitroll.handoff.handle import KvHandle
from splitroll.handoff.legs import NOTHING_YET, DecodeResult
from splitroll.types import RouteKind, Sample, version_spans


@dataclass(slots=True, eq=False)
class Listener:
    """Who follows the samples of a group while they are generated; see `Dispatcher.run`.

    Attributes:
        on_kv: called when KV of the prompt is on an engine that decodes.
        on_tokens: called with a sample's index and its next tokens, each once and in order.
        on_end: called with a sample's index, the sample, and the stop token or string that ended
            it.
        on_again: called with the index of a sample whose last tokens are generated again.
        dropped: samples that nobody waits for any more.
        running: requests that engines have now: the engine, and the sample's index.
    """

    on_kv: Callable[[], None] = lambda: None
    on_tokens: Callable[[int, Tokens], None] = lambda index, tokens: None
    on_end: Callable[[int, Sample, int | str | None], None] = lambda index, sample, reason: None
    on_again: Callable[[int], object] = lambda index: None
    dropped: set[int] = field(default_factory=set)
    running: dict[str, tuple[Engine, int]] = field(default_factory=dict)

    async def drop(self, index: int) -> None:
        """Let a sample end as it is; the others go on."""
        self.dropped.add(index)
        for request_id, (engine, mine) in list(self.running.items()):
            if mine == index:
                with contextlib.suppress(SplitrollError):
                    await engine.abort([request_id])


@dataclass(slots=True, eq=False)
class Progress:
    """What one group has so far.

    Attributes:
        begun: samples that are to go on: given so, or after a segment; `begun_s`: when it ended.
        sent: tokens that were passed on since what is in `begun`.
        may_end_early: an engine may have been told to end samples of this attempt.
        lost: why it cannot be completed, though engines could try again.
        ending: its caller wants what there is, and no more.
    """

    work: GroupWork
    piece: Piece
    accepted_s: float
    weight_version: int
    begun: dict[int, Sample] = field(default_factory=dict)
    begun_s: dict[int, float] = field(default_factory=dict)
    done: dict[int, Sample] = field(default_factory=dict)
    listener: Listener = field(default_factory=Listener)
    sent: defaultdict[int, list[Tokens]] = field(default_factory=lambda: defaultdict(list))
    causes: list[str] = field(default_factory=list)
    avoid: set[str] = field(default_factory=set)
    refused: InvalidRequest | None = None
    engine_died: bool = False
    interrupted: bool = False
    may_end_early: bool = False
    lost: str | None = None
    ending: bool = False
    on_sample: Callable[[], object] = lambda: None
    recomputed_tokens: int = 0

    @property
    def missing(self) -> list[int]:
        return [i for i in range(self.work.n) if i not in self.done]

    def finish(self, index: int, sample: Sample, stop_reason: int | str | None = None) -> None:
        """Note a sample that is done, and tell whoever waits for it."""
        self.done[index] = sample
        self.listener.on_end(index, sample, stop_reason)

    def keep_sent(self, index: int, leg: Leg) -> None:
        """Go on from the tokens that were passed on of a request that failed: what has been said
        is not taken back."""
        pieces = self.sent.pop(index, [])
        if pieces and pieces[-1].last:  # why it ended was not said
            pieces.pop()
            self.listener.on_again(index)
        if not pieces:
            return
        if not (self.work.goes_on and can_segment(self.work.sampling)):
            self.lost = "a stream cannot go on in another request with what it asks for"
            return
        versions = [piece.weight_version for piece in pieces for _ in piece.token_ids]
        output = DecodeOutput(
            token_ids=tuple(token for piece in pieces for token in piece.token_ids),
            logprobs=tuple(value for piece in pieces for value in piece.logprobs),
            text="".join(piece.text for piece in pieces),
            finish_reason="abort",
            cached_tokens=0,
            wait_s=0.0,
            prefill_s=0.0,
            decode_s=0.0,
            weight_versions=version_spans(versions),
        )
        sample = assemble(self.work, index, leg, output, self.begun.get(index))
        if len(sample.token_ids) < self.work.max_tokens(index):
            self.begun[index] = sample
        else:
            self.finish(index, replace(sample, finish_reason="length"))


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

    def leg(
        self, decode: str, request_id: str, leader: str, result: DecodeResult, progress: Progress
    ) -> Leg:
        """Return how the sample of a request came to be on an engine."""
        kind, handle, waited_s = self.kind, self.handle, 0.0
        if request_id != leader and handle is not None:
            kind = RouteKind.SHARED
            waited_s = result.waited_s.get(leader, 0.0)
        prefill = decode if handle is None else handle.prefill_engine
        moved_s = None
        if self.moved is not None:
            prefill, moved_s = self.moved
        return Leg(
            kind=kind,
            prefill=prefill,
            decode=decode,
            prefill_s=0.0 if handle is None else handle.elapsed_s,
            started_s=self.started_s,
            accepted_s=progress.accepted_s,
            leader_waited_s=waited_s,
            moved_s=moved_s,
            weight_version=progress.weight_version,
            why=self.why,
        )


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
