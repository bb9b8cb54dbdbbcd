"""One engine on a virtual clock: steps, batches, chunked prefills, seats and a prefix cache.

It follows vLLM's scheduler as far as time is concerned: a step decodes one token of every running
sequence and computes waiting prompts up to a budget of tokens; a sequence runs while a seat is
free; a request that comes during a step waits for the next one. Steps that only decode are alike
but for the context that grows with each, so all of them up to the next event are reckoned at once.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from splitroll.dispatch.cost import StepCost
from splitroll.dispatch.prefix import BlockHash
from splitroll.engines.protocol import StepStats

Callback = Callable[[float], None]

_STEPS_KEPT = 64
_EPSILON = 1e-9
"""Of a step: how much later than its end an event still counts as at its end."""


class Clock:
    """Virtual time: calls back in order of time, and of request where times are equal."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callback]] = []
        self._serial = itertools.count()

    def at(self, time: float, callback: Callback) -> None:
        """Call back at a time, with it; at once if it has passed."""
        heapq.heappush(self._events, (max(time, self.now), next(self._serial), callback))

    def run(self) -> None:
        """Go on until nothing is left to come."""
        while self._events:
            self.now, _, callback = heapq.heappop(self._events)
            callback(self.now)


@dataclass(slots=True, eq=False)
class Job:
    """A request: a prompt, of which some may be here already, then tokens to generate.

    Attributes:
        tokens: to generate; 0 only computes the prompt.
        on_prompt: called when the prompt's KV is here, `on_end` when all is done.
        pulled: prompt tokens whose KV was moved here.
        computed: prompt tokens that have KV here.
    """

    prompt_tokens: int
    blocks: Sequence[BlockHash]
    tokens: int
    on_prompt: Callback | None = None
    on_end: Callback | None = None
    pulled: int = 0
    computed: int = 0


@dataclass(slots=True)
class Spent:
    """Seconds that an engine was busy, by the terms of its cost.

    Attributes:
        fixed: what each step takes whatever is in it; `decode`: for its sequences and their
            context; `prefill`: for its prompt tokens.
    """

    fixed: float = 0.0
    decode: float = 0.0
    prefill: float = 0.0

    @property
    def total(self) -> float:
        return self.fixed + self.decode + self.prefill


@dataclass(slots=True, eq=False)
class _Stretch:
    """Steps that are alike but for their context, or one with prompts in it.

    Attributes:
        first_s: the first step's seconds; each further one takes `growth_s` more.
        prompts: (job, tokens) computed; `pairs`: of these tokens and those before them.
        void: it was replaced by a shorter one.
    """

    cost: StepCost
    begun: float
    first_s: float
    growth_s: float
    steps: int
    prompts: Sequence[tuple[Job, int]]
    pairs: float
    void: bool = False

    def seconds(self, steps: int) -> float:
        """Return how long the first so many steps take."""
        return steps * (self.first_s + self.growth_s * (steps - 1) / 2)

    def steps_by(self, now: float) -> int:
        """Return the steps that have begun by then, at least one: where it can be ended."""
        elapsed = now - self.begun
        half = self.growth_s / 2
        linear = self.first_s - half
        if half > 0.0:
            # half * k^2 + linear * k = elapsed, in the form that keeps its digits.
            steps = 2 * elapsed / (linear + math.sqrt(linear * linear + 4 * half * elapsed))
        else:
            steps = elapsed / linear
        return min(self.steps, max(1, math.ceil(steps - _EPSILON)))


