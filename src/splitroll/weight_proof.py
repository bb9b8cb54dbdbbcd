"""The proof that weights reach the engines whole: the model's own are pushed back.

Every parameter's checksum must be equal on the sender and on every worker, every prefill/decode
pair must hand off KV as before, and the same prompt get the same log-probabilities as before.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from splitroll.errors import ProofError
from splitroll.fleet.prove import proof_prompt, tolerance
from splitroll.model import checkpoint_folder
from splitroll.rollout import Rollout
from splitroll.types import Group, Prompt, Sample, SamplingParams

_GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class WeightProof:
    """What the push of a model's own weights showed.

    Attributes:
        parameters: whose checksums were equal everywhere.
        max_logprob_gap: between generation before and after, natural logarithm.
    """

    version: int
    engines: int
    parameters: int
    mbytes: float
    total_s: float
    max_logprob_gap: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


async def prove_weights(rollout: Rollout) -> WeightProof:
    """Push the checkpoint's weights and compare; the configuration is to verify all of them.

    Raises:
        WeightUpdateFailed: with the engine and the parameter whose checksum differs.
        ProofError: when generation or a handoff is not what it was.
    """
    from splitroll.weights.disk import read_files  # late: it imports torch

    before = await _generate(rollout)
    report = await rollout.update_weights(read_files(checkpoint_folder(rollout.facts.path)))
    after = await _generate(rollout)
    await rollout.prove()
    gap = max(
        abs(one - other)
        for sample, again in zip(before, after, strict=True)
        for one, other in zip(sample.logprobs, again.logprobs, strict=True)
    )
    dtype = rollout.fleet.ready()[0].info.dtype
    if gap > tolerance(dtype) or report.verified == 0:
        raise ProofError(
            f"after the model's own weights were pushed, log-probabilities differ by {gap:.3g} "
            f"(allowed {tolerance(dtype):g}), and {report.verified} checksums were compared"
        )
    return WeightProof(
        version=report.version,
        engines=len(report.engines),
        parameters=report.verified,
        mbytes=round(report.nbytes / 1e6, 1),
        total_s=round(report.total_s, 3),
        max_logprob_gap=gap,
    )


async def _generate(rollout: Rollout) -> list[Sample]:
    info = rollout.fleet.ready()[0].info
    prompt = Prompt("weights", proof_prompt(4096, info.block_size, info.max_model_len))
    groups = rollout.generate([prompt], n=2, sampling=_GREEDY)
    return [s async for group in groups if isinstance(group, Group) for s in group.samples]
