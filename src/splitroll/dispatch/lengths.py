"""How many tokens a sample will have: from finished siblings, earlier samples of the same prompt,
and all others. Pure.
"""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict, deque
from collections.abc import Hashable

_KEPT = 4096
"""Finished samples that are remembered for each kind of max_tokens."""
_KIND_BITS = 3
"""Of max_tokens, that tell kinds apart: those within a quarter to an eighth are of one."""
_PROMPTS_KEPT = 65_536
_REFRESH = 64
_REFRESH_SHARE = 16
"""What is known is reckoned anew when it has grown by 1/16, or by 64 samples."""
_UNKNOWN_SHARE = 0.5
"""Of max_tokens, that a sample is thought to need before any has finished."""
_PRIOR_SAMPLES = 2.0
"""How many samples of the prompt itself weigh as much as what is known of all others."""
_RATIO_RANGE = (0.25, 4.0)


class LengthModel:
    """Learns lengths; asked for the expected rest of a sample at any age."""

    def __init__(self) -> None:
        self._history: dict[int, _History] = {}
        self._prompts: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def observe(self, prompt: Hashable, max_tokens: int, tokens: int) -> None:
        """Note that a sample has ended by itself, or reached max_tokens."""
        self._history.setdefault(_kind(max_tokens), _History()).add(tokens)
        total, count = self._prompts.pop(prompt, (0.0, 0))
        self._prompts[prompt] = (total + tokens, count + 1)
        while len(self._prompts) > _PROMPTS_KEPT:
            self._prompts.popitem(last=False)

    def expected(self, prompt: Hashable, max_tokens: int, age: int = 0) -> float:
        """Return the tokens that a sample with `age` tokens is expected still to generate."""
        history = self._history.get(_kind(max_tokens))
        if history is None or not history.known:
            return max(1.0, _UNKNOWN_SHARE * (max_tokens - age))
        rest = history.rest(age)
        if (found := self._prompts.get(prompt)) is not None:
            total, count = found
            mean = history.mean
            own = (_PRIOR_SAMPLES * mean + total) / (_PRIOR_SAMPLES + count)
            low, high = _RATIO_RANGE
            rest *= min(high, max(low, own / mean))
        return min(max(1.0, rest), float(max(1, max_tokens - age)))


def _kind(max_tokens: int) -> int:
    """Return a number that limits near each other share: HTTP clients that set none get what the
    context leaves beside their prompt."""
    shift = max(0, max_tokens.bit_length() - _KIND_BITS)
    return max_tokens >> shift << shift


class _History:
    """Lengths of the last finished samples, for conditional means."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=_KEPT)
        self._sorted: list[int] = []
        self._sums: list[int] = []
        self._fresh = 0

    @property
    def known(self) -> bool:
        return bool(self._lengths)

    @property
    def mean(self) -> float:
        self._refresh()
        return max(1.0, self._sums[-1] / len(self._sorted))

    def add(self, tokens: int) -> None:
        self._lengths.append(tokens)
        self._fresh += 1

    def rest(self, age: int) -> float:
        """Return the mean of (length - age) over those longer than age; of the longest known, how
        much longer it was than half of its age where none is."""
        self._refresh()
        at = bisect.bisect_right(self._sorted, age)
        longer = len(self._sorted) - at
        if not longer:
            return max(1.0, age / 2)
        before = self._sums[at - 1] if at else 0
        return (self._sums[-1] - before) / longer - age

    def _refresh(self) -> None:
        if self._fresh >= min(_REFRESH, 1 + len(self._sorted) // _REFRESH_SHARE):
            self._sorted = sorted(self._lengths)
            self._sums = list(itertools.accumulate(self._sorted))
            self._fresh = 0
