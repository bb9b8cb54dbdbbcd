"""The worker's end of a weight update: a weight-transfer engine for vLLM that takes our offers.

Runs inside vLLM's workers, on CPU and GPU. vLLM drives it through its own weight-transfer API:
start, update, finish. Parameters go through vLLM's layerwise reload, since the kernels' own layout
of weights (prepacked on CPU, quantised or fused on GPU) cannot be loaded into.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config.load import LoadConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from splitroll.model import checkpoint_folder
from splitroll.weights.disk import read_files
from splitroll.weights.offer import WeightOffer
from splitroll.weights.segment import Segment
from splitroll.weights.shm import tensor_at
from splitroll.weights.source import checksum

Named = tuple[str, torch.Tensor]


@dataclass
class _InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing is agreed on beforehand."""


@dataclass
class _UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """An offer as plain values."""

    offer: dict[str, Any]


class OfferedWeights(WeightTransferEngine):  # type: ignore[misc]
    """See the module's docstring."""

    init_info_cls = _InitInfo
    update_info_cls = _UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.checksums: dict[str, str] = {}
        self.seconds = 0.0
        self._begun_s = 0.0
        self._dirty = False
        self._received: set[str] = set()
        self._loaded: set[str] = set()
        self._tracks = True
        self._segments: dict[str, Segment] = {}

    def init_transfer_engine(self, init_info: _InitInfo) -> None:
        """Nothing to agree on."""

    def start_weight_update(self) -> None:
        self._begun_s = time.monotonic()
        if self._dirty:
            # An update before this one failed half-way. What it left in a layer is loaded over.
            finalize_layerwise_reload(self.model, self.model_config)
        self._dirty = True
        self._received = set()
        self._loaded = set()
        self._tracks = True
        self.checksums = {}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The stock method goes on to synchronise an accelerator, which need not exist.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: _UpdateInfo) -> None:
        offer = WeightOffer.from_wire(update_info.offer)
        if offer.segment is None:
            assert offer.folder is not None, "an offer is either of a segment or of a folder"
            self._load(read_files(checkpoint_folder(offer.folder)), offer)
            if missing := [name for name in offer.names if name not in self._received]:
                others = f", nor are {len(missing) - 1} others" if missing[1:] else ""
                raise RuntimeError(f"parameter {missing[0]}: not in {offer.folder}{others}")
            return
        segment = self._attach(offer)
        owners = [bucket.owner for bucket in offer.buckets]
        for index in segment.follow(owners, offer.timeout_s):
            specs = offer.buckets[index].specs
            self._load(((spec.name, tensor_at(segment, spec, at)) for spec, at in specs), offer)

    def finish_weight_update(self) -> None:
        untouched = [m for m in self.model.modules() if _is_untouched(m)]
        finalize_layerwise_reload(self.model, self.model_config)
        self._process_tied(untouched)
        self._dirty = False
        if self._tracks:  # now that tied parameters are one again
            loader = DefaultModelLoader(LoadConfig())
            # As for a quantised model: for others vLLM excuses all linear and embedding layers.
            loader.track_weights_loading(self.model, set(self._loaded), quantized=True)
        self.seconds = time.monotonic() - self._begun_s

    def shutdown(self) -> None:
        for segment in self._segments.values():
            segment.close()
        self._segments = {}

    def _load(self, named: Iterator[Named], offer: WeightOffer) -> None:
        """Hand parameters to the model's own loaders; an error names the parameter."""
        current = ""

        def watched() -> Iterator[Named]:
            nonlocal current
            for name, tensor in named:
                current = name
                self._received.add(name)
                if name in offer.checksum:
                    self.checksums[name] = checksum(tensor)
                yield name, tensor

        try:
            loaded = self.model.load_weights(watched())
        except Exception as exc:  # whatever a model's loader raises, with the parameter's name
            raise RuntimeError(f"parameter {current}: {type(exc).__name__}: {exc}") from exc
        if loaded is None:
            self._tracks = False  # this model's loader does not say what it loaded
        else:
            self._loaded |= loaded

    def _process_tied(self, untouched: list[torch.nn.Module]) -> None:
        """Process the modules again that nothing was loaded into since another module holds their
        weights: on CPU a tied output head computes with a prepacked copy, which vLLM's reload
        leaves as it was. The other module has packed the same weights anew: take its copy."""
        rest = set(self.model.modules()).difference(untouched)
        owners = {id(parameter): m for m in rest for parameter in _own_parameters(m)}
        for module in untouched:
            method = getattr(module, "quant_method", None)
            shared = [owners[id(p)] for p in _own_parameters(module) if id(p) in owners]
            if not shared or not isinstance(method, QuantizeMethodBase):
                continue
            same = type(getattr(shared[0], "quant_method", None)) is type(method)
            if same and hasattr(shared[0], "cpu_linear"):
                module.cpu_linear = shared[0].cpu_linear
                continue
            if hasattr(module, "_already_called_process_weights_after_loading"):
                del module._already_called_process_weights_after_loading
            method.process_weights_after_loading(module)

    def _attach(self, offer: WeightOffer) -> Segment:
        """Map the segment, or find it mapped: two take turns, and mapping costs page faults."""
        assert offer.segment is not None
        if offer.segment.id not in self._segments:
            if len(self._segments) >= 2:
                self._segments.pop(next(iter(self._segments))).close()
            self._segments[offer.segment.id] = Segment.attach(offer.segment)
        segment = self._segments[offer.segment.id]
        segment.address = offer.segment
        return segment


def _own_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def _is_untouched(module: torch.nn.Module) -> bool:
    """Whether an update, not yet finalised, loaded nothing into a module itself."""
    info = get_layerwise_info(module)
    return bool(info.can_load()) and info.load_numel == 0
