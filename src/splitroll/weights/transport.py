"""How the bytes of a version reach the engines: one small interface over all ways."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from splitroll.weights.manifest import Manifest
from splitroll.weights.offer import WeightOffer


class Outbox(Protocol):
    """One version on its way.

    `write` runs in a thread. Engines may load the offer from when `readable` is set.
    """

    readable: threading.Event

    def offer(self, checksums: Sequence[str] = ()) -> WeightOffer:
        """Return where engines find it; they are to return these parameters' checksums."""
        ...

    def write(self, source: Any, checksums: Sequence[str]) -> Mapping[str, str]:
        """Write all of it; returns the checksums asked for, of what is sent."""
        ...

    def abandon(self) -> None:
        """Let those that read it, and the writer, stop waiting."""
        ...


class Transport(Protocol):
    """Keeps the weights of the version that serves, for restarts and roll-backs, and takes the
    next."""

    def begin(self, version: int, shares: Sequence[Manifest], writers: Sequence[int]) -> Any:
        """Return the outbox of a version; shares and process ids by trainer rank."""
        ...

    def commit(self, outbox: Any) -> None:
        """The fleet serves it: what served before may go."""
        ...

    def discard(self, outbox: Any) -> None:
        """The fleet does not serve it."""
        ...

    def current(self) -> WeightOffer | None:
        """Return where the version that serves is; None before the first update."""
        ...

    def read(self) -> Iterator[tuple[str, Any]]:
        """Yield its parameters; none before the first update."""
        ...

    def close(self) -> None: ...
