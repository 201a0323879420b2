"""A model whose export broke off is exported again as if nothing had been."""

from collections import OrderedDict
from contextlib import closing

import pytest
import torch
from torch import nn

from ditto_core.cache import Cache
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import BuildError
from ditto_core.pair.pair import Pair
from ditto_core.spec import EngineSpec

X = torch.arange(6.0).reshape(2, 3)


class KeepsATable(nn.Module):
    """Makes its table while it is traced, as models do with masks and positions."""

    allowed = False
    table = None

    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, x):
        if torch.compiler.is_exporting() and self.table is None:
            self.table = torch.ones(3)
        if torch.compiler.is_exporting() and not KeepsATable.allowed:
            raise RuntimeError("not now")
        return self.relu(x) if self.table is None else self.relu(x) * self.table


def keeps_a_table():
    return KeepsATable(), {"x": X}


def test_a_failed_export_leaves_nothing_in_the_model(tmp_path, monkeypatch):
    workspace, spec = Workspace(Cache(tmp_path)), EngineSpec.of(keeps_a_table)
    with pytest.raises(BuildError, match="not now"):
        workspace.export(spec)
    monkeypatch.setattr(KeepsATable, "allowed", True)
    with closing(Pair(workspace, spec)) as pair:
        pair.run({"x": X}).assert_close()


class Frozen(OrderedDict):
    """Takes no items after it was made, as the configuration of a diffusers model."""

    def __init__(self, **items):
        super().__init__(items)
        vars(self).update(items, frozen=True)

    def __setitem__(self, name, value):
        if hasattr(self, "frozen"):
            raise TypeError("frozen")
        super().__setitem__(name, value)


def configured():
    module = nn.Sequential(nn.Linear(3, 3))
    module.config = Frozen(size=3)
    return module, {"input": X}


def test_an_export_leaves_configurations_and_hooks_of_the_model_as_they_are(tmp_path):
    module, examples = configured()
    calls = []
    handle = module.register_forward_hook(lambda *_: calls.append(1))
    config = module.config
    Workspace(Cache(tmp_path)).export(EngineSpec.of(lambda: (module, examples)))
    assert module.config is config
    assert (config.size, dict(config)) == (3, {"size": 3})
    handle.remove()
    calls.clear()
    module(X)
    assert not calls
