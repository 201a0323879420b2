"""Relations of models that take images and other inputs: a row alone and in its batch, the same run twice."""

import pytest
import torch
from torch import nn

from ditto_core.errors import UsageError
from ditto_core.pair.pair import Pair
from ditto_core.spec import EngineSpec
from tests.module_models import residual_net


class Mixing(nn.Module):
    """Subtracts the mean of the batch: no row is what it is alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.second(hidden - hidden.mean(0, keepdim=True))


def mixing():
    torch.manual_seed(0)
    return Mixing(), {"x": torch.randn(3, 4)}


@pytest.fixture
def relations_of(workspace):
    pairs = []

    def make(source):
        pairs.append(Pair(workspace, EngineSpec.of(source, outputs="**")))
        return pairs[-1].relations()

    yield make
    for pair in pairs:
        pair.close()


def test_rows_of_a_healthy_network_are_the_same_alone_and_runs_repeat_to_the_bit(relations_of):
    relations = relations_of(residual_net)
    rows, bits = relations.assert_hold({"image": torch.randn(3, 3, 24, 24)})
    assert (rows.name, bits.name) == ("row alone = row in batch", "same run twice = same bits")
    assert {"layer1.0.bn2", "fc"} <= {result.site for result in rows.comparison}
    assert not any(bits.bits.values())
    assert all(result.floor is not None for result in rows.comparison)
    assert len(relations.assert_hold()) == 2


def test_an_engine_that_mixes_rows_breaks_at_the_first_module_that_takes_them_mixed(relations_of):
    relations = relations_of(mixing)
    (broken,) = relations.check(None, "row_in_batch")
    assert not broken
    assert broken.first.site == "second"
    assert broken.to_json()["first"]["row"] in (0, 1, 2)
    with pytest.raises(AssertionError, match="1 of 2 relations are broken"):
        relations.assert_hold()


def test_what_cannot_be_checked_is_one_line(relations_of):
    relations = relations_of(mixing)
    with pytest.raises(UsageError, match="1 row, expected at least two"):
        relations.check({"x": torch.randn(1, 4)})
    with pytest.raises(UsageError, match="unknown relation 'rows'"):
        relations.check(None, "rows")
