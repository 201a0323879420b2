"""A rank's own process: it joins the process group, loads its share of the weights, and is stepped with the others."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ditto_core.backends.child import Served
from ditto_core.backends.eager import EagerSession
from ditto_core.backends.ranks.ranks_options import RanksOptions
from ditto_core.model import attention
from ditto_core.model.loading import LoadedModel, freeze, from_location, set_attention
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec


@dataclass(frozen=True)
class Seat:
    """A rank of how many; ``store`` is the file by which they find each other."""

    rank: int
    ranks: int
    store: str


class Rank(Served):
    """Answers as a session in a child process does; :meth:`join` takes the place of opening an engine."""

    def join(
        self, give: Callable[[Any], None], seat: Seat, spec: EngineSpec, directory: Path, taps: tuple[Tap, ...]
    ) -> None:
        """Join the group and load this rank's share of the model in ``directory``; all ranks have to be asked."""
        device = enter(seat)
        options = RanksOptions.of(spec)
        attention.register()
        module = own(options.load, directory, seat) if options.load else sharded(spec, directory, options)
        set_attention(module, spec.attention)
        loaded = LoadedModel(freeze(module), True, spec.model.label, {})
        self.session = EagerSession(loaded, taps, dtype=spec.dtype, device=device)


def enter(seat: Seat) -> str:
    """Join the process group and return this rank's device."""
    os.environ |= {"RANK": str(seat.rank), "LOCAL_RANK": str(seat.rank), "WORLD_SIZE": str(seat.ranks)}
    join: Any = partial(
        torch.distributed.init_process_group,
        init_method=f"file://{seat.store}",
        rank=seat.rank,
        world_size=seat.ranks,
    )
    if not torch.cuda.is_available():
        join("gloo")
        return "cpu"
    device = torch.device("cuda", seat.rank)
    torch.cuda.set_device(device)
    join("nccl", device_id=device)
    return str(device)


def sharded(spec: EngineSpec, directory: Path, options: RanksOptions) -> nn.Module:
    """Load a rank's share by the model's own tensor-parallel plan."""
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=options.ranks, tp_plan=dict(options.plan) or "auto")
    source = replace(spec.model, location=str(directory))
    return from_location(source, directory, getattr(torch, spec.dtype), distributed_config=config).module


def own(load: str, directory: Path, seat: Seat) -> nn.Module:
    """Call the user's own function."""
    module, _, name = load.partition(":")
    made: nn.Module = getattr(importlib.import_module(module), name)(directory, seat.rank, seat.ranks)
    return made
