"""A whole rollout step on virtual engines, with the allocator that real ones are driven by."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from splitroll.bench.workloads import EpisodeJob, GroupJob, Load
from splitroll.dispatch.allocator import Allocator, Piece
from splitroll.dispatch.books import DecodeTicket
from splitroll.dispatch.cost import StepCost
from splitroll.dispatch.policy import GroupRoute, Part
from splitroll.dispatch.prefix import BlockHash, block_hashes
from splitroll.sim.engine import Clock, Job, VirtualEngine
from splitroll.types import Role

_LEARN_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class FleetModel:
    """Virtual engines.

    Attributes:
        prefills, decodes: how many of each role.
        cost: of a step; `speeds`: by engine, factors on it (2.0 is half as fast), 1.0 for the rest.
        transfer: (seconds, seconds per byte) of moving KV.
    """

    prefills: int
    decodes: int
    cost: StepCost
    speeds: tuple[float, ...] = ()
    transfer: tuple[float, float] = (0.02, 1e-9)
    seats: int = 64
    num_blocks: int = 1440
    block_size: int = 32
    block_bytes: int = 737_280
    batch_tokens: int = 2048
    latency_s: float = 0.003
    """Between the dispatcher and an engine, each way."""


@dataclass(slots=True)
class SimResult:
    """What a simulated step came to, in virtual seconds.

    Attributes:
        work_bound_s: engine-seconds of the work, each prompt computed once and every token at the
            best efficiency that an engine showed, over engines.
        longest_bound_s: the longest sequence decoded alone on the fastest engine.
        routes: samples by "split", "shared", "local"; "migrated" counts moves.
        decision_s: real seconds of each decision.
    """

    makespan_s: float = 0.0
    work_bound_s: float = 0.0
    longest_bound_s: float = 0.0
    samples: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    routes: Counter[str] = field(default_factory=Counter)
    busy: list[float] = field(default_factory=list)
    decision_s: list[float] = field(default_factory=list)
    latencies: dict[str, float] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)

    @property
    def bound_s(self) -> float:
        return max(self.work_bound_s, self.longest_bound_s)

    @property
    def efficiency(self) -> float:
        """The lower bound over the makespan."""
        return self.bound_s / self.makespan_s


class Simulation:
    """One fleet; the allocator keeps what it learnt over several loads."""

    def __init__(
        self,
        model: FleetModel,
        policy: str = "adaptive",
        *,
        elastic: bool = True,
        segment_tokens: int | None = 256,
    ) -> None:
        self.model = model
        self.clock = Clock()
        self.allocator = Allocator(policy, elastic=elastic)
        self.engines: list[VirtualEngine] = []
        self._segment = segment_tokens if policy == "adaptive" and elastic else None
        roles = [Role.PREFILL] * model.prefills + [Role.DECODE] * model.decodes
        for index, role in enumerate(roles):
            speed = model.speeds[index] if index < len(model.speeds) else 1.0
            self.engines.append(
                VirtualEngine(
                    self.clock,
                    model.cost.scaled(speed),
                    seats=model.seats,
                    batch_tokens=model.batch_tokens,
                    num_blocks=model.num_blocks,
                    block_size=model.block_size,
                )
            )
            number = self.allocator.join(
                f"{role.value}-{index}",
                role,
                seats=model.seats,
                num_blocks=model.num_blocks,
                block_size=model.block_size,
                block_bytes=model.block_bytes,
                cost=model.cost,
            )
            self.allocator.set_up(number, True)
        self.transfer(0, len(self.engines) - 1, model.block_size)

    def run(self, load: Load) -> SimResult:
        """Generate a load to its end."""
        return _Step(self, load).run()

    def set_speed(self, engine: int, factor: float) -> None:
        """Change an engine's speed; the allocator has to find out."""
        self.engines[engine].cost = self.model.cost.scaled(factor)

    def transfer(self, prefill: int, decode: int, tokens: int) -> float:
        """Return what moving the KV of so many tokens takes, and tell the allocator."""
        constant, per_byte = self.model.transfer
        num_bytes = -(-tokens // self.model.block_size) * self.model.block_bytes
        seconds = constant + per_byte * num_bytes
        self.allocator.observe_transfer(prefill, decode, tokens, seconds)
        return seconds


@dataclass(slots=True, eq=False)
class _Sample:
    """One sequence on its way."""

    name: str
    length: int
    prompt: tuple[int, ...]
    prompt_tokens: int
    blocks: tuple[BlockHash, ...]
    done: int = 0
    on_end: Callable[[float], None] | None = None
    moved: bool = False


class _Step:
    """One load on a simulation's fleet."""

    def __init__(self, simulation: Simulation, load: Load) -> None:
        self._sim = simulation
        self._allocator = simulation.allocator
        self._clock = simulation.clock
        self._load = load
        self._result = SimResult()
        self._begun = simulation.clock.now
        self._seen: set[BlockHash] = set()
        self._unique = 0.0
        self._longest = 0.0
        self._learning = False

    def run(self) -> SimResult:
        sim, result = self._sim, self._result
        for engine in sim.engines:
            engine.busy_s = 0.0
        pieces = [(self._accept(group), group) for group in self._load.groups]
        for episode in self._load.episodes:
            self._start_turn(episode, 0, (), self._begun, fresh=True)
        # Longest expected first; of equal ones, in their order.
        order = sorted(pieces, key=lambda one: -one[0].expected * one[0].samples)
        for piece, group in order:
            self._send_group(piece, group, self._begun)
        self._learn()
        self._clock.run()
        best = min(engine.best_token_s for engine in sim.engines)
        decode = self._load.completion_tokens * best
        result.makespan_s = max(result.latencies.values()) - self._begun
        result.work_bound_s = (self._unique + decode) / len(sim.engines)
        result.longest_bound_s = self._longest
        result.samples = self._load.samples
        result.busy = [engine.busy_s for engine in sim.engines]
        result.left = self._allocator.books.load
        return result

    def _accept(self, group: GroupJob) -> Piece:
        cost = self._sim.model.cost
        tokens = len(group.prompt)
        piece = self._allocator.accept(
            group.id, group.prompt, len(group.lengths), self._load.max_tokens
        )
        seen = 0
        while seen < len(piece.blocks) and piece.blocks[seen] in self._seen:
            seen += 1
        self._seen.update(piece.blocks)
        offset = min(seen * self._sim.model.block_size, tokens - 1)
        self._unique += cost.prefill(tokens - offset, offset)
        longest = max(group.lengths)
        alone = cost.prefill(tokens) + longest * cost.decode_step(1, tokens + longest / 2)
        self._longest = max(self._longest, alone)
        return piece

    def _decide(self, piece: Piece, now: float, held_by: int = -1) -> GroupRoute:
        begun = time.perf_counter()
        route = self._allocator.decide(piece, now, held_by=held_by)
        self._result.decision_s.append(time.perf_counter() - begun)
        assert route is not None, "all engines are up"
        return route

    def _send_group(self, piece: Piece, group: GroupJob, now: float) -> None:
        samples = [
            _Sample(f"{group.id}/{i}", n, group.prompt, len(group.prompt), piece.blocks)
            for i, n in enumerate(group.lengths)
        ]
        self._send(piece, samples, now)

    def _send(self, piece: Piece, samples: Sequence[_Sample], now: float) -> None:
        route = self._decide(piece, now)
        begin = 0
        for part in route.parts:
            mine = samples[begin : begin + part.samples]
            begin += part.samples
            if part.is_local:
                self._decode(part.decode, piece, mine, now)
            else:
                self._split(part, piece, mine, now, again=len(route.parts) == 1)

    def _split(
        self, part: Part, piece: Piece, samples: Sequence[_Sample], now: float, *, again: bool
    ) -> None:
        allocator = self._allocator
        ticket = allocator.begin_prefill(part.prefill, piece, now)
        held = [allocator.begin_decode(part.decode, piece, now) for _ in samples]
        allocator.note_prompt(part.decode, piece)

        def prefilled(now: float) -> None:
            now += self._sim.model.latency_s
            allocator.books.end_prefill(ticket, now)
            for one in held:
                allocator.end_decode(one, piece, now)
            decode = part.decode
            if again and allocator.policy.name not in ("round_robin",):
                decode = self._decide(piece, now, held_by=part.prefill).parts[0].decode
            self._hand_over(part.prefill, decode, piece, samples, now, "split")

        job = Job(piece.prompt_tokens, piece.blocks, 0, on_prompt=prefilled)
        self._submit(part.prefill, job, now)

    def _hand_over(
        self,
        prefill: int,
        decode: int,
        piece: Piece,
        samples: Sequence[_Sample],
        now: float,
        kind: str,
    ) -> None:
        if prefill == decode:
            self._decode(decode, piece, samples, now)
            return
        seconds = self._sim.transfer(prefill, decode, piece.prompt_tokens)
        self._decode(decode, piece, samples, now, after_s=seconds, kind=kind)

    def _decode(
        self,
        engine: int,
        piece: Piece,
        samples: Sequence[_Sample],
        now: float,
        *,
        after_s: float = 0.0,
        kind: str = "local",
    ) -> None:
        """Let samples decode on an engine; with `after_s`, their prompt's KV comes by then."""
        allocator = self._allocator
        prefill = None if after_s else allocator.begin_prefill(engine, piece, now)
        allocator.note_prompt(engine, piece)
        for index, sample in enumerate(samples):
            rest = sample.length - sample.done
            tokens = rest if self._sim._segment is None else min(rest, self._sim._segment)
            ticket = allocator.begin_decode(engine, piece, now)

            def prompt_here(now: float) -> None:
                if prefill is not None:
                    allocator.books.end_prefill(prefill, now)

            def ended(
                now: float,
                sample: _Sample = sample,
                tokens: int = tokens,
                ticket: DecodeTicket = ticket,
            ) -> None:
                now += self._sim.model.latency_s
                allocator.end_decode(ticket, piece, now)
                sample.done += tokens
                self._ended(engine, piece, sample, now)

            job = Job(
                piece.prompt_tokens,
                piece.blocks,
                tokens,
                on_prompt=prompt_here,
                on_end=ended,
                pulled=piece.prompt_tokens if after_s else 0,
            )
            if not sample.done:
                self._result.routes["shared" if after_s and index else kind] += 1
            self._submit(engine, job, now, after_s)

    def _ended(self, engine: int, piece: Piece, sample: _Sample, now: float) -> None:
        if sample.done >= sample.length:
            self._allocator.note_sample(engine, piece, sample.length)
            self._result.ended[sample.name] += 1
            self._result.latencies[sample.name] = now
            if sample.on_end is not None:
                sample.on_end(now)
            return
        # A segment has ended: the rest is a piece of its own, whose KV is here.
        rest = self._allocator.accept(
            piece.prompt,
            range(sample.prompt_tokens + sample.done),
            1,
            self._load.max_tokens - sample.done,
            age=sample.done,
            blocks=sample.blocks,
        )
        decode = self._decide(rest, now, held_by=engine).parts[0].decode
        if decode != engine:
            self._result.routes["migrated"] += 1
        self._resume(engine, decode, rest, sample, now)

    def _resume(self, engine: int, decode: int, rest: Piece, sample: _Sample, now: float) -> None:
        if decode == engine:
            self._sim.engines[engine].keep(rest.blocks)
            job_after = 1e-9  # its KV is here
        else:
            job_after = self._sim.transfer(engine, decode, rest.prompt_tokens)
        self._decode(decode, rest, [sample], now, after_s=job_after, kind="migrated")

    def _start_turn(
        self,
        episode: EpisodeJob,
        index: int,
        before: tuple[int, ...],
        now: float,
        *,
        fresh: bool = False,
    ) -> None:
        turn = episode.turns[index]
        prompt = before + turn.observation
        self._unique += self._sim.model.cost.prefill(len(turn.observation), len(before))
        blocks = block_hashes(prompt, self._sim.model.block_size)
        name = f"{episode.id}/{index}"
        piece = self._allocator.accept(episode.id, prompt, 1, turn.length, blocks=blocks)
        tokens = tuple(hash((name, i)) for i in range(turn.length))

        def next_turn(now: float) -> None:
            if index + 1 < len(episode.turns):
                self._start_turn(episode, index + 1, prompt + tokens, now)

        sample = _Sample(name, turn.length, prompt, len(prompt), blocks, on_end=next_turn)
        if fresh:
            self._clock.at(now, lambda now: self._send(piece, [sample], now))
        else:
            self._send(piece, [sample], now)

    def _submit(self, engine: int, job: Job, now: float, after_s: float = 0.0) -> None:
        at = now + self._sim.model.latency_s + after_s
        self._clock.at(at, lambda now: self._sim.engines[engine].submit(job, now))

    def _learn(self) -> None:
        """Report steps to the allocator from time to time, as a dispatcher does."""

        def learn(now: float) -> None:
            for number, engine in enumerate(self._sim.engines):
                if engine.observed:
                    self._allocator.observe_steps(number, engine.observed)
                    engine.observed = []
            if len(self._result.latencies) < self._load.samples:
                self._clock.at(now + _LEARN_EVERY_S, learn)

        self._clock.at(self._begun + _LEARN_EVERY_S, learn)
