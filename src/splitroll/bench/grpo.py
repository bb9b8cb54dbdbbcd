"""A GRPO step with splitroll beside one of TRL with a vLLM engine in its own process.

    python -m splitroll.bench.grpo --out runs/overhead --steps 5

The same task, trainer, seeds and sampling; three ways to generate, in turn: one plain `vllm.LLM` in
the trainer's process, whose weights are reloaded from a file in memory by vLLM itself; splitroll
with one colocated engine; splitroll with one prefill and two decode engines. The first step of
each, which warms up, is left out. Writes `overhead.png` and prints the mean breakdown of each.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from splitroll.blocking import BlockingRollout
from splitroll.config import Config
from splitroll.model import checkpoint_folder
from splitroll.report import StepRecord, mean_parts, write_comparison
from splitroll.rollout import Activity
from splitroll.train import plan_training, train
from splitroll.types import (
    Group,
    Prompt,
    Route,
    RouteKind,
    Sample,
    SamplingParams,
    Timing,
    VersionSpan,
    derive_seed,
)

ONE_ENGINE = ("disaggregation.enabled=false", "colocated.replicas=1")
PLAIN = "TRL, vLLM in its process"
WAYS: Mapping[str, tuple[str, ...]] = {
    PLAIN: ONE_ENGINE,
    "splitroll, 1 colocated engine": ONE_ENGINE,
    "splitroll, 1 prefill + 2 decode": (),
}

_CURES = {
    # The same that our own engines get on CPU.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


@dataclass(frozen=True, slots=True)
class _Report:
    version: int
    nbytes: int
    total_s: float
    seconds: Mapping[str, float]


class PlainRollout:
    """One `vllm.LLM` in this process, with what `TrlBridge` asks of a rollout."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._version = 0

    def __enter__(self) -> Self:
        os.environ.update(_CURES)
        from vllm import LLM

        self._llm = LLM(
            model=str(self._folder),
            dtype=self._config.engine["dtype"],
            enforce_eager=True,
            block_size=32,
            kv_cache_memory_bytes=512 * 1024**2,
            max_num_seqs=64,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            distributed_executor_backend="uni",
        )
        return self

    def __exit__(self, *_: object) -> None:
        del self._llm

    def generate(
        self, prompts: Sequence[Prompt], *, n: int, sampling: Sequence[SamplingParams]
    ) -> Iterator[Group]:
        from vllm import SamplingParams as VllmSamplingParams

        asked = [(p, s, i) for p, s in zip(prompts, sampling, strict=True) for i in range(n)]
        begun = time.perf_counter()
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(prompt.token_ids)} for prompt, _, _ in asked],
            [
                VllmSamplingParams(
                    max_tokens=s.max_tokens,
                    temperature=s.temperature,
                    stop_token_ids=list(s.stop_token_ids),
                    seed=derive_seed(s.seed or 0, prompt.id, i),
                    logprobs=0,
                )
                for prompt, s, i in asked
            ],
            use_tqdm=False,
        )
        wall_s = time.perf_counter() - begun
        samples = [
            self._sample(prompt, i, output.outputs[0], wall_s)
            for (prompt, _, i), output in zip(asked, outputs, strict=True)
        ]
        for index, prompt in enumerate(prompts):
            yield Group(prompt, tuple(samples[index * n : index * n + n]))

    def update_weights(self, weights: Any) -> _Report:
        from safetensors.torch import save_file

        begun = time.perf_counter()
        # Not `save_pretrained`, which spends its time on other files.
        state = {name: p.detach().contiguous() for name, p in weights.named_parameters()}
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            save_file(state, Path(folder) / "model.safetensors")
            written_s = time.perf_counter() - begun
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        self._llm.reset_prefix_cache()
        self._version += 1
        total_s = time.perf_counter() - begun
        nbytes = sum(p.numel() * p.element_size() for p in state.values())
        phases = {"write": written_s, "load": total_s - written_s}
        return _Report(self._version, nbytes, total_s, phases)

    def activity(self) -> Activity:
        return Activity(0, 0, 0, 0, {}, ())

    def _sample(self, prompt: Prompt, index: int, output: Any, wall_s: float) -> Sample:
        token_ids = tuple(output.token_ids)
        logprobs = [entry[t].logprob for t, entry in zip(token_ids, output.logprobs, strict=True)]
        return Sample(
            id=prompt.id,
            sample=index,
            prompt_token_ids=prompt.token_ids,
            token_ids=token_ids,
            text=output.text,
            logprobs=tuple(logprobs),
            finish_reason=output.finish_reason,
            seed=0,
            weight_version=self._version,
            prefill_version=self._version,
            weight_versions=(VersionSpan(self._version, 0, len(token_ids)),),
            route=Route(RouteKind.LOCAL, "vllm", "vllm"),
            timing=Timing(0.0, 0.0, 0.0, wall_s),
        )


def run(way: str, out: Path, steps: int, console: Console) -> list[StepRecord]:
    """Train a few steps one way; returns the records after the first."""
    overrides = [*WAYS[way], f"train.out={out}", f"train.steps={steps}"]
    plan = plan_training(None, overrides, overwrite=True)

    def open_rollout(config: Config) -> AbstractContextManager[Any]:
        if way == PLAIN:
            return PlainRollout(config, checkpoint_folder(plan.facts.path))
        return BlockingRollout(config)

    console.print(f"{way} ...", style="dim")
    return train(plan, open_rollout=open_rollout)[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for figure and runs")
    parser.add_argument("--steps", type=int, default=5, help="of each way (%(default)s)")
    args = parser.parse_args()
    console = Console(stderr=True)
    runs = {way: run(way, args.out / str(i), args.steps, console) for i, way in enumerate(WAYS)}
    write_comparison(args.out / "overhead.png", runs)
    parts = list(dict.fromkeys(part for steps in runs.values() for part in mean_parts(steps)))
    table = Table(title=f"mean seconds of a step, {args.steps - 1} steps each")
    for column in ("", *parts, "total", "gap"):
        table.add_column(column)
    for way, steps in runs.items():
        means = mean_parts(steps)
        total_s = sum(step.total_s for step in steps) / len(steps)
        gap = max(step.logprob_gap_mean or 0.0 for step in steps)
        cells = [f"{means.get(part, 0.0):.2f}" for part in parts]
        table.add_row(way, *cells, f"{total_s:.2f}", f"{gap:.1e}")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