class VirtualEngine:
    """See the module's docstring.

    Args:
        latency_s: between whoever sends a request and the engine, each way.

    Attributes:
        observed: its last steps, or stretches of them, for whoever takes them away.
        best_token_s: fewest seconds per sequence of any step, without its prompts.
        spent: what it was busy with.
        hits: prompt tokens found in its cache.
    """

    def __init__(
        self,
        clock: Clock,
        cost: StepCost,
        *,
        seats: int = 64,
        batch_tokens: int = 2048,
        num_blocks: int = 1024,
        block_size: int = 32,
        latency_s: float = 0.0,
    ) -> None:
        self.observed: list[StepStats] = []
        self.best_token_s = math.inf
        self.spent = Spent()
        self.hits = 0
        self._clock = clock
        self._cost = cost
        self._seats = seats
        self._batch_tokens = batch_tokens
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._latency_s = latency_s
        self._cache: OrderedDict[BlockHash, None] = OrderedDict()
        self._waiting: deque[Job] = deque()
        self._running: list[tuple[int, int, Job]] = []
        """(step at which it ends, number, job), a heap."""
        self._prefilling: deque[Job] = deque()
        self._context = 0
        self._steps = 0
        self._serial = itertools.count()
        self._plan: _Stretch | None = None

    def send(self, jobs: Sequence[Job], now: float, after_s: float = 0.0) -> None:
        """Send requests to the engine; with `after_s`, what they need is there only by then."""
        arrive = functools.partial(self._arrive, jobs)
        self._clock.at(now + self._latency_s + after_s, arrive)

    def set_cost(self, cost: StepCost, now: float) -> None:
        """Change what steps take, from the next one on."""
        self._cost = cost
        self._cut(now)

    def forget(self) -> None:
        """Empty the cache, as new weights do."""
        self._cache.clear()

    def keep(self, blocks: Iterable[BlockHash]) -> None:
        """Note blocks that generated tokens have filled."""
        cache = self._cache
        for block in blocks:
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > self._num_blocks:
            cache.popitem(last=False)

    def _arrive(self, jobs: Sequence[Job], now: float) -> None:
        self._waiting.extend(jobs)
        if self._plan is None:
            self._begin(now)
        elif self._has_seat():
            self._cut(now)

    def _has_seat(self) -> bool:
        return len(self._running) + len(self._prefilling) < self._seats

    def _cut(self, now: float) -> None:
        """End a stretch of steps at the end of the present one."""
        plan = self._plan
        if plan is None or (steps := plan.steps_by(now)) >= plan.steps:
            return
        plan.void = True
        self._schedule(replace(plan, steps=steps, void=False))

    def _begin(self, now: float) -> None:
        """Plan the steps from now on."""
        self._admit()
        running = len(self._running)
        if not running and not self._prefilling:
            self._plan = None
            return
        cost = self._cost
        step_s = cost.decode_step(running, self._context)
        if not self._prefilling:
            steps = self._running[0][0] - self._steps
            self._schedule(_Stretch(cost, now, step_s, cost.context * running, steps, (), 0.0))
            return
        prompts: list[tuple[Job, int]] = []
        budget = self._batch_tokens - running
        pairs = 0.0
        for job in self._prefilling:
            if budget <= 0:
                break
            part = min(budget, job.prompt_tokens - job.computed)
            budget -= part
            prompts.append((job, part))
            pairs += part * (job.computed + part / 2)
            step_s += cost.prefill(part, job.computed)
        self._schedule(_Stretch(cost, now, step_s, 0.0, 1, prompts, pairs))

    def _schedule(self, plan: _Stretch) -> None:
        self._plan = plan
        self._clock.at(plan.begun + plan.seconds(plan.steps), functools.partial(self._finish, plan))

    def _finish(self, plan: _Stretch, now: float) -> None:
        if plan.void:
            return
        self._account(plan)
        self._steps += plan.steps
        self._context += len(self._running) * plan.steps
        calls: list[Callback] = []
        while self._running and self._running[0][0] <= self._steps:
            _, _, job = heapq.heappop(self._running)
            self._context -= job.prompt_tokens + job.tokens
            if job.on_end is not None:
                calls.append(job.on_end)
        for job, part in plan.prompts:
            job.computed += part
            if job.computed == job.prompt_tokens:
                self._prefilling.popleft()
                self._start(job, calls)
        self._begin(now)
        if calls:
            self._clock.at(now + self._latency_s, functools.partial(_call, calls))

    def _account(self, plan: _Stretch) -> None:
        """Note what a stretch took."""
        running, steps = len(self._running), plan.steps
        seconds = plan.seconds(steps)
        tokens = sum(part for _, part in plan.prompts)
        prefill = plan.cost.token * tokens + plan.cost.pair * plan.pairs
        if running:
            self.best_token_s = min(self.best_token_s, (plan.first_s - prefill) / running)
        if len(self.observed) < _STEPS_KEPT:
            context = self._context + running * (steps - 1) // 2
            self.observed.append(
                StepStats(seconds / steps, running, context, tokens, int(plan.pairs))
            )
        fixed = plan.cost.step * steps
        self.spent.fixed += fixed
        self.spent.prefill += prefill
        self.spent.decode += seconds - prefill - fixed

    def _start(self, job: Job, calls: list[Callback]) -> None:
        """Let a job decode whose prompt is computed; its first token has come with it."""
        if job.on_prompt is not None:
            calls.append(job.on_prompt)
        if job.tokens > 1:
            self._context += job.prompt_tokens + 1
            end = self._steps + job.tokens - 1
            heapq.heappush(self._running, (end, next(self._serial), job))
        elif job.on_end is not None:
            calls.append(job.on_end)

    def _admit(self) -> None:
        """Give free seats to those who wait."""
        while self._waiting and self._has_seat():
            job = self._waiting.popleft()
            # The last token is computed in any case, for what comes after it.
            most = (job.prompt_tokens - 1) // self._block_size
            held = 0
            for block in job.blocks[:most]:
                if block not in self._cache:
                    break
                held += 1
            hit = held * self._block_size
            self.hits += hit
            job.computed = max(hit, min(job.pulled, job.prompt_tokens - 1))
            self.keep(job.blocks)  # from now on, as vLLM shares them within a step
            self._prefilling.append(job)


def _call(calls: Sequence[Callback], now: float) -> None:
    for call in calls:
        call(now)
