"""The facade that trainers hold: open a fleet, generate groups, close."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from splitroll.config import Config, load_checked, load_config
from splitroll.config.router import outside_servers
from splitroll.config.rules import max_model_len
from splitroll.dispatch.assembly import GroupWork
from splitroll.dispatch.dispatcher import Dispatcher
from splitroll.dispatch.observe import observed
from splitroll.environment import AnyEnvironment, Encode, EnvironmentFactory, EpisodeGroup
from splitroll.episodes import EpisodeLimits, run_episodes
from splitroll.errors import ConfigError, FleetError, InvalidRequest, Problem
from splitroll.fleet.fleet import Fleet
from splitroll.groups import plan_groups
from splitroll.handoff.legs import Handoff
from splitroll.model import ModelFacts
from splitroll.opening import OnState, make_dispatcher, open_fleet
from splitroll.placement import check_devices
from splitroll.prompts import PromptLike, Tokenizer
from splitroll.rest import PauseMode
from splitroll.scaling import Scaler, ScaleReport
from splitroll.types import (
    FailedGroup,
    Group,
    Role,
    SamplingParams,
)
from splitroll.updater import Updater, UpdateReport

if TYPE_CHECKING:
    from splitroll.weights.ranks import TrainerRanks

_LEAST_QUEUED = 64
"""Groups of a call that are under way or wait at least, however few seats there are."""

OnError = Literal["raise", "yield"]
_Outcome = Group | EpisodeGroup | FailedGroup
_Run = Callable[[GroupWork], Awaitable[Group | EpisodeGroup]]


@dataclass(frozen=True, slots=True)
class EngineSummary:
    """One engine's part in a run; `prefills` and `decodes` count legs that completed."""

    name: str
    role: str
    prefills: int
    decodes: int
    restarts: int


@dataclass(frozen=True, slots=True)
class Activity:
    """What a fleet did since it was opened, from its engines' own counters.

    Attributes:
        kv_bytes: moved between engines for groups; start-up proofs are left out.
        computed_tokens: prompt tokens computed, by engine.
        recomputed_tokens: prompt tokens that decode computed although they had been handed off.
        routes: samples by the kind of their route; see `RouteKind`.
        moves: of samples to another engine, between two segments.
        estimated_saved_s: by which handoffs were to end the known work sooner than the best routes
            without one, as estimated when they were chosen; negative for a policy that splits in
            spite of its estimates, 0 for one that makes none.
    """

    handoffs: int
    kv_bytes: int
    recomputed_tokens: int
    retries: int
    computed_tokens: Mapping[str, int]
    engines: tuple[EngineSummary, ...]
    routes: Mapping[str, int] = field(default_factory=dict)
    moves: int = 0
    estimated_saved_s: float = 0.0


