"""A whole rollout step on virtual engines, with the allocator that real ones are driven by.

As the dispatcher does, it accepts all work at the start, lets groups in longest expected first
while there are seats for all their samples, decides where a group goes when it is let in, and
decides anew for a sample between two segments.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from splitroll.bench.workloads import EpisodeJob, GroupJob, Load
from splitroll.dispatch.allocator import Allocator, Piece
from splitroll.dispatch.books import DecodeTicket
from splitroll.dispatch.cost import StepCost
from splitroll.dispatch.lengths import LengthModel
from splitroll.dispatch.policy import Part
from splitroll.dispatch.prefix import BlockHash, block_hashes
from splitroll.sim.engine import Clock, Job, Spent, VirtualEngine
from splitroll.types import Role

_LEARN_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class FleetModel:
    """Virtual engines.

    Attributes:
        prefills, decodes: how many of each role.
        cost: of a step; `speeds`: by engine, factors on it (2.0 is half as fast), 1.0 for the rest.
        transfer: (seconds, seconds per byte) of moving KV.
        latency_s: between the dispatcher and an engine, each way.
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


@dataclass(slots=True)
class SimResult:
    """What a simulated step came to, in virtual seconds.

    Attributes:
        work_bound_s: engine-seconds of the work, each prompt computed once and every token at the
            best efficiency that an engine showed, over engines.
        longest_bound_s: the longest sequence decoded alone on the fastest engine.
        unique_s: engine-seconds of each prompt computed once.
        best_token_s: of one token at the best; `decoded_tokens`: those of decode steps.
        ended: how often each sample has.
        latencies: when each sample ended.
        routes: samples by "split", "shared", "local"; "migrated" counts moves between segments,
            "brought" turns whose KV was moved first.
        spent: what each engine was busy with.
        decision_s: real seconds of each decision.
        left: load that the books still hold.
    """

    makespan_s: float = 0.0
    work_bound_s: float = 0.0
    longest_bound_s: float = 0.0
    unique_s: float = 0.0
    best_token_s: float = 0.0
    decoded_tokens: int = 0
    samples: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    latencies: dict[str, float] = field(default_factory=dict)
    routes: Counter[str] = field(default_factory=Counter)
    spent: list[Spent] = field(default_factory=list)
    decision_s: list[float] = field(default_factory=list, compare=False)
    left: dict[str, int] = field(default_factory=dict)

    @property
    def bound_s(self) -> float:
        return max(self.work_bound_s, self.longest_bound_s)

    @property
    def efficiency(self) -> float:
        """The lower bound over the makespan."""
        return self.bound_s / self.makespan_s


