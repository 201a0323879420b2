"""A model whose export broke off is exported again as if nothing had been."""

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