class Rollout:
    """A running rollout system. Make one with `Rollout.open`.

    The same object serves a split and a colocated fleet.
    """

    def __init__(
        self,
        config: Config,
        facts: ModelFacts,
        fleet: Fleet,
        dispatcher: Dispatcher,
        updater: Updater,
        handoff: Handoff,
        scaler: Scaler | None = None,
    ) -> None:
        self._scaler = scaler
        self.config = config
        self.facts = facts
        self.fleet = fleet
        self.dispatcher = dispatcher
        self._handoff = handoff
        self.last_update: UpdateReport | None = None
        self.updater = updater
        self.tokenizer = Tokenizer(facts.path)
        self._max_model_len = max_model_len(config, facts)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        *,
        overrides: Sequence[str] = (),
        on_state: OnState = lambda fleet: None,
        observe: bool = True,
    ) -> AsyncGenerator[Rollout, None]:
        """Start the engines, prove every prefill/decode pair, and close all at the end.

        Args:
            config: a Config, a mapping, a YAML file's path, or None for the defaults: the small
                model on one prefill and two decode engines on this machine.
            overrides: "dotted.path=value" strings.
            on_state: called when an engine's state changes, for progress displays.
            observe: whether to learn what work costs on each engine, from now on.

        Raises:
            ConfigError: with all problems, before Ray or an engine starts.
            EngineStartError: an engine did not come up; its own error.
            ProofError: a pair does not hand off KV.
        """
        config, facts = load_checked(config, overrides)
        check_devices(config)
        # Imported late: Ray takes a second, and a wrong configuration should be told at once.
        from splitroll.launching import open_launching

        async with open_launching(config, facts) as launching:
            config, launcher = launching.config, launching.launcher
            eventful = False
            try:
                opening = open_fleet(config, launching.specs, launcher, on_state)
                async with opening as (fleet, handoff):
                    dispatcher = make_dispatcher(config, fleet, handoff)
                    updater = Updater(
                        fleet,
                        dispatcher,
                        handoff,
                        config.weights,
                        checkpoint=facts.path,
                        fleet_id=launcher.fleet_id,
                        address=launching.address,
                        elsewhere=launching.elsewhere,
                    )
                    try:
                        async with contextlib.AsyncExitStack() as stack:
                            if observe:
                                watching = observed(fleet, dispatcher.allocator)
                                await stack.enter_async_context(watching)
                            scaler = None
                            if (place_more := launching.place_more) is not None:
                                scaler = Scaler(
                                    config,
                                    fleet,
                                    dispatcher,
                                    updater.rest,
                                    place_more,
                                    updater.check_copy,
                                )
                            yield cls(config, facts, fleet, dispatcher, updater, handoff, scaler)
                    finally:
                        await updater.close()
                        eventful = any(m.restarts or m.last_error for m in fleet.members.values())
            except FleetError:
                eventful = True  # its logs are wanted
                raise
            finally:
                if not eventful:
                    launcher.tidy()

    @overload
    def generate(
        self,
        prompts: Iterable[PromptLike],
        *,
        n: int = 1,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        on_error: OnError = "raise",
        over_sample: int = 0,
        environment: None = None,
    ) -> AsyncIterator[Group | FailedGroup]: ...

    @overload
    def generate(
        self,
        prompts: Iterable[PromptLike],
        *,
        n: int = 1,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        on_error: OnError = "raise",
        over_sample: int = 0,
        environment: AnyEnvironment,
        max_turns: int | None = None,
        encode: Encode | None = None,
    ) -> AsyncIterator[EpisodeGroup | FailedGroup]: ...

    @overload
    def generate(
        self,
        prompts: Iterable[PromptLike],
        *,
        n: int = 1,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        on_error: OnError = "raise",
        environment: AnyEnvironment | None = None,
        max_turns: int | None = None,
        encode: Encode | None = None,
    ) -> AsyncIterator[Group | EpisodeGroup | FailedGroup]: ...

    async def generate(
        self,
        prompts: Iterable[PromptLike],
        *,
        n: int = 1,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        on_error: OnError = "raise",
        over_sample: int = 0,
        environment: AnyEnvironment | None = None,
        max_turns: int | None = None,
        encode: Encode | None = None,
    ) -> AsyncIterator[Group | EpisodeGroup | FailedGroup]:
        """Generate n samples of every prompt; yields groups as they complete, in any order.

        With an environment each sample is an episode, and what is yielded are `EpisodeGroup`s:
        the first turns of a prompt are one group, and then every episode goes on by itself. Its
        budget of tokens is `max_tokens`, the environment's included.

        Args:
            prompts: texts, lists of token ids, chat messages, `Prompt`s, or mappings with one of
                "prompt", "messages", "prompt_token_ids" and, optionally, "id". Without ids,
                prompts are numbered "0", "1", .... All are read before the first is generated.
                A `Group` that a weight update ended early is continued: its samples keep their
                tokens, their number and their seeds; `sampling` counts what they have.
            n: samples per prompt, each with a seed of its own.
            sampling: how to sample: for all prompts, or a list with one for each; the defaults
                if None.
            on_error: "raise" ends everything at the first group that cannot be completed;
                "yield" yields a FailedGroup in its place and goes on.
            over_sample: how many of the prompts are beyond what is needed: once all others are
                complete, whichever they are, the rest is ended and yielded as it is, its samples
                with the reason "abort", to be given to `generate` again.
            environment: answers every turn of the model, or makes what does.
            max_turns: of the model in an episode; as many as its budget allows if None.
            encode: makes token ids of an environment's texts; the model's own tokenizer if None.

        Raises:
            InvalidRequest: with every prompt that cannot be served, before anything is generated.
            GroupFailed: see `on_error`.
        """
        sampling = sampling or SamplingParams()
        stop = asyncio.Event() if over_sample else None
        run = self._runner(environment, max_turns, encode, stop)
        # In a thread: encoding many texts must not keep the engines' answers waiting.
        works = await asyncio.to_thread(self.plan, prompts, n=n, sampling=sampling)
        _check_over_sample(over_sample, len(works), environment)
        needed = len(works) - over_sample
        waiting = iter(works)
        running: set[asyncio.Task[_Outcome]] = set()
        try:
            while True:
                while len(running) < self._most_groups(n):
                    work = next(waiting, None)
                    if work is None:
                        break
                    running.add(asyncio.create_task(_guarded(run, work, on_error)))
                if not running:
                    return
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    running.remove(task)  # one by one: the errors of the others are taken below
                    outcome = task.result()
                    needed -= isinstance(outcome, Group) and outcome.is_complete
                    if stop is not None and not needed:
                        stop.set()
                    yield outcome
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _most_groups(self, n: int) -> int:
        """Return how many groups may be under way, or wait, at once."""
        if (most := self.config.dispatch.max_queued_groups) is not None:
            return most
        seats = sum(engine.info.max_num_seqs for engine in self.fleet.ready())
        return max(_LEAST_QUEUED, 2 * seats // n)

    def plan(
        self,
        prompts: Iterable[PromptLike],
        *,
        n: int,
        sampling: SamplingParams | Sequence[SamplingParams],
    ) -> list[GroupWork]:
        """Turn prompts into groups, checked against the fleet's limits.

        Raises:
            InvalidRequest: with every prompt that cannot be served.
        """
        return plan_groups(
            prompts,
            n=n,
            sampling=sampling,
            tokenizer=self.tokenizer,
            max_model_len=self._max_model_len,
            vocab_size=self.facts.vocab_size,
        )

    def another_dispatcher(self, *overrides: str) -> Dispatcher:
        """Return a dispatcher over the same engines with other settings, for comparisons.

        Args:
            overrides: of the section `dispatch`, for instance "dispatch.policy=static".
        """
        config = load_config(self.config, overrides)
        return make_dispatcher(config, self.fleet, self._handoff)

    @property
    def weight_version(self) -> int:
        """Of the weights that the fleet serves; 0 are those of the model's checkpoint."""
        return self.fleet.weight_version

    async def update_weights(
        self,
        weights: Any,
        version: int | None = None,
        *,
        partial: bool = False,
        ranks: TrainerRanks | None = None,
    ) -> UpdateReport:
        """Give every engine the trainer's weights, all or none; see `weights` in the configuration.

        Work that is being generated meanwhile is treated as `weights.in_flight` says; work that
        waits is generated with the new weights. The tensors are read until this returns.

        Args:
            weights: a module (plain, FSDP, DDP, or a PeftModel, whose adapter is sent merged), a
                state dict, or an iterable of (name, tensor), with the checkpoint's names.
            version: of these weights, above the present one; one more than it if None.
            partial: some parameters only; the others stay as they are.
            ranks: this process's place among several trainer ranks, each of which calls
                `ranks.update_weights` with its share at the same time.

        Raises:
            ConfigError: with every difference between these weights and the engines', before
                anything is changed; or when an update is under way.
            WeightUpdateFailed: naming the engine, the parameter and the cause.
        """
        if outside := outside_servers(self.config):
            found = f"servers launched outside: {', '.join(outside)}"
            hint = "update them where they were launched"
            allowed = "servers that this rollout has started"
            raise ConfigError([Problem("update_weights", found, allowed, hint)])
        report = await self.updater.update(weights, version, partial=partial, ranks=ranks)
        self.last_update = report
        return report

    async def pause(self, mode: PauseMode = "wait") -> None:
        """Let nothing be generated until `resume`; returns when nothing is. What is asked for
        meanwhile waits; weights may be updated, after "keep" only with `weights.in_flight` other
        than "drain".

        Args:
            mode: what becomes of the samples that are under way: "wait" for them, "abort" them as
                they are, or "keep" them where they are. Their time limits go on meanwhile. After
                "keep" no engine joins, or comes back, before `resume`, unless all have died.

        Raises:
            ConfigError: a weight update is under way.
            TimeoutError: samples did not end within `weights.timeout_s`; all stays paused.
        """
        await self.updater.rest.pause(mode)

    async def resume(self) -> None:
        """Go on after `pause`; does nothing otherwise."""
        await self.updater.rest.resume()

    @property
    def is_paused(self) -> bool:
        return self.dispatcher.barrier.paused

    async def scale(
        self,
        *,
        prefill: int | None = None,
        decode: int | None = None,
        mixed: int | None = None,
        timeout_s: float = 600.0,
    ) -> ScaleReport:
        """Change how many engines there are of a role, while groups are generated. An engine that
        joins is one of the first group of its role that lacks one, else of the last; it serves once
        it has the fleet's weights and is proven with all others. One that leaves is given nothing
        more, and ends what it has.

        Args:
            mixed: engines for both, as all of a colocated fleet are.
            timeout_s: how long an engine that leaves may take to end what it has; after that its
                samples are generated anew elsewhere.

        Raises:
            ConfigError: with why that cannot be; nothing was changed.
            Conflict: nor in the state that the fleet is in: fenced, standing still, closed, or in a
                weight update that does not end.
            EngineStartError, ProofError: an engine could not join; the others did.
        """
        if self._scaler is None:
            hint = "start another router with other servers"
            found = repr(self.config.router.mode)
            raise ConfigError([Problem("router.mode", found, "'splitroll', to scale", hint)])
        asked = {Role.PREFILL: prefill, Role.DECODE: decode, Role.BOTH: mixed}
        wanted = {role: count for role, count in asked.items() if count is not None}
        return await self._scaler.scale(wanted, timeout_s)

    async def prove(self) -> None:
        """Prove every prefill/decode pair again, as at the start.

        Raises:
            ProofError: a pair does not hand off KV.
            FleetFenced: a weight update failed.
        """
        self.dispatcher.barrier.check_fence()
        await self.fleet.prove_all()

    async def activity(self) -> Activity:
        """Return what the fleet has done so far."""
        counters = await self.fleet.counters()
        stats = self.dispatcher.stats
        return Activity(
            handoffs=stats.handoffs,
            kv_bytes=sum(done.kv_bytes for done in counters.values()),
            recomputed_tokens=stats.recomputed_tokens,
            retries=stats.retries,
            computed_tokens={name: done.computed_tokens for name, done in counters.items()},
            routes=dict(stats.routes),
            moves=stats.moves,
            estimated_saved_s=stats.saved_s,
            engines=tuple(
                EngineSummary(
                    name=name,
                    role=member.spec.role.value,
                    prefills=stats.prefills[name],
                    decodes=stats.decodes[name],
                    restarts=member.restarts,
                )
                for name, member in {**self.fleet.departed, **self.fleet.members}.items()
            ),
        )

    def _runner(
        self,
        environment: AnyEnvironment | None,
        max_turns: int | None,
        encode: Encode | None,
        stop: asyncio.Event | None,
    ) -> _Run:
        """Return what generates one group, or one prompt's episodes.

        Raises:
            InvalidRequest: when an environment cannot be asked, or is missing.
        """
        problems = list(_environment_problems(environment, max_turns, encode))
        if problems:
            raise InvalidRequest(problems)
        if environment is None:
            return functools.partial(self._generate, stop=stop)
        return functools.partial(
            run_episodes,
            self.dispatcher.run,
            environment=environment,
            encode=encode or self.tokenizer.encode_part,
            limits=EpisodeLimits(
                timeout_s=self.config.limits.environment_timeout_s,
                vocab_size=self.facts.vocab_size,
                max_turns=max_turns,
            ),
        )

    async def _generate(self, work: GroupWork, stop: asyncio.Event | None) -> Group:
        group = await self.dispatcher.run(work, stop)
        return self._retold(group, work)

    def _retold(self, group: Group, work: GroupWork) -> Group:
        """Return a group whose samples' texts are decoded anew where they came in pieces: a
        character may lie across a border."""
        segment = self.config.dispatch.segment_tokens or math.inf
        if work.sampling.stop or (work.sampling.max_tokens <= segment and not work.begun):
            return group
        samples = tuple(
            replace(sample, text=self.tokenizer.decode(sample.token_ids))
            if len(sample.token_ids) > segment or sample.sample in work.begun
            else sample
            for sample in group.samples
        )
        return replace(group, samples=samples)


async def _guarded(run: _Run, work: GroupWork, on_error: OnError) -> _Outcome:
    try:
        return await run(work)
    except Exception as exc:  # a wall: one group's fault must not end the others
        if on_error == "raise":
            raise
        return FailedGroup(work.prompt, exc)


def _check_over_sample(over_sample: Any, prompts: int, environment: Any) -> None:
    if type(over_sample) is not int or not 0 <= over_sample < max(1, prompts):
        allowed = f"0 to {max(0, prompts - 1)}, fewer than there are prompts"
        hint = "it counts the prompts beyond those that you need"
        raise InvalidRequest([Problem("over_sample", repr(over_sample), allowed, hint)])
    if over_sample and environment is not None:
        hint = "leave one of them out: half an episode cannot be continued"
        allowed = "0, with an environment"
        raise InvalidRequest([Problem("over_sample", repr(over_sample), allowed, hint)])


def _environment_problems(environment: Any, max_turns: Any, encode: Any) -> Iterator[Problem]:
    for name, value in (("max_turns", max_turns), ("encode", encode)):
        if environment is None and value is not None:
            yield Problem(name, "given", "with an environment", "give one, or leave it out")
    if max_turns is not None and (type(max_turns) is not int or max_turns < 1):
        found, hint = repr(max_turns), "allow 1 or more, or leave it out"
        yield Problem("max_turns", found, "a whole number from 1", hint)
    asked = isinstance(environment, EnvironmentFactory) or hasattr(environment, "observe")
    if environment is not None and (isinstance(environment, type) or not asked):
        found = repr(environment)
        hint = "see splitroll.environment"
        yield Problem("environment", found, "an object with `observe` or `make`", hint)


def with_score(group: Group, score: Callable[[str], float]) -> Group:
    """Return the group with every sample's text scored."""
    samples = tuple(replace(sample, score=score(sample.text)) for sample in group.samples)
    return replace(group, samples=samples)
