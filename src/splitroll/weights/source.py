"""What a trainer hands over, as a stream of named tensors in the engines' terms.

Takes a module (plain, FSDP, DDP, compiled, or a PeftModel, whose adapter is merged for the time of
the reading), a state dict, or an iterator of (name, tensor).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from splitroll.errors import ConfigError, Problem
from splitroll.weights.manifest import Manifest, ParamSpec

_WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.", "module.")
"""What wrappers put into the names of a module's parameters."""


@dataclass(frozen=True, slots=True)
class Source:
    """Named tensors, not yet gathered: by the engines' names, in the trainer's order."""

    tensors: Mapping[str, torch.Tensor]

    @property
    def manifest(self) -> Manifest:
        return tuple(
            ParamSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        )

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor); gathers the shards of a distributed tensor, which is a
        collective of the trainer's ranks."""
        for name, tensor in self.tensors.items():
            yield name, materialize(tensor)

    def take_part(self, name: str) -> None:
        """Do what gathering a parameter takes of a rank that does not send it."""
        if is_sharded(self.tensors[name]):
            materialize(self.tensors[name])


@contextlib.contextmanager
def reading(weights: Any, wanted: Manifest) -> Iterator[Source]:
    """Read what a trainer gave, for as long as its tensors are to be read.

    Tied parameters that the engines know by one name are sent once.

    Raises:
        ConfigError: when it is none of what can be read, or a name comes twice.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(weights, torch.nn.Module):
            tensors = stack.enter_context(_module_tensors(weights))
        elif isinstance(weights, Mapping):
            tensors = dict(weights)
        elif isinstance(weights, Iterable) and not isinstance(weights, str | bytes):
            tensors = _collected(weights)
        else:
            hint = "pass the model, its state dict, or (name, tensor) pairs"
            found = type(weights).__name__
            raise ConfigError([Problem("weights", found, "a module or named tensors", hint)])
        wrong = [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]
        if wrong:
            found, hint = type(tensors[wrong[0]]).__name__, "leave it out"
            raise ConfigError([Problem(f"weights.{wrong[0]}", found, "a tensor", hint)])
        yield Source(_untied(tensors, {spec.name for spec in wanted}))


def is_sharded(tensor: Any) -> bool:
    """Whether it is a shard whose gathering takes all ranks (torch's DTensor)."""
    return callable(getattr(tensor, "full_tensor", None))


def materialize(tensor: Any) -> torch.Tensor:
    """Return the whole tensor, detached: a shard is gathered."""
    whole: torch.Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole.detach()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def checksum(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, in hexadecimal."""
    return hashlib.sha256(_flat(tensor).numpy().data).hexdigest()


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(_flat(tensor).numpy())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


@contextlib.contextmanager
def _module_tensors(module: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    is_peft = hasattr(module, "merge_adapter") and hasattr(module, "unmerge_adapter")
    with _merged(module) if is_peft else contextlib.nullcontext():
        named = dict(module.named_parameters(remove_duplicate=False))
        named |= _persistent_buffers(module)
        yield _collected(_plain_names(named, is_peft).items())


@contextlib.contextmanager
def _merged(module: Any) -> Iterator[None]:
    """Merge a PEFT model's adapters for a while. Subtracting them again rounds, and would drift
    over many updates: the base weights are put back from copies, bit for bit."""
    bases = [child.base_layer for child in module.modules() if hasattr(child, "base_layer")]
    adapted = [parameter for base in bases for parameter in base.parameters()]
    copies = [parameter.detach().clone() for parameter in adapted]
    with torch.no_grad():
        module.merge_adapter()
        try:
            yield
        finally:
            module.unmerge_adapter()
            for parameter, copy in zip(adapted, copies, strict=True):
                parameter.copy_(copy)


def _persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{path}.{name}" if path else name: buffer
        for path, child in module.named_modules()
        for name, buffer in child.named_buffers(recurse=False)
        if name not in child._non_persistent_buffers_set
    }


def _plain_names(named: Mapping[str, torch.Tensor], is_peft: bool) -> dict[str, torch.Tensor]:
    plain = {}
    for name, tensor in named.items():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        if is_peft:
            if "lora_" in name or ".original_module." in name:
                continue  # merged into the base; replaced by a module that is trained whole
            name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            name = name.replace(".modules_to_save.default.", ".")
        plain[name] = tensor
    return plain


def _collected(pairs: Iterable[Any]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in pairs:
        if name in tensors:
            hint = "send every parameter once"
            raise ConfigError([Problem(f"weights.{name}", "it comes twice", "once", hint)])
        tensors[name] = tensor
    return tensors


def _untied(tensors: Mapping[str, torch.Tensor], wanted: set[str]) -> dict[str, torch.Tensor]:
    """Drop names that the engines lack where the same tensor is sent under one that they have."""
    kept = {name: tensor for name, tensor in tensors.items() if name in wanted}
    sent = list(kept.values())
    for name, tensor in tensors.items():
        if name not in wanted and not any(_same(tensor, other) for other in sent):
            kept[name] = tensor
    return kept


def _same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two names mean one parameter: the same object, memory, or values."""
    if tensor is other:
        return True
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    if is_sharded(tensor):
        return False  # telling would take a collective
    return bool(tensor.data_ptr() == other.data_ptr() or torch.equal(tensor, other))
