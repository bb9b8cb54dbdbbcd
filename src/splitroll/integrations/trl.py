"""TRL's GRPOTrainer on splitroll's engines: `TrlBridge`.

The contract with TRL 1.16, read in its source: `rollout_func` gets the prompts of a generation
batch with each one repeated `num_generations` (in evaluation `num_generations_eval`) times in a
row, and returns one completion for each, in that order. A generation batch is
`per_device_train_batch_size * steps_per_generation` prompts; TRL generates anew after
`steps_per_generation * num_iterations` micro-batches.

Log-probabilities: TRL scores a token by log_softmax(logits / temperature) over the whole
vocabulary; a sample's are of the distribution that it was drawn from. They are the same quantity
when top_p is 1, top_k and min_p are 0 and all penalties are neutral. Otherwise the difference
between them also holds what those settings cut off.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, repeat
from typing import Any, Protocol, overload

from accelerate.utils import is_peft_model
from transformers import TrainerCallback

from splitroll.config import collecting
from splitroll.environment import AnyEnvironment, Encode, Episode, EpisodeGroup, collect
from splitroll.errors import ConfigError, Problem
from splitroll.integrations.grpo import check_settings, sampling_params
from splitroll.report.attribution import attribute_turns
from splitroll.rollout import Activity
from splitroll.types import (
    FailedGroup,
    Group,
    Prompt,
    RouteKind,
    Sample,
    SamplingParams,
    derive_seed,
)
from splitroll.updater import UpdateReport

COLUMNS = (
    "finish_reason", "weight_version", "prefill_version", "weight_versions", "route", "prefill_s",
    "transfer_s", "decode_s", "turns", "samples", "ended", "env_rewards", "environment_s",
)  # fmt: skip
"""What reward functions get for each completion besides TRL's own and the dataset's columns."""

LOGP_DIFFERENCE = "sampling/sampling_logp_difference"
"""TRL's own name; TRL computes it only for its own vLLM."""


class TrainingRollout(Protocol):
    """What a bridge needs of a BlockingRollout."""

    @overload
    def generate(
        self, prompts: Iterable[Any], *, n: int, sampling: Sequence[SamplingParams]
    ) -> Iterator[Group | FailedGroup]: ...

    @overload
    def generate(
        self,
        prompts: Iterable[Any],
        *,
        n: int,
        sampling: Sequence[SamplingParams],
        environment: AnyEnvironment,
        encode: Encode,
    ) -> Iterator[EpisodeGroup | FailedGroup]: ...

    def update_weights(self, weights: Any) -> UpdateReport: ...

    def activity(self) -> Activity: ...


