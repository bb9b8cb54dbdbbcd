"""What work costs on each engine, fitted to what the engine itself reports. Pure.

The time of a step, with n sequences decoding over C tokens of context and p prompt tokens computed
that attend to q pairs of tokens, is modelled as

    step = a + b n + c C + d p + e q        (all coefficients >= 0)

a, b and c come from steps that only decode, d and e from what steps with a prefill take beyond
them. Both fits are least squares of relative errors in which old steps fade; what an engine has not
done lately keeps its last value. When most of the newest dozen steps do not fit what came before,
the engine has changed its speed: all that is known is scaled to the new one.
"""

from __future__ import annotations

import operator
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from splitroll.engines.protocol import StepStats

_DECODE_MEMORY = 256
_PREFILL_MEMORY = 48
"""Steps after which one weighs 1/e of the newest."""
_CARRY = 0.02
"""Weight of the present coefficients against one step: directions that no step shows keep them."""
_SWEEPS = 40
_SETTLED = 1e-6
_NEWEST = 12
_OTHER_SPEED = 1.25
"""An engine has another speed when its newest steps took this many times their estimates."""
_OUTLIER = 6.0
"""A step that took this many times its estimate is believed only when others follow it: the machine
paused. One engine that has become slow shows it in every step."""
_OUTLIERS_BELIEVED = 4
_LEAST_STEP_S = 1e-6
_TRANSFER_MEMORY = 32
_SCALES_DECODE: tuple[float, ...] = (1.0, 16.0, 8192.0)
_SCALES_PREFILL = (256.0, 65536.0)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Coefficients of a step's time, in seconds; see the module's docstring.

    Attributes:
        step: of any step; `sequence`: per decoding sequence; `context`: per token of context.
        token: per prompt token; `pair`: per pair of a prompt token and one before it.
    """

    step: float
    sequence: float
    context: float
    token: float
    pair: float

    def decode_step(self, sequences: float, context_tokens: float) -> float:
        """Return the seconds of a step that only decodes."""
        return self.step + self.sequence * sequences + self.context * context_tokens

    def prefill(self, tokens: float, offset: float = 0.0) -> float:
        """Return the seconds of computing prompt tokens that follow `offset` others."""
        return self.token * tokens + self.pair * tokens * (offset + tokens / 2)

    def scaled(self, factor: float) -> StepCost:
        """Return the costs of an engine that is so many times slower."""
        return StepCost(*(getattr(self, name) * factor for name in self.__slots__))


class CostFit:
    """Fits the step costs of one engine online."""

    def __init__(self, start: StepCost | None = None) -> None:
        self._decode = _Fit(_SCALES_DECODE, _DECODE_MEMORY)
        self._prefill = _Fit(_SCALES_PREFILL, _PREFILL_MEMORY)
        self._cost = start
        if start is not None:
            self._decode.start((start.step, start.sequence, start.context))
            self._prefill.start((start.token, start.pair))
        self._outliers = 0

    @property
    def cost(self) -> StepCost | None:
        """The present estimate; None before steps of both kinds were seen."""
        return self._cost

    def observe(self, steps: Sequence[StepStats]) -> None:
        """Learn from steps, oldest first."""
        seen = False
        if self._cost is None:
            # What a prefill takes is what it takes beyond decoding: that has to be known first.
            steps = sorted(steps, key=lambda step: step.prefill_tokens > 0)
        for step in steps:
            if step.seconds < _LEAST_STEP_S or self._is_outlier(step):
                continue
            seen = True
            if not step.prefill_tokens:
                self._decode.add((1.0, step.sequences, step.context_tokens), step.seconds)
            elif step.prefill_tokens > 1 or not step.sequences:
                # Also of a step with nothing else in it: it pays the constant part too.
                base = self._base(step)
                rest = max(step.seconds - base, 0.05 * step.seconds)
                self._prefill.add((step.prefill_tokens, step.prefill_pairs), rest, step.seconds)
        if seen and self._decode.known and self._prefill.known:
            a, b, c = self._decode.solve()
            d, e = self._prefill.solve()
            self._cost = StepCost(max(a, _LEAST_STEP_S), b, c, d, e)

    def _base(self, step: StepStats) -> float:
        if self._cost is None:
            a, b, c = self._decode.solve()  # zeros before any step was seen
            return StepCost(a, b, c, 0.0, 0.0).decode_step(step.sequences, step.context_tokens)
        return self._cost.decode_step(step.sequences, step.context_tokens)

    def _is_outlier(self, step: StepStats) -> bool:
        if self._cost is None:
            return False
        estimate = self._base(step)
        estimate += self._cost.token * step.prefill_tokens + self._cost.pair * step.prefill_pairs
        if step.seconds <= _OUTLIER * estimate:
            self._outliers = 0
            return False
        self._outliers += 1
        return self._outliers < _OUTLIERS_BELIEVED


class TransferFit:
    """Fits the seconds of moving KV: a constant and a rate per byte, of one pair or of all."""

    def __init__(self) -> None:
        self._fit = _Fit((1.0, 1e6), _TRANSFER_MEMORY)
        self._coefficients: tuple[float, float] | None = None

    def observe(self, num_bytes: float, seconds: float) -> None:
        """Learn from one transfer."""
        if seconds >= _LEAST_STEP_S:
            self._fit.add((1.0, float(num_bytes)), seconds)
            self._coefficients = None

    @property
    def known(self) -> bool:
        return self._fit.known

    def seconds(self, num_bytes: float) -> float:
        """Return the estimate for a transfer; 0 before any was seen."""
        constant, per_byte = self.coefficients
        return constant + per_byte * num_bytes

    @property
    def coefficients(self) -> tuple[float, float]:
        """Seconds of any transfer, and per byte; zeros before any was seen."""
        if self._coefficients is None:
            constant, per_byte = self._fit.solve()
            self._coefficients = constant, per_byte
        return self._coefficients


class _Fit:
    """Least squares with non-negative coefficients, relative errors and fading memory."""

    def __init__(self, scales: Sequence[float], memory: int) -> None:
        size = len(scales)
        self._scales = tuple(scales)
        self._keep = 1.0 - 1.0 / memory
        self._matrix = [[0.0] * size for _ in range(size)]
        self._vector = [0.0] * size
        self._solution = [0.0] * size
        self._newest: deque[tuple[list[float], float, float]] = deque(maxlen=_NEWEST)
        self.known = False

    def start(self, coefficients: Sequence[float]) -> None:
        """Begin with these; the first observations weigh against them."""
        self._solution = [v * s for v, s in zip(coefficients, self._scales, strict=True)]
        self.known = True

    def add(self, row: Sequence[float], seconds: float, whole: float | None = None) -> None:
        """Learn from one observation; of a part, errors are relative to the whole."""
        x = [value / scale for value, scale in zip(row, self._scales, strict=True)]
        self._add(x, seconds, whole or seconds)
        self.known = True

    def _add(self, x: list[float], seconds: float, whole: float) -> None:
        weight = 1.0 / whole**2
        for i, xi in enumerate(x):
            line = self._matrix[i]
            for j, xj in enumerate(x):
                line[j] = line[j] * self._keep + weight * xi * xj
            self._vector[i] = self._vector[i] * self._keep + weight * xi * seconds
        self._newest.append((x, seconds, whole))

    def solve(self) -> tuple[float, ...]:
        """Return the coefficients."""
        if self.known:
            self._descend()
            # What other coefficients can explain is explained by now.
            if self._is_other_speed():
                self._rescale()
                self._descend()
        return tuple(v / scale for v, scale in zip(self._solution, self._scales, strict=True))

    def _descend(self) -> None:
        """Go from the last solution to the present one, coordinate by coordinate."""
        matrix, solution = self._matrix, self._solution
        size = len(solution)
        before = list(solution)
        carry = _CARRY * (1.0 - self._keep) if any(before) else 0.0
        holds = [carry * matrix[i][i] for i in range(size)]
        for _ in range(_SWEEPS):
            moved = 0.0
            for i in range(size):
                line, last = matrix[i], solution[i]
                scale = line[i] + holds[i]
                if scale <= 0.0:
                    continue
                rest = self._vector[i] - sum(map(operator.mul, line, solution))
                value = (rest + line[i] * last + holds[i] * before[i]) / scale
                solution[i] = value if value > 0.0 else 0.0
                moved = max(moved, abs(solution[i] - last))
            if moved <= _SETTLED * max(solution):
                return

    def _estimate(self, x: list[float]) -> float:
        return max(sum(v * w for v, w in zip(x, self._solution, strict=True)), _LEAST_STEP_S)

    def _is_other_speed(self) -> bool:
        if len(self._newest) < _NEWEST:
            return False
        ratio = statistics.median(
            whole / (whole - seconds + self._estimate(x)) for x, seconds, whole in self._newest
        )
        return not 1 / _OTHER_SPEED < ratio < _OTHER_SPEED

    def _rescale(self) -> None:
        """Take all before the newest steps as if the engine had had its present speed."""
        newest = list(self._newest)
        self._newest.clear()
        now = newest[_NEWEST // 2 :]
        factor = statistics.median(seconds / self._estimate(x) for x, seconds, _ in now)
        for back, (x, seconds, whole) in enumerate(reversed(newest)):
            weight = self._keep**back / whole**2
            for i, xi in enumerate(x):
                for j, xj in enumerate(x):
                    self._matrix[i][j] -= weight * xi * xj
                self._vector[i] -= weight * xi * seconds
        self._matrix = [[max(0.0, v) / factor**2 for v in line] for line in self._matrix]
        self._vector = [max(0.0, v) / factor for v in self._vector]
        self._solution = [value * factor for value in self._solution]
        for x, seconds, whole in now:
            self._add(x, seconds, whole)
