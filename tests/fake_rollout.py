"""A rollout without engines, for tests of trainers: it samples with transformers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from transformers import AutoModelForCausalLM

from splitroll.rollout import Activity
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
from splitroll.weights.manifest import checkpoint_manifest, compare
from splitroll.weights.source import reading


@dataclass(frozen=True)
class Report:
    version: int
    seconds: Mapping[str, float] = field(default_factory=lambda: {"load": 0.25, "pause": 0.5})
    total_s: float = 0.75
    nbytes: int = 10


@dataclass
class Call:
    prompts: Sequence[Prompt]
    n: int
    sampling: Sequence[SamplingParams]


class FakeRollout:
    """Samples from the weights that were pushed last, so that log-probabilities can be checked."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._manifest = checkpoint_manifest(folder)
        self.calls: list[Call] = []
        self.pushes: list[dict[str, torch.Tensor]] = []
        self.spoil: Callable[[Group], Group | None] = lambda group: group

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def update_weights(self, weights: Any) -> Report:
        with reading(weights, self._manifest) as source:
            assert compare(source.manifest, self._manifest) == []
            state = {name: tensor.clone() for name, tensor in source}
        self.model.load_state_dict(state, strict=True)
        self.pushes.append(state)
        return Report(len(self.pushes))

    def generate(
        self, prompts: Sequence[Prompt], *, n: int, sampling: Sequence[SamplingParams]
    ) -> Iterator[Group]:
        self.calls.append(Call(prompts, n, sampling))
        pairs = list(zip(prompts, sampling, strict=True))
        random.Random(len(self.calls)).shuffle(pairs)
        for prompt, params in pairs:
            samples = tuple(self._sample(prompt, params, i) for i in range(n))
            if (group := self.spoil(Group(prompt, samples))) is not None:
                yield group

    def activity(self) -> Activity:
        return Activity(sum(len(call.prompts) for call in self.calls), 0, 0, 0, {}, ())

    @torch.no_grad()
    def _sample(self, prompt: Prompt, params: SamplingParams, index: int) -> Sample:
        seed = derive_seed(params.seed or 0, prompt.id, index)
        draw = torch.Generator().manual_seed(seed)
        ids, logprobs = list(prompt.token_ids), []
        ends = False
        while len(logprobs) < params.max_tokens and not ends:
            logits = self.model(torch.tensor([ids])).logits[0, -1] / params.temperature
            token = int(torch.multinomial(logits.softmax(-1), 1, generator=draw))
            logprobs.append(float(logits.log_softmax(-1)[token]))
            ids.append(token)
            ends = token in params.stop_token_ids
        return Sample(
            id=prompt.id,
            sample=index,
            prompt_token_ids=prompt.token_ids,
            token_ids=tuple(ids[len(prompt.token_ids) :]),
            text="",
            logprobs=tuple(logprobs),
            finish_reason="stop" if ends else "length",
            seed=seed,
            weight_version=len(self.pushes),
            prefill_version=len(self.pushes),
            weight_versions=(VersionSpan(len(self.pushes), 0, len(logprobs)),),
            route=Route(RouteKind.SHARED if index else RouteKind.SPLIT, "prefill-0", "decode-0"),
            timing=Timing(0.0, 0.1, 0.2, 0.3),
        )