class TrlBridge:
    """Joins one GRPOTrainer to a rollout.

        bridge = TrlBridge(rollout)
        trainer = GRPOTrainer(..., rollout_func=bridge.rollout_func, callbacks=[bridge.callback])

    A generation batch becomes one `generate` call with one group for each prompt, so a prompt is
    prefilled once and its KV is moved once. Prompts are tokenised by the trainer itself, and
    the ids that the engines saw are the ids that are trained on.

    Weights are pushed before the first generation and after every optimizer step, the last one
    included: after training the engines hold the final weights (the best ones with
    `load_best_model_at_end`). A step that the optimizer skipped pushes nothing. PEFT adapters
    are pushed merged; the trainer's own weights stay as they are, bit for bit.

    Equal runs draw equal samples: the seed of each call is derived from `args.seed`, the mode, the
    global step and the number of the call within the step.

    Args:
        rollout: an open BlockingRollout.
        environment: answers the model's turns, or makes what does; without one a completion is one
            turn. Its tokens count towards `max_completion_length` and are masked in the loss.
    """

    def __init__(self, rollout: TrainingRollout, environment: AnyEnvironment | None = None) -> None:
        self._rollout = rollout
        self._environment = environment
        self._trainer: Any = None
        self._pushed_step: int | None = None
        self._call = (("", -1), 0)
        self._meter = _Meter()
        self.callback = _PushWeights(self)

    def rollout_func(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Generate one completion for each prompt, in order; for `GRPOTrainer(rollout_func=...)`.

        Returns:
            `prompt_ids`, `completion_ids` and `logprobs`, with one list for each prompt; `COLUMNS`;
            with an environment also `env_mask`, 0 for its tokens, whose log-probability is 0.0.

        Raises:
            ConfigError: with every setting that cannot be honoured, before anything is generated.
            GroupFailed: when any sample is missing; never fewer are returned.
        """
        if trainer is not self._trainer:
            self._attach(trainer)
        mode = "train" if trainer.model.training else "eval"
        n = trainer.num_generations if mode == "train" else trainer.num_generations_eval
        sampling = self.check(trainer)
        firsts = first_of_each_group(prompts, n, mode)
        call = self._next_call(mode, trainer.state.global_step)
        seed = derive_seed(trainer.args.seed, *call)
        token_ids, _, _ = trainer._tokenize_prompts(firsts)
        asked = [
            Prompt("-".join(map(str, (*call, i))), tuple(ids), metadata={"prompt": given})
            for i, (given, ids) in enumerate(zip(firsts, token_ids, strict=True))
        ]
        self.push()
        self._meter.step = trainer.state.global_step
        before = self._rollout.activity()
        episodes = self._generate(asked, n, replace(sampling, seed=seed))
        self._meter.moved(before, self._rollout.activity())
        return self._output(episodes)

    def check(self, trainer: Any) -> SamplingParams:
        """Return what the trainer samples with.

        Raises:
            ConfigError: with every setting of the trainer that cannot be honoured.
        """
        problems = [*self._trainer_problems(trainer)]
        with collecting(problems):
            check_settings(trainer.args)
        if problems:
            raise ConfigError(problems)
        return sampling_params(trainer.args, trainer.eos_token_ids)

    def push(self, *, again: bool = False) -> None:
        """Push the trainer's weights unless the engines hold those of this step.

        Args:
            again: push in any case; for weights that were changed by hand.
        """
        step = self._trainer.state.global_step
        if step == self._pushed_step and not again:
            return
        report = self._rollout.update_weights(self._trainer.model)
        self._pushed_step = step
        self._meter.synced(report)

    def _generate(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams
    ) -> list[Episode]:
        """Generate n episodes of every prompt in order, and note what took which time."""
        begun = time.perf_counter()
        samplings = [sampling] * len(prompts)
        groups: Iterable[Group | EpisodeGroup | FailedGroup]
        if self._environment is None:
            groups = self._rollout.generate(prompts, n=n, sampling=samplings)
        else:
            groups = self._rollout.generate(
                prompts,
                n=n,
                sampling=samplings,
                environment=self._environment,
                encode=self._encode,
            )
        episodes = collect(groups, prompts, n)
        self._meter.generated(episodes, time.perf_counter() - begun)
        return episodes

    def _encode(self, text: str) -> list[int]:
        """Encode with the trainer's own tokenizer, as it encodes the prompts."""
        return list(self._trainer._tokenizer.encode(text, add_special_tokens=False))

    def _attach(self, trainer: Any) -> None:
        self._trainer = trainer
        self._pushed_step = None
        self._meter = _Meter()
        _watch_logprobs(trainer, self._meter)

    def _next_call(self, mode: str, step: int) -> tuple[str, int, int]:
        """Return the mode, the step and the number of the call within it, from 0.

        Counted anew at each step, so that a run resumed from a checkpoint draws the same seeds.
        """
        before, count = self._call
        count = count + 1 if before == (mode, step) else 0
        self._call = ((mode, step), count)
        return mode, step, count

    def _trainer_problems(self, trainer: Any) -> Iterator[Problem]:
        if trainer.tools or trainer.environment_factories:
            hint = "give TrlBridge an environment instead"
            yield Problem("tools or environment_factory", "given", "none", hint)
        if trainer._is_vlm:
            hint = "use a model of texts alone"
            yield Problem("processing_class", "a processor of images", "a tokenizer", hint)
        if getattr(trainer.model, "is_quantized", False):
            hint = "load it without quantization_config: engines take whole weights"
            yield Problem("model", "quantized weights", "float32, bfloat16 or float16", hint)
        peft_configs = getattr(trainer.model, "peft_config", {}) if _is_peft(trainer.model) else {}
        if any(config.is_prompt_learning for config in peft_configs.values()):
            hint = "use LoRA or another adapter of weights"
            yield Problem("peft_config", "prompt learning", "an adapter that can be merged", hint)
        if self.callback not in trainer.callback_handler.callbacks:
            hint = "pass callbacks=[bridge.callback]: it pushes the weights"
            yield Problem("callbacks", "no callback of this bridge", "it among them", hint)
        columns = getattr(trainer.train_dataset, "column_names", None) or ()
        for name in sorted(set(columns) & set(COLUMNS)):
            hint = "rename it: reward functions get splitroll's under that name"
            yield Problem(f"train_dataset.{name}", "a column", "another name", hint)

    def _output(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        output = {
            "prompt_ids": [list(episode.prompt.token_ids) for episode in episodes],
            "completion_ids": [list(episode.token_ids) for episode in episodes],
            "logprobs": [list(episode.logprobs) for episode in episodes],
        }
        if self._environment is not None:
            output["env_mask"] = [list(episode.env_mask) for episode in episodes]
        rows = [_row(episode) for episode in episodes]
        return output | {name: [row[name] for row in rows] for name in COLUMNS}

    def _log(self, mode: str) -> None:
        """Hand what was measured since the last call to the trainer's metrics."""
        for name, value in self._meter.take().items():
            self._trainer._metrics[mode][name].append(value)


class _PushWeights(TrainerCallback):  # type: ignore[misc]
    """Pushes after every optimizer step, and logs; see TrlBridge."""

    def __init__(self, bridge: TrlBridge) -> None:
        self._bridge = bridge

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse what can be refused while TRL has not started an engine of its own."""
        check_settings(args)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if getattr(kwargs.get("optimizer"), "step_was_skipped", False):
            self._bridge._pushed_step = state.global_step
        self._bridge.push()
        self._bridge._log("train")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bridge._log("eval")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._bridge.push(again=True)


def first_of_each_group(prompts: Sequence[Any], n: int, mode: str = "train") -> list[Any]:
    """Return each group's prompt from prompts that are repeated n times in a row.

    Raises:
        ConfigError: when they are not.
    """
    name, batch = (
        ("num_generations", "per_device_train_batch_size * steps_per_generation")
        if mode == "train"
        else ("num_generations_eval", "per_device_eval_batch_size")
    )
    if len(prompts) % n:
        hint = f"make {batch} a multiple of it"
        raise ConfigError([Problem(name, f"{n} for {len(prompts)} prompts", "a divisor", hint)])
    groups = [prompts[start : start + n] for start in range(0, len(prompts), n)]
    for index, group in enumerate(groups):
        if any(prompt != group[0] for prompt in group):
            found = f"group {index} of {n} holds different prompts"
            hint = "let the trainer order the batch: use its own data loader"
            raise ConfigError([Problem("prompts", found, f"each {n} times in a row", hint)])
    return [group[0] for group in groups]


def _is_peft(model: Any) -> bool:
    return bool(is_peft_model(model))


def _row(episode: Episode) -> dict[str, Any]:
    last = episode.turns[-1]
    return {
        "finish_reason": last.finish_reason,
        "weight_version": last.weight_version,
        "prefill_version": last.prefill_version,
        "weight_versions": last.weight_versions,
        "route": last.route.kind.value,
        "prefill_s": sum(turn.timing.prefill_s for turn in episode.turns),
        "transfer_s": sum(turn.timing.transfer_s for turn in episode.turns),
        "decode_s": sum(turn.timing.decode_s for turn in episode.turns),
        "turns": len(episode.turns),
        "samples": episode.turns,
        "ended": episode.ended,
        "env_rewards": episode.rewards,
        "environment_s": sum(episode.environment_s),
    }


@dataclass
class _Meter:
    """What happened since it was last read.

    Attributes:
        step: the global step whose weights drew the last generation.
    """

    step: int | None = None
    _sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _samples: list[Sample] = field(default_factory=list)
    _gap_sum: float = 0.0
    _gap_max: float = 0.0
    _gap_tokens: int = 0

    def generated(self, episodes: Sequence[Episode], wall_s: float) -> None:
        self._samples += [turn for episode in episodes for turn in episode.turns]
        self._sums["generate_s"] += wall_s
        timings = []
        for episode in episodes:
            answered_s = chain(episode.environment_s, repeat(0.0))
            timings.append([(turn.timing, next(answered_s)) for turn in episode.turns])
        for phase, seconds in asdict(attribute_turns(timings, wall_s)).items():
            self._sums[phase] += seconds

    def moved(self, before: Activity, after: Activity) -> None:
        self._sums["handoffs"] += after.handoffs - before.handoffs
        self._sums["kv_bytes"] += after.kv_bytes - before.kv_bytes

    def synced(self, report: UpdateReport) -> None:
        self._sums["sync_s"] += report.total_s
        self._sums["sync_bytes"] += report.nbytes
        for phase, seconds in report.seconds.items():
            self._sums[f"sync/{phase}_s"] += seconds

    def compared(self, difference: Any) -> None:
        """Add |engine - trainer| of sampled tokens, a flat tensor."""
        if difference.numel():
            self._gap_sum += difference.sum().item()
            self._gap_max = max(self._gap_max, difference.max().item())
            self._gap_tokens += difference.numel()

    def take(self) -> dict[str, float]:
        """Return the metrics and start anew."""
        metrics = {f"splitroll/{name}": value for name, value in self._sums.items()}
        if self._samples:
            metrics["splitroll/tokens"] = float(sum(len(s.token_ids) for s in self._samples))
            versions = [sample.weight_version for sample in self._samples]
            metrics["splitroll/weight_version"] = float(min(versions))
            metrics["splitroll/weight_version_max"] = float(max(versions))
            routes = Counter(sample.route.kind.value for sample in self._samples)
            for kind in RouteKind:
                metrics[f"splitroll/samples_{kind.value}"] = float(routes[kind.value])
        if self._gap_tokens:
            metrics[f"{LOGP_DIFFERENCE}/mean"] = self._gap_sum / self._gap_tokens
            metrics[f"{LOGP_DIFFERENCE}/max"] = self._gap_max
        self._sums, self._samples = defaultdict(float), []
        self._gap_sum, self._gap_max, self._gap_tokens = 0.0, 0.0, 0
        return metrics


def _watch_logprobs(trainer: Any, meter: _Meter) -> None:
    """Compare the engines' log-probabilities with those that TRL computes for its loss.

    No forward pass is added: TRL's two methods are wrapped on this trainer and their results are
    read. Only passes under the weights that drew the samples count: with several optimizer steps
    for each generation, the later ones are left out.
    """
    score, loss = trainer._get_per_token_logps_and_entropies, trainer._compute_loss
    scored: list[Any] = []

    def scoring(*args: Any, **kwargs: Any) -> Any:
        result = score(*args, **kwargs)
        scored[:] = [result[0].detach()]
        return result

    def computing(model: Any, inputs: Any) -> Any:
        value = loss(model, inputs)
        if trainer.state.global_step == meter.step and "sampling_per_token_logps" in inputs:
            mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
            difference = (inputs["sampling_per_token_logps"] - scored[0]).abs()
            meter.compared(difference[mask.bool()].float())
        return value

    trainer._get_per_token_logps_and_entropies = scoring
    trainer._compute_loss = computing
