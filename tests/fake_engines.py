"""Engines for tests of episodes: `run` is `Dispatcher.run` with made-up tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from splitroll.dispatch.assembly import GroupWork
from splitroll.types import Group, Route, RouteKind, Sample, Timing, VersionSpan, derive_seed

VOCAB = 1000


def place(work: GroupWork, index: int) -> tuple[int, int]:
    """Return sample and turn, from 0, that a work's sample is."""
    if work.episode_id is None:
        return index, 0
    _, sample, turn = work.prompt.id.rsplit("/", 2)
    return int(sample), int(turn)


@dataclass
class FakeEngines:
    """Draws tokens from a sample's seed, or says what it is told to; by sample and turn.

    Attributes:
        length: how many tokens are drawn, if there is room.
        says: the tokens themselves, cut to the room that there is.
        aborted: whether a weight update ends the turn early.
        before: is waited for before a group is generated.
        works: what was asked.
    """

    length: Callable[[int, int], int] = lambda sample, turn: 2
    says: Callable[[int, int], Sequence[int]] | None = None
    aborted: Callable[[int, int], bool] = lambda sample, turn: False
    before: Callable[[int, int], Awaitable[None]] | None = None
    works: list[GroupWork] = field(default_factory=list)

    async def run(self, work: GroupWork) -> Group:
        self.works.append(work)
        if self.before is not None:
            await self.before(*place(work, 0))
        return Group(work.prompt, tuple(self._sample(work, i) for i in range(work.n)))

    def _sample(self, work: GroupWork, index: int) -> Sample:
        seed = derive_seed(work.seed, index)
        at = place(work, index)
        drawn = [derive_seed(seed, i) % VOCAB for i in range(self.length(*at))]
        token_ids = tuple(self.says(*at) if self.says else drawn)
        full = len(token_ids) >= work.sampling.max_tokens
        token_ids = token_ids[: work.sampling.max_tokens]
        return Sample(
            id=work.prompt.id,
            sample=index,
            prompt_token_ids=work.prompt.token_ids,
            token_ids=token_ids,
            text="",
            logprobs=tuple(-0.5 - token / VOCAB for token in token_ids),
            finish_reason="abort" if self.aborted(*at) else "length" if full else "stop",
            seed=seed,
            weight_version=0,
            prefill_version=0,
            weight_versions=(VersionSpan(0, 0, len(token_ids)),),
            route=Route(RouteKind.LOCAL, "both-0", "both-0"),
            timing=Timing(0.0, 0.0, 0.0, 0.0),
        )
