"""Engines that join and leave a running fleet.

Whoever joins serves only when it has the fleet's weights and every pair with it is proven; whoever
leaves is given nothing more, ends what it has, and is closed when no KV is wanted of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass

from splitroll.config.pools import Pool, pool_of, pools
from splitroll.config.schema import Config
from splitroll.dispatch.dispatcher import Dispatcher
from splitroll.engines.protocol import Engine
from splitroll.errors import ConfigError, Conflict, EngineDied, LegError, Problem
from splitroll.fleet.fleet import Fleet, Member, MemberState
from splitroll.placement import EngineSpec
from splitroll.rest import Rest
from splitroll.types import Role

PlaceMore = Callable[
    [Pool, int, Sequence[EngineSpec], Iterable[str]], Awaitable[tuple[EngineSpec, ...]]
]
"""Finds places for so many engines of a pool, beside those that are there, under new names."""

_POLL_S = 0.1
_NAMES = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.BOTH: "mixed"}


@dataclass(frozen=True, slots=True)
class Joined:
    """An engine that joined.

    Attributes:
        seconds: by phase. `start` is from its launch until it is up, of which vLLM's own loading
            and our warm-up are `load` and `warm_up`; then `weights` and `proof`.
    """

    name: str
    node_id: str
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Left:
    """An engine that left.

    Attributes:
        drain_s: from being given nothing more until it had nothing more.
        drained: whether it had, when its time was over; what it still had went on elsewhere.
    """

    name: str
    drain_s: float
    drained: bool


@dataclass(frozen=True, slots=True)
class ScaleReport:
    """What a call of `scale` did."""

    joined: tuple[Joined, ...]
    left: tuple[Left, ...]


class Scaler:
    """Changes how many engines of each role a fleet has; one change at a time."""

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        dispatcher: Dispatcher,
        rest: Rest,
        place_more: PlaceMore,
        check_copy: Callable[[], None],
    ) -> None:
        self._rest = rest
        self._config = config
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._place_more = place_more
        self._check_copy = check_copy
        self._changing = asyncio.Lock()

    async def scale(self, wanted: Mapping[Role, int], timeout_s: float) -> ScaleReport:
        """Make the engines of each role as many as wanted; roles that are not named stay.

        Raises:
            ConfigError: that cannot be, or not here; nothing was changed.
            Conflict: nor in the state that the fleet is in.
            EngineStartError, ProofError: an engine could not join; the others did.
        """
        if not (isinstance(timeout_s, int | float) and 0 <= timeout_s < math.inf):
            found, allowed = f"timeout_s={timeout_s!r}", "seconds, 0 or more"
            raise ConfigError([Problem("scale", found, allowed, "give a number")])
        async with self._changing, self._alone(timeout_s):
            if problems := list(self._problems(wanted)):
                raise ConfigError(problems)
            specs: list[EngineSpec] = []
            leaving: list[str] = []
            async with self._fleet.placing:
                members_now = self._fleet.members.values()
                present = [m.spec for m in members_now if m.state is not MemberState.FAILED]
                taken = {*self._fleet.departed, *self._fleet.members}
                for role, count in wanted.items():
                    members = self._members(role)
                    for path, more in self._lacking(role, count - len(members)).items():
                        pool, beside = pool_of(self._config, path), [*present, *specs]
                        specs += await self._place_more(pool, more, beside, taken)
                    leaving += [member.spec.name for member in members[count:]]
                    leaving += [member.spec.name for member in self._given_up(role)]
                if specs:
                    self._check_copy()
                for spec in specs:
                    self._fleet.admit(spec)
            # First those that join, so that there is room for what the others leave behind.
            joining = [self._join(spec) for spec in specs]
            try:
                joined = await asyncio.gather(*joining, return_exceptions=True)
            finally:
                for spec in specs:  # of a task that is cancelled before it begins, nothing runs
                    self._fleet.dismiss(spec.name)
            for outcome in joined:
                if isinstance(outcome, BaseException):
                    raise outcome
            left = await asyncio.gather(*(self._leave(name, timeout_s) for name in leaving))
        return ScaleReport(tuple(one for one in joined if isinstance(one, Joined)), tuple(left))

    @contextlib.asynccontextmanager
    async def _alone(self, timeout_s: float) -> AsyncGenerator[None, None]:
        """Keep weight updates out: who takes part in one must not change in the middle of it.

        Raises:
            Conflict: the fleet does not serve, or an update is under way and does not end.
        """
        found = None
        try:
            async with asyncio.timeout(timeout_s):
                await self._rest.idle()
        except TimeoutError:
            found = f"a weight update that has not ended in {timeout_s:g} s"
            hint = "wait for it, or give a longer timeout_s"
        if self._fleet.is_closing:
            found, hint = "a closed fleet", "open another one"
        elif self._dispatcher.barrier.is_fenced:
            found = "a fleet that a failed weight update has fenced"
            hint = "push weights first: whoever joins must know what to serve"
        elif self._rest.keeps_still:
            found = "paused with what is under way kept"
            hint = "resume first: engines that stand still prove nothing, and end nothing"
        if found is not None:
            raise Conflict([Problem("scale", found, "a fleet that serves", hint)])
        with self._fleet.scaling():
            yield

    def _given_up(self, role: Role) -> list[Member]:
        """Return a role's engines that will not come back."""
        members = self._fleet.members.values()
        return [m for m in members if m.spec.role is role and m.state is MemberState.FAILED]

    def _members(self, role: Role) -> list[Member]:
        """Return a role's members that serve or will, those that are to leave first last."""
        gone = (MemberState.LEAVING, MemberState.FAILED)
        mine = [
            member
            for member in self._fleet.members.values()
            if member.spec.role is role and member.state not in gone
        ]
        return sorted(mine, key=lambda m: (m.state is not MemberState.READY, _number(m.spec.name)))

    def _lacking(self, role: Role, count: int) -> Mapping[str, int]:
        """Return which groups so many engines are added to: those that lack some, then the last."""
        mine = [pool for pool in pools(self._config) if pool.role is role]
        have = Counter(member.spec.pool for member in self._members(role))
        lacking: Counter[str] = Counter()
        for _ in range(count):
            lacks = (pool for pool in mine if have[pool.path] < pool.replicas)
            pool = next(lacks, mine[-1])
            have[pool.path] += 1
            lacking[pool.path] += 1
        return lacking

    def _problems(self, wanted: Mapping[Role, int]) -> Iterator[Problem]:
        split = self._config.disaggregation.enabled
        for role, count in wanted.items():
            path = f"scale({_NAMES[role]}={count!r})"
            if type(count) is not int or count < 0:
                yield Problem(path, repr(count), "0 or more engines", "give a whole number")
            elif not any(pool.role is role for pool in pools(self._config)):
                known = ", ".join(dict.fromkeys(_NAMES[p.role] for p in pools(self._config)))
                hint = "open the fleet with an engine of that role, or scale another one"
                yield Problem(path, "no such engines in the configuration", known, hint)
        after = {role: wanted.get(role, len(self._members(role))) for role in Role}
        if not all(type(count) is int for count in after.values()):
            return
        either = after[Role.BOTH]
        strict = split and self._config.dispatch.roles == "strict"
        enough = sum(after.values()) > 0
        if strict:
            enough = after[Role.PREFILL] + either > 0 and after[Role.DECODE] + either > 0
        if not enough:
            found = ", ".join(f"{after[role]} {_NAMES[role]}" for role in Role)
            allowed = "an engine of each role, or for both" if strict else "an engine at least"
            yield Problem("scale", found, allowed, "keep one; close the rollout to end them all")

    async def _join(self, spec: EngineSpec) -> Joined:
        return Joined(spec.name, spec.node_id, await self._fleet.join(spec.name))

    async def _leave(self, name: str, timeout_s: float) -> Left:
        begun_s = time.monotonic()
        try:
            engine = await self._fleet.take_out(name)
            drained = engine is None or await self._drained(name, engine, timeout_s)
        except BaseException:
            self._fleet.put_back(name)
            raise
        took_s = time.monotonic() - begun_s
        await self._fleet.part(name)
        return Left(name, took_s, drained)

    async def _drained(self, name: str, engine: Engine, timeout_s: float) -> bool:
        """Wait until an engine has no work and holds no KV for others; False if it still does."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    with contextlib.suppress(LegError):  # asked again
                        load = await engine.load()
                        busy = load.running or load.waiting or load.pinned
                        if not busy and name not in self._dispatcher.load:
                            return True
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return False
        except EngineDied:
            return True  # whatever it had is tried again elsewhere


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
