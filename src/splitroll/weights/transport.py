"""How the bytes of a version reach the engines: one small interface over all ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from splitroll.weights.manifest import Manifest
from splitroll.weights.offer import Receiver, WeightOffer


class WritePlan(Protocol):
    """What a trainer rank needs to write its part; travels between the ranks as a value."""

    def write(self, rank: int, source: Any, checksums: Sequence[str]) -> Mapping[str, str]:
        """Write what a rank owns; blocks. Returns its checksums, of what is sent."""
        ...


class Outbox(Protocol):
    """One version on its way. Engines may load the offer from when it is readable."""

    @property
    def plan(self) -> WritePlan: ...

    @property
    def is_readable(self) -> bool: ...

    def offer(self, checksums: Sequence[str] = ()) -> WeightOffer:
        """Return where engines find it; they are to return these parameters' checksums."""
        ...

    def seal(self) -> None:
        """All ranks have written their part."""
        ...

    def abandon(self) -> None:
        """Let those that read it, and those that write it, stop."""
        ...


class Transport(Protocol):
    """Keeps the weights of the version that serves, for restarts and roll-backs, and takes the
    next."""

    @property
    def one_sender(self) -> bool:
        """Whether the first trainer rank sends all."""
        ...

    def begin(
        self,
        version: int,
        shares: Sequence[Manifest],
        writers: Sequence[int],
        receivers: Sequence[Receiver],
    ) -> Any:
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
