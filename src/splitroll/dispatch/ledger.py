"""What was dispatched and what came of it: counted, explained, and told to the allocator."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from splitroll.dispatch.allocator import Allocator
from splitroll.dispatch.policy import GroupRoute
from splitroll.dispatch.prefix import block_hashes
from splitroll.dispatch.progress import Progress, Source
from splitroll.handoff.legs import DecodeResult
from splitroll.types import Sample

log = logging.getLogger(__name__)


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


class Ledger:
    """Keeps the counts of one dispatcher."""

    def __init__(self, allocator: Allocator) -> None:
        self.stats = DispatchStats()
        self._allocator = allocator
        self._noting: list[Callable[[Sample], None]] = []

    def on_sample(self, note: Callable[[Sample], None]) -> None:
        """Have every sample noted that ends from now on."""
        self._noting.append(note)

    def explain(self, route: GroupRoute) -> Mapping[str, Any]:
        """Return the estimates behind a route, and count what it is to save."""
        why = route.why
        told: dict[str, Any] = {"policy": why.policy}
        for name in ("local", "handoff", "moved"):
            if (estimate := getattr(why, name)) is not None:
                told[f"{name}_ms"] = round(1000 * estimate, 1)
        if why.local is not None and why.finish is not None:
            self.stats.saved_s += why.local - why.finish
        return told

    def note_sample(self, sample: Sample, decode: str, progress: Progress) -> None:
        """Note a sample that is done; one that ended by itself tells of lengths and of caches."""
        for note in self._noting:
            note(sample)
        self.stats.decodes[decode] += 1
        self.stats.routes[sample.route.kind.value] += 1
        if sample.finish_reason == "abort":
            return
        tokens = sample.prompt_token_ids + sample.token_ids[:-1]
        blocks = block_hashes(tokens, self._allocator.block_size, progress.work.cache_salt)
        number = self._allocator.books.number(decode)
        self._allocator.note_sample(number, progress.piece, len(sample.token_ids), blocks)

    def note_leg(
        self,
        result: DecodeResult,
        source: Source,
        decode: str,
        leader: str,
        prompt_tokens: int,
        progress: Progress,
    ) -> None:
        """Note a decode leg that is over, with what its leader's answer says of KV: moved, or found
        in the cache."""
        self.stats.handoffs += result.handed_off
        progress.recomputed_tokens += result.recomputed_tokens
        self.stats.recomputed_tokens += result.recomputed_tokens
        if result.recomputed_tokens:
            log.warning(
                "%s computed %d prompt tokens again that %s had handed off",
                decode,
                result.recomputed_tokens,
                source.handle and source.handle.prefill_engine,
            )
        output, books = result.outputs.get(leader), self._allocator.books
        if output is None or not output.token_ids:
            return
        if source.handle is None and source.ticket is not None:
            self._allocator.note_cached(source.ticket, output.cached_tokens)
        elif source.handle is not None and result.handed_off:
            pair = books.number(source.handle.prefill_engine), books.number(decode)
            self._allocator.observe_transfer(*pair, prompt_tokens, output.wait_s)