class Simulation:
    """One fleet; the allocator keeps what it learnt over several loads.

    Args:
        seats: what groups may hold together, in engines' seats.
        oracle: the allocator is told how long each sample will be, instead of learning it.
    """

    def __init__(
        self,
        model: FleetModel,
        policy: str = "adaptive",
        *,
        elastic: bool = True,
        segment_tokens: int | None = 256,
        oracle: bool = False,
        seats: float = 1.0,
    ) -> None:
        self.model = model
        self.clock = Clock()
        self.allocator = Allocator(policy, elastic=elastic)
        self.oracle = OracleLengths() if oracle else None
        if self.oracle is not None:
            self.allocator.lengths = self.oracle
        self.segment_tokens = segment_tokens if policy == "adaptive" and elastic else None
        self.seats = int(seats * model.seats * (model.prefills + model.decodes))
        self.speeds = [*model.speeds, *[1.0] * (model.prefills + model.decodes)]
        del self.speeds[model.prefills + model.decodes :]
        self.engines: list[VirtualEngine] = []
        for index, speed in enumerate(self.speeds):
            self.engines.append(
                VirtualEngine(
                    self.clock,
                    model.cost.scaled(speed),
                    seats=model.seats,
                    batch_tokens=model.batch_tokens,
                    num_blocks=model.num_blocks,
                    block_size=model.block_size,
                    latency_s=model.latency_s,
                )
            )
            role = Role.PREFILL if index < model.prefills else Role.DECODE
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
        self.transfer_s(0, len(self.engines) - 1, model.block_size)

    def run(self, load: Load) -> SimResult:
        """Generate a load to its end; caches are empty at the start, as after new weights."""
        for engine in self.engines:
            engine.spent = Spent()
            engine.forget()
        self.allocator.forget_prefixes()
        return _Step(self, load).run()

    def set_speed(self, engine: int, factor: float) -> None:
        """Change an engine's speed; the allocator has to find out."""
        self.speeds[engine] = factor
        self.engines[engine].set_cost(self.model.cost.scaled(factor), self.clock.now)

    def transfer_s(self, prefill: int, decode: int, tokens: int) -> float:
        """Return what moving the KV of so many tokens takes, and tell the allocator."""
        constant, per_byte = self.model.transfer
        num_bytes = -(-tokens // self.model.block_size) * self.model.block_bytes
        seconds = constant + per_byte * num_bytes
        self.allocator.observe_transfer(prefill, decode, tokens, seconds)
        return seconds


class OracleLengths(LengthModel):
    """Knows how long each sample will be, and the mean of each group."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Hashable, float] = {}

    def know(self, key: Hashable, names: Sequence[str], lengths: Sequence[int]) -> None:
        """Note a group's lengths, by the key of its prompt and by its samples' names."""
        self._known.update(zip(names, lengths, strict=True))
        self._known[key] = sum(lengths) / len(lengths)

    def expected(self, prompt: Hashable, max_tokens: int, age: int = 0) -> float:
        return max(1.0, self._known[prompt] - age)


@dataclass(slots=True, eq=False)
class _Group:
    """Samples of one prompt that are let in together; of an episode, one turn."""

    piece: Piece
    prompt: tuple[int, ...]
    samples: list[_Sample] = field(default_factory=list)
    unfinished: int = 0
    on_end: Callable[[float], None] | None = None


@dataclass(slots=True, eq=False)
class _Sample:
    """One sequence on its way.

    Attributes:
        piece: what the allocator knows of the present segment, of so many `tokens`.
    """

    name: str
    length: int
    group: _Group
    piece: Piece
    done: int = 0
    tokens: int = 0
    engine: int = -1
    ticket: DecodeTicket | None = None


class _Step:
    """One load on a simulation's fleet."""

    def __init__(self, simulation: Simulation, load: Load) -> None:
        self._sim = simulation
        self._model = simulation.model
        self._allocator = simulation.allocator
        self._clock = simulation.clock
        self._load = load
        self._result = SimResult(samples=load.samples)
        self._begun = simulation.clock.now
        self._seen: set[BlockHash] = set()
        self._seats = simulation.seats
        self._gated: list[tuple[float, int, _Group]] = []
        self._serial = itertools.count()

    def run(self) -> SimResult:
        for group in self._load.groups:
            self._accept(group)
        for episode in self._load.episodes:
            self._start_turn(episode, 0, (), self._begun)
        self._clock.at(self._begun, self._let_in)
        self._clock.at(self._begun + _LEARN_EVERY_S, self._learn)
        self._clock.run()
        return self._finish()

    def _finish(self) -> SimResult:
        sim, result = self._sim, self._result
        ended = result.latencies = {k: t - self._begun for k, t in result.latencies.items()}
        # In engines of speed 1.
        engines = sum(1 / speed for speed in sim.speeds)
        result.best_token_s = min(
            engine.best_token_s / speed
            for engine, speed in zip(sim.engines, sim.speeds, strict=True)
        )
        # Each sample's first token comes with its prompt.
        result.decoded_tokens = self._load.completion_tokens - self._load.samples
        decode = result.decoded_tokens * result.best_token_s if result.decoded_tokens else 0.0
        result.work_bound_s = (result.unique_s + decode) / engines
        result.makespan_s = max(ended.values())
        result.longest_bound_s *= min(sim.speeds)
        result.spent = [engine.spent for engine in sim.engines]
        result.left = self._allocator.books.load
        return result

    # What is asked for.

    def _accept(self, job: GroupJob) -> None:
        tokens, longest = len(job.prompt), max(job.lengths)
        alone = self._alone_s(tokens, longest)
        self._result.longest_bound_s = max(self._result.longest_bound_s, alone)
        blocks = block_hashes(job.prompt, self._model.block_size)
        names = [f"{job.id}/{i}" for i in range(len(job.lengths))]
        if self._sim.oracle is not None:
            self._sim.oracle.know(job.id, names, job.lengths)
        self._wait(self._group(job.id, job.prompt, blocks, names, job.lengths))

    def _start_turn(
        self, episode: EpisodeJob, index: int, before: tuple[int, ...], now: float
    ) -> None:
        turn = episode.turns[index]
        prompt = before + turn.observation
        name = f"{episode.id}/{index}"
        if self._sim.oracle is not None:
            self._sim.oracle.know(episode.id, [name], [turn.length])
        if not index:
            self._note_episode(episode)
        blocks = block_hashes(prompt, self._model.block_size)
        group = self._group(episode.id, prompt, blocks, [name], [turn.length], is_turn=True)
        if index + 1 < len(episode.turns):
            tokens = tuple(hash((name, i)) for i in range(turn.length))

            def next_turn(now: float) -> None:
                filled = block_hashes((prompt + tokens)[:-1], self._model.block_size)
                self._keep(group.samples[0], filled)
                self._seen.update(filled)
                self._start_turn(episode, index + 1, prompt + tokens, now)

            group.on_end = next_turn
        self._wait(group)

    def _note_episode(self, episode: EpisodeJob) -> None:
        before, alone = 0, 0.0
        for turn in episode.turns:
            alone += self._alone_s(len(turn.observation), turn.length, before)
            before += len(turn.observation) + turn.length
        self._result.longest_bound_s = max(self._result.longest_bound_s, alone)

    def _alone_s(self, tokens: int, length: int, before: int = 0) -> float:
        """Return what a sequence takes with an engine to itself."""
        cost = self._model.cost
        decode = cost.decode_step(1, before + tokens + length / 2)
        return cost.step + cost.prefill(tokens, before) + (length - 1) * decode

    def _group(
        self,
        key: Hashable,
        prompt: tuple[int, ...],
        blocks: tuple[BlockHash, ...],
        names: Sequence[str],
        lengths: Sequence[int],
        *,
        is_turn: bool = False,
    ) -> _Group:
        self._note_prompt(prompt, blocks)
        piece = self._allocator.accept(
            key, prompt, len(names), self._load.max_tokens, is_turn=is_turn, blocks=blocks
        )
        group = _Group(piece, prompt, unfinished=len(names))
        group.samples = [
            _Sample(name, length, group, piece) for name, length in zip(names, lengths, strict=True)
        ]
        return group

    def _note_prompt(self, prompt: Sequence[int], blocks: Sequence[BlockHash]) -> None:
        """Add to the work what no prompt before had."""
        new = next((i for i, b in enumerate(blocks) if b not in self._seen), len(blocks))
        self._seen.update(blocks)
        known = min(new * self._model.block_size, len(prompt))
        self._result.unique_s += self._model.cost.prefill(len(prompt) - known, known)

    # Letting in.

    def _wait(self, group: _Group) -> None:
        # A longer group is let in as if it had come earlier.
        key = self._clock.now - self._allocator.alone_s(group.piece)
        heapq.heappush(self._gated, (key, next(self._serial), group))

    def _let_in(self, now: float) -> None:
        while self._gated:
            group = self._gated[0][2]
            held = self._sim.seats - self._seats
            if held and self._seats < len(group.samples):
                return
            heapq.heappop(self._gated)
            self._seats -= len(group.samples)
            self._place(group, now)

    def _leave(self, sample: _Sample, now: float) -> None:
        group = sample.group
        group.unfinished -= 1
        self._seats += 1
        if not group.unfinished and group.on_end is not None:
            group.on_end(now)
        self._let_in(now)

    # Where it goes.

    def _decide(self, piece: Piece, now: float, held_by: int = -1) -> tuple[Part, ...]:
        begun = time.perf_counter()
        route = self._allocator.decide(piece, now, held_by=held_by)
        self._result.decision_s.append(time.perf_counter() - begun)
        assert route is not None, "all engines are up"
        return route.parts

    def _place(self, group: _Group, now: float) -> None:
        parts = self._decide(group.piece, now)
        samples = iter(group.samples)
        for part in parts:
            mine = list(itertools.islice(samples, part.samples))
            if part.kv_from >= 0:
                self._bring(part, mine, now)
            elif part.is_local:
                self._decode(part.decode, mine, now)
            else:
                self._prefill(part, mine, now, alone=len(parts) == 1)

    def _prefill(self, part: Part, samples: Sequence[_Sample], now: float, *, alone: bool) -> None:
        """Compute a prompt on one engine, for another."""
        allocator, piece = self._allocator, samples[0].piece
        ticket = allocator.begin_prefill(part.prefill, piece, now)
        held = [allocator.begin_decode(part.decode, piece, now) for _ in samples]
        allocator.note_prompt(part.decode, piece)

        def prefilled(now: float) -> None:
            allocator.books.end_prefill(ticket, now)
            for one in held:
                allocator.end_decode(one, piece, now)
            decode = part.decode
            if alone and allocator.policy.chooses_late:
                decode = self._decide(piece, now, held_by=part.prefill)[0].decode
            self._hand_over(part.prefill, decode, samples, now)

        job = Job(piece.prompt_tokens, piece.blocks, 0, on_prompt=prefilled)
        self._sim.engines[part.prefill].send([job], now)

    def _bring(self, part: Part, samples: Sequence[_Sample], now: float) -> None:
        """Move the KV of what is cached of a prompt to the engine that goes on with it."""
        allocator, piece, tokens = self._allocator, samples[0].piece, part.kv_tokens + 1
        blocks = piece.blocks[: part.kv_tokens // self._model.block_size]
        ticket = allocator.begin_prefill(part.decode, piece, now, coming=part.kv_tokens)
        allocator.note_prompt(part.decode, piece)
        held = [allocator.begin_decode(part.decode, piece, now) for _ in samples]
        self._result.routes["brought"] += len(samples)

        def handed_out(now: float) -> None:
            seconds = self._sim.transfer_s(part.kv_from, part.decode, tokens)
            load = Job(tokens, blocks, 1, on_end=arrived)
            load.pulled = tokens
            self._sim.engines[part.decode].send([load], now, seconds)

        def arrived(now: float) -> None:
            allocator.books.end_prefill(ticket, now)
            for one in held:
                allocator.end_decode(one, piece, now)
            self._decode(part.decode, samples, now)

        job = Job(tokens, blocks, 0, on_prompt=handed_out)
        self._sim.engines[part.kv_from].send([job], now)

    def _hand_over(self, prefill: int, decode: int, samples: Sequence[_Sample], now: float) -> None:
        if prefill == decode:
            self._decode(decode, samples, now)
            return
        seconds = self._sim.transfer_s(prefill, decode, samples[0].piece.prompt_tokens)
        self._decode(decode, samples, now, after_s=seconds, moved=True)

    def _decode(
        self,
        engine: int,
        samples: Sequence[_Sample],
        now: float,
        *,
        after_s: float = 0.0,
        moved: bool = False,
    ) -> None:
        """Let samples decode on an engine; if they are moved, their prompt's KV comes by then."""
        allocator, piece = self._allocator, samples[0].piece
        if not samples[0].done:
            self._result.routes["split" if moved else "local"] += 1
            self._result.routes["shared" if moved else "local"] += len(samples) - 1
        on_prompt = None
        if not moved:
            ticket = allocator.begin_prefill(engine, piece, now)
            on_prompt = functools.partial(allocator.books.end_prefill, ticket)
        allocator.note_prompt(engine, piece)
        jobs, oracle = [], self._sim.oracle
        for sample in samples:
            rest = sample.length - sample.done
            sample.tokens = min(rest, self._sim.segment_tokens or rest)
            sample.engine = engine
            if oracle is not None:
                piece.expected = oracle.expected(sample.name, 0, sample.done)
            sample.ticket = allocator.begin_decode(engine, piece, now)
            job = Job(piece.prompt_tokens, piece.blocks, sample.tokens, on_prompt)
            job.on_end = functools.partial(self._ended, sample)
            jobs.append(job)
            on_prompt = None
        if moved:  # siblings find its blocks in the cache
            jobs[0].pulled = piece.prompt_tokens
        self._sim.engines[engine].send(jobs, now, after_s)

    # What becomes of it.

    def _ended(self, sample: _Sample, now: float) -> None:
        assert sample.ticket is not None
        allocator, piece = self._allocator, sample.piece
        allocator.end_decode(sample.ticket, piece, now)
        sample.done += sample.tokens
        if sample.done < sample.length:
            self._go_on(sample, now)
            return
        allocator.note_sample(sample.engine, piece, sample.length)
        self._result.ended[sample.name] += 1
        self._result.latencies[sample.name] = now
        self._leave(sample, now)

    def _go_on(self, sample: _Sample, now: float) -> None:
        """Place the rest of a sample, a piece of its own whose KV is where it was generated."""
        first, engine = sample.group.piece, sample.engine
        tokens = first.prompt_tokens + sample.done
        filled = range(len(first.blocks), (tokens - 1) // self._model.block_size)
        blocks = first.blocks + tuple(hash((sample.name, i)) for i in filled)
        self._keep(sample, blocks)
        sample.piece = rest = self._allocator.accept(
            first.prompt if self._sim.oracle is None else sample.name,
            range(tokens),
            1,
            self._load.max_tokens - sample.done,
            age=sample.done,
            blocks=blocks,
        )
        decode = self._decide(rest, now, held_by=engine)[0].decode
        self._result.routes["migrated"] += decode != engine
        self._hand_over(engine, decode, [sample], now)

    def _keep(self, sample: _Sample, blocks: tuple[BlockHash, ...]) -> None:
        """Note that an engine's cache has what a sample generated there."""
        self._sim.engines[sample.engine].keep(blocks)

    def _learn(self, now: float) -> None:
        """Report steps to the allocator from time to time, as a dispatcher does."""
        for number, engine in enumerate(self._sim.engines):
            if engine.observed:
                self._allocator.observe_steps(number, engine.observed)
                engine.observed = []
        if len(self._result.latencies) < self._load.samples:
            self._clock.at(now + _LEARN_EVERY_S, self._learn)
