"""A KV handle: the right to pull one prompt's KV, once, in time, at one weight version."""

from __future__ import annotations

from collections.abc import Callable

from splitroll.engines.protocol import KvParams
from splitroll.errors import HandleRefused


class KvHandle:
    """What a prefill leg returns.

    Attributes:
        prefill_engine: name of the engine that holds the KV.
        weight_version: of the weights that computed it.
        born_s: when its lease began, on the dispatcher's clock, or a little earlier.
        elapsed_s: how long the prefill leg took.
    """

    def __init__(
        self,
        *,
        prefill_engine: str,
        params: KvParams,
        weight_version: int,
        born_s: float,
        max_age_s: float,
        elapsed_s: float,
    ) -> None:
        self.prefill_engine = prefill_engine
        self.weight_version = weight_version
        self.born_s = born_s
        self.elapsed_s = elapsed_s
        self._max_age_s = max_age_s
        self._params = params
        self._taken = False
        self._returned = False
        self._settled = False
        self._on_settled: Callable[[], None] | None = None

    def take(self, *, now_s: float, weight_version: int) -> KvParams:
        """Return the parameters for the decode leg; works once.

        Raises:
            HandleRefused: when it was taken before, is too old to be pulled before its lease
                ends, or was computed by other weights than the decode engine's.
        """
        if self._taken:
            raise HandleRefused(self.prefill_engine, "the handle has been used before")
        age_s = now_s - self.born_s
        if age_s > self._max_age_s:
            raise HandleRefused(
                self.prefill_engine,
                f"the handle is {age_s:.1f} s old; above {self._max_age_s:.1f} s its lease could "
                "end before it is pulled",
            )
        if weight_version != self.weight_version:
            raise HandleRefused(
                self.prefill_engine,
                f"the handle is of weight version {self.weight_version}, decode has "
                f"{weight_version}",
            )
        self._taken = True
        return self._params

    @property
    def taken(self) -> bool:
        """Whether a decode engine was given it."""
        return self._taken

    def give_back(self) -> KvParams | None:
        """Return the parameters to give the handle back with; None if that was done before."""
        if self._returned or self._settled:
            return None
        self._returned = self._taken = True
        return self._params

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call back once when the prefill engine no longer holds blocks for this handle."""
        self._on_settled = callback
        if self._settled:
            callback()

    def settle(self) -> None:
        """Note that the handle was pulled, given back, or died with its engine."""
        if not self._settled:
            self._settled = True
            if self._on_settled is not None:
                self._on_settled()
