"""A rollout without engines, for tests of trainers: it samples with transformers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from transformers import AutoModelForCausalLM

from splitroll.dispatch.assembly import GroupWork
from splitroll.environment import AnyEnvironment, Encode, EpisodeGroup
from splitroll.episodes import EpisodeLimits, run_episodes
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
    """Samples from the weights that were pushed last, so that log-probabilities can be checked.

    Episodes are played as a real rollout plays them; only what generates their turns is made up.

    Attributes:
        calls: of `generate`.
        works: every group that was generated, later turns of episodes included.
    """

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._manifest = checkpoint_manifest(folder)
        self.calls: list[Call] = []
        self.pushes: list[dict[str, torch.Tensor]] = []
        self.works: list[GroupWork] = []
        self.spoil: Callable[[Any], Any] = lambda group: group

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
        self,
        prompts: Sequence[Prompt],
        *,
        n: int,
        sampling: Sequence[SamplingParams],
        environment: AnyEnvironment | None = None,
        encode: Encode | None = None,
    ) -> Iterator[Group | EpisodeGroup]:
        self.calls.append(Call(prompts, n, sampling))
        pairs = list(zip(prompts, sampling, strict=True))
        random.Random(len(self.calls)).shuffle(pairs)
        for prompt, params in pairs:
            work = GroupWork(prompt, n, params, derive_seed(params.seed or 0, prompt.id))
            group = self.spoil(asyncio.run(self._group(work, environment, encode)))
            if group is not None:
                yield group

    def activity(self) -> Activity:
        return Activity(len(self.works), 0, 0, 0, {}, ())

    async def _group(
        self, work: GroupWork, environment: AnyEnvironment | None, encode: Encode | None
    ) -> Group | EpisodeGroup:
        if environment is None:
            return await self._run(work)
        assert encode is not None
        limits = EpisodeLimits(60.0, self.model.config.vocab_size)
        return await run_episodes(self._run, work, environment, encode, limits)

    async def _run(self, work: GroupWork) -> Group:
        self.works.append(work)
        return Group(work.prompt, tuple(self._sample(work, i) for i in range(work.n)))

    @torch.no_grad()
    def _sample(self, work: GroupWork, index: int) -> Sample:
        prompt, params = work.prompt, work.sampling
        seed = derive_seed(work.seed, index)
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
