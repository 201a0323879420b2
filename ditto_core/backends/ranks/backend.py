"""The backend: the model's own modules under PyTorch, sharded over ranks by its tensor-parallel plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch

from ditto_core.backends.base import BuildReport, BuildRequest
from ditto_core.backends.eager import EagerSession
from ditto_core.backends.ranks.ranks_options import RanksOptions
from ditto_core.backends.ranks.session import RanksSession
from ditto_core.backends.served.source import model_facts, served_model
from ditto_core.errors import BackendError, SelectorError
from ditto_core.model.examples import token_inputs
from ditto_core.session import SessionInfo
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec

MANIFEST = "ranks.json"


class TensorParallelBackend:
    """Options: :class:`~ditto_core.backends.ranks.ranks_options.RanksOptions`.

    The collectives are NCCL's where there are GPUs, one for each rank, and gloo's on the CPU.
    """

    name = "torch-tp"
    dtypes = ("float32", "float16", "bfloat16", "float64")

    def check(self, spec: EngineSpec) -> None:
        """Raise when an option is unknown, transformers cannot shard a model, or there are too few GPUs."""
        ranks = RanksOptions.of(spec).ranks
        if spec.dtype not in self.dtypes:
            raise BackendError(f"torch-tp computes in {', '.join(self.dtypes)}, got {spec.dtype}")
        if not RanksOptions.of(spec).load and not can_shard():
            raise BackendError("torch-tp needs a transformers whose DistributedConfig has tp_size: pip install -U it")
        gpus = torch.cuda.device_count()
        if 0 < gpus < ranks:
            raise BackendError(f"torch-tp needs a GPU for each of {ranks} ranks, here are {gpus}")

    def versions(self) -> dict[str, str]:
        """What shards and computes."""
        import transformers

        return {"torch": str(torch.__version__), "transformers": transformers.__version__}

    def raw_taps(self, name: str, alias: str) -> Sequence[Tap]:
        """Raise: the modules have the names of sites, and no others."""
        raise SelectorError(f"torch-tp has no raw names, got {name!r}: ask for the model's own modules")

    def build(self, request: BuildRequest) -> BuildReport:
        """Write down the shapes that tensors have in the model, by which the ranks' shares are joined.

        Nothing is built ahead: each session loads the model.
        """
        manifest = {**model_facts(request, self.name), "shapes": shapes(request)}
        (request.directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        return BuildReport(request.taps)

    def open(self, spec: EngineSpec, directory: Path, taps: tuple[Tap, ...]) -> RanksSession:
        """Load the model, a share on each rank."""
        manifest = json.loads((directory / MANIFEST).read_text())
        place = Path(served_model(manifest, spec, directory))
        return RanksSession(spec, place, taps, RanksOptions.of(spec).ranks, manifest["shapes"], self._info(spec))

    def _info(self, spec: EngineSpec) -> SessionInfo:
        cuda = torch.cuda.is_available()
        facts = {**self.versions(), "ranks": f"{RanksOptions.of(spec).ranks}, {'nccl' if cuda else 'gloo'}"}
        device = "cuda" if cuda else "cpu"
        return SessionInfo(f"torch-tp {spec.dtype}", self.name, spec.dtype, device, spec.model.label, facts)


def can_shard() -> bool:
    """Tell whether transformers takes a size and a plan of tensor parallelism."""
    try:
        from transformers.distributed import DistributedConfig
    except ImportError:
        return False
    return {"tp_size", "tp_plan"} <= {field.name for field in fields(DistributedConfig)}


def shapes(request: BuildRequest) -> dict[str, list[int]]:
    """Return the shapes of all taps and final outputs in the model itself, for a few tokens."""
    session = EagerSession(request.model(), request.taps, dtype=request.spec.dtype)
    session.start(len(token_inputs()["input_ids"]))
    found: dict[str, torch.Tensor] = {}
    found |= session.step(token_inputs(), found.__setitem__)
    return {name: list(tensor.shape) for name, tensor in found.items()}
