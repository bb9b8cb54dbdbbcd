"""One engine on a virtual clock: steps, batches, chunked prefills, seats and a prefix cache.

It follows vLLM's scheduler as far as time is concerned: a step decodes one token of every running
sequence and computes waiting prompts up to a budget of tokens; a sequence runs while a seat is
free. Between two events all steps are alike, so they are reckoned at once.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from splitroll.dispatch.cost import StepCost
from splitroll.dispatch.prefix import BlockHash
from splitroll.engines.protocol import StepStats

Callback = Callable[[float], None]

_STEPS_KEPT = 64


@dataclass(slots=True, eq=False)
class Job:
    """A request: a prompt, of which some may be here already, then tokens to generate.

    Attributes:
        pulled: prompt tokens whose KV was moved here.
        tokens: to generate; 0 only computes the prompt.
        on_prompt: called when the prompt's KV is here, on_end: when all is done.
    """

    prompt_tokens: int
    blocks: Sequence[BlockHash]
    tokens: int
    on_prompt: Callback | None = None
    on_end: Callback | None = None
    pulled: int = 0
    computed: int = 0
    """Prompt tokens that have KV here."""
    end_step: int = 0
    serial: int = 0

    def __lt__(self, other: Job) -> bool:
        return (self.end_step, self.serial) < (other.end_step, other.serial)


class VirtualEngine:
    """See the module's docstring. `clock.at(time, callback)` is how it comes to its next event."""

    def __init__(
        self,
        clock: Clock,
        cost: StepCost,
        *,
        seats: int = 64,
        batch_tokens: int = 2048,
        num_blocks: int = 1024,
        block_size: int = 32,
    ) -> None:
        self.cost = cost
        self.observed: list[StepStats] = []
        self.best_token_s = math.inf
        """Fewest engine-seconds per token of any decode step."""
        self.busy_s = 0.0
        self.hits = 0
        self._clock = clock
        self._seats = seats
        self._batch_tokens = batch_tokens
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._cache: OrderedDict[BlockHash, None] = OrderedDict()
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._prefilling: deque[Job] = deque()
        self._context = 0
        self._steps = 0
        self._serial = itertools.count()
        self._plan: _Stretch | None = None

    def submit(self, job: Job, now: float) -> None:
        """Give the engine a request."""
        self._waiting.append(job)
        if self._plan is None:
            self._begin(now)
        elif self._plan.steps > 1:
            self._cut(now)

    def _cut(self, now: float) -> None:
        """End a stretch of steps at the end of the present one, to let a new request in."""
        plan = self._plan
        assert plan is not None
        done = max(1, math.ceil((now - plan.begun) / plan.step_s - 1e-9))
        if done >= plan.steps:
            return
        plan.void = True
        self._plan = _Stretch(plan.begun, plan.step_s, done, plan.prompts)
        self._schedule(self._plan)

    def _begin(self, now: float) -> None:
        self._admit()
        running = len(self._running)
        if not running and not self._prefilling:
            self._plan = None
            return
        step_s = self.cost.decode_step(running, self._context)
        prompts: list[tuple[Job, int]] = []
        budget = self._batch_tokens - running
        pairs = tokens = 0
        for job in self._prefilling:
            if budget <= 0:
                break
            part = min(budget, job.prompt_tokens - job.computed)
            budget -= part
            prompts.append((job, part))
            tokens += part
            pairs += part * job.computed + part * part // 2
        if prompts:
            step_s += self.cost.token * tokens + self.cost.pair * pairs
            steps = 1
        else:
            steps = self._running[0].end_step - self._steps
            step_s += self.cost.context * running * (steps - 1) / 2
            if running:
                self.best_token_s = min(self.best_token_s, step_s / running)
        if len(self.observed) < _STEPS_KEPT:
            self.observed.append(StepStats(step_s, running, self._context, tokens, pairs))
        self._plan = _Stretch(now, step_s, steps, prompts)
        self._schedule(self._plan)

    def _schedule(self, plan: _Stretch) -> None:
        end = plan.begun + plan.steps * plan.step_s

        def finish(now: float) -> None:
            if not plan.void:
                self._finish(plan, now)

        self._clock.at(end, finish)

    def _finish(self, plan: _Stretch, now: float) -> None:
        self.busy_s += plan.steps * plan.step_s
        self._steps += plan.steps
        self._context += len(self._running) * plan.steps
        calls: list[Callback] = []
        while self._running and self._running[0].end_step <= self._steps:
            job = heapq.heappop(self._running)
            self._context -= job.prompt_tokens + job.tokens
            if job.on_end is not None:
                calls.append(job.on_end)
        for job, part in plan.prompts:
            job.computed += part
            if job.computed < job.prompt_tokens:
                continue
            self._prefilling.popleft()
            if job.on_prompt is not None:
                calls.append(job.on_prompt)
            if job.tokens > 1:  # the first token comes with the prompt
                job.end_step = self._steps + job.tokens - 1
                self._context += job.prompt_tokens + 1
                heapq.heappush(self._running, job)
            elif job.on_end is not None:
                calls.append(job.on_end)
        self._plan = None
        self._begin(now)
        for call in calls:
            call(now)

    def _admit(self) -> None:
        while self._waiting and len(self._running) + len(self._prefilling) < self._seats:
            job = self._waiting.popleft()
            job.serial = next(self._serial)
            most = (job.prompt_tokens - 1) // self._block_size * self._block_size
            held = 0
            for block in job.blocks:
                if block not in self._cache:
                    break
                held += self._block_size
            self.hits += min(held, most)
            # Of what was moved here, the last token is computed again.
            job.computed = max(min(held, most), min(job.pulled, job.prompt_tokens - 1))
            for block in job.blocks:  # held from now on, as vLLM shares them within a step
                self._cache[block] = None
                self._cache.move_to_end(block)
            while len(self._cache) > self._num_blocks:
                self._cache.popitem(last=False)
            self._prefilling.append(job)

    def keep(self, blocks: Sequence[BlockHash]) -> None:
        """Note blocks that generated tokens filled."""
        for block in blocks:
            self._cache[block] = None


@dataclass(slots=True, eq=False)
class _Stretch:
    """Steps that are all alike, or one with prompts in it: (job, tokens) computed."""

    begun: float
    step_s: float
    steps: int
    prompts: list[tuple[Job, int]] = field(default_factory=list)
    void: bool = False


class Clock:
    """Virtual time: calls back in order of time, and of request where times are equal."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callback]] = []
        self._serial = itertools.count()

    def at(self, time: float, callback: Callback) -> None:
        heapq.heappush(self._events, (max(time, self.now), next(self._serial), callback))

    def run(self) -> None:
        """Go on until nothing is left to come."""
        while self._events:
            self.now, _, callback = heapq.heappop(self._events)
            callback(self.now)
