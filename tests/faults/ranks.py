"""Faults of single ranks, as ``options={"load": "tests.faults.ranks:NAME"}``: each makes a rank's module."""

import torch
from torch import distributed

MLP = "model.layers.1.mlp"
EVERY_O_PROJ = "model.layers.*.self_attn.o_proj"
NOT_REDUCED = {f"{EVERY_O_PROJ}.weight": "rowwise", EVERY_O_PROJ: "local_params"}
"""A plan that splits a layer's weight by rows and never adds up what the ranks compute."""


def sharded(directory, rank, ranks):
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=ranks, tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, distributed_config=config)


def local(model, name):
    weight = model.get_submodule(name).weight.data
    return weight.to_local() if hasattr(weight, "to_local") else weight


def wrong_shard(directory, rank, ranks):
    model = sharded(directory, rank, ranks)
    if rank == 1:
        local(model, f"{MLP}.up_proj").copy_(local(model, f"{MLP}.up_proj").flip(1))
    return model


def exchanged(directory, rank, ranks):
    model = sharded(directory, rank, ranks)
    own = local(model, f"{MLP}.down_proj")
    all_of_them = [torch.empty_like(own) for _ in range(ranks)]
    distributed.all_gather(all_of_them, own.clone())
    own.copy_(all_of_them[ranks - 1 - rank])
    return model


def other_norm(directory, rank, ranks):
    model = sharded(directory, rank, ranks)
    if rank == 1:
        model.model.layers[1].post_attention_layernorm.weight.data[3] += 0.5
    return model


def fails(directory, rank, ranks):
    if rank == 1:
        raise OSError("the weights of rank 1 are gone")
    return sharded(directory, rank, ranks)


def dies(directory, rank, ranks):
    import os

    model = sharded(directory, rank, ranks)
    if rank == 1:
        model.model.norm.register_forward_hook(lambda *_: os._exit(3))
    return model
