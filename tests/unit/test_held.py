"""Inputs whose numbers the model's code reads are held at the example's while it is exported."""

import pytest
import torch
from torch import nn

from ditto_core.errors import UsageError
from ditto_core.model.export import export
from ditto_core.model.exported import Export
from ditto_core.model.held import Holding, inputs_read
from ditto_core.model.loading import load_model
from ditto_core.profile import ShapeProfile
from ditto_core.spec import EngineSpec, ModelSource
from tests.module_models import complains


class Tiles(nn.Module):
    """Normalizes each row of tiles whose heights and widths are given, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, patches: torch.Tensor, grid: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        hidden = self.fc(patches)
        rows = [width for height, width in grid.tolist() for _ in range(height)]
        return torch.cat([row.softmax(0) for row in torch.split(hidden, rows)]) * count


def tiles():
    torch.manual_seed(0)
    return Tiles(), {
        "patches": torch.randn(10, 4),
        "grid": torch.tensor([[2, 3], [1, 4]]),
        "count": torch.tensor([1, 2, 3, 4]),
    }


def test_an_input_is_held_whose_numbers_are_read_and_others_are_not(tmp_path, capfd):
    done = export(load_model(ModelSource.of(tiles)), tmp_path)
    assert done.held == {"grid": [[2, 3], [1, 4]]}
    assert Export.load(tmp_path).held == done.held
    assert capfd.readouterr().err == ""
    done.check({"grid": torch.tensor([[2, 3], [1, 4]]), "count": torch.tensor([5, 6, 7, 8])})
    with pytest.raises(UsageError, match=r"'grid' is held at \[\[2, 3\], \[1, 4\]\]"):
        done.check({"grid": torch.tensor([[1, 3], [1, 7]])})


class Marked(Tiles):
    """Writes into a tensor that it made of numbers, where the patches say so, and into a part of it."""

    def forward(self, patches: torch.Tensor, grid: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        order = torch.arange(len(patches))
        order[2:].mul_((patches[2:, 0] > 0).long())
        return super().forward(patches, grid, count) + order.float()[:, None]


def test_what_is_written_into_a_held_tensor_is_not_lost():
    from ditto_core.model.program import trace_program

    model = load_model(ModelSource.of(lambda: (Marked(), tiles()[1])))
    program = trace_program(model, (), ShapeProfile()).exported.module()
    given = {**model.examples, "patches": -model.examples["patches"]}
    (found,) = program(*given.values())
    torch.testing.assert_close(found, model.module(**given))


def test_a_program_holds_them_too(tmp_path):
    from ditto_core.model.program import trace_program

    model = load_model(ModelSource.of(tiles))
    program = trace_program(model, (), ShapeProfile())
    (found,) = program.exported.module()(*model.examples.values())
    torch.testing.assert_close(found, model.module(**model.examples))


def test_reading_follows_what_is_computed_from_integer_inputs_alone():
    x, n, m = torch.ones(2), torch.tensor([3]), torch.tensor([4])
    assert set(inputs_read(lambda given: (given["n"] * 2).tolist(), {"x": x, "n": n, "m": m})) == {"n"}
    assert set(inputs_read(lambda given: int(given["n"] + given["m"]), {"x": x, "n": n, "m": m})) == {"n", "m"}
    assert not inputs_read(lambda given: (given["x"] * given["n"]).tolist(), {"x": x, "n": n})
    assert not inputs_read(lambda given: given["n"].tolist(), {"n": n}, but=("n",))


def test_what_is_held_stays_a_number_though_the_rest_is_fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    n = torch.tensor([3, 4])
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        x = fake.from_tensor(torch.ones(7, 2))
        with Holding({"n": n}):
            parts = torch.split(x, (n * 1).tolist())
            places = torch.arange(2)[n > 3].tolist()
    assert [tuple(part.shape) for part in parts] == [(3, 2), (4, 2)]
    assert places == [1]


def test_a_number_that_is_of_no_input_is_still_refused(tmp_path, capfd):
    from ditto_core.errors import BuildError

    with pytest.raises(BuildError, match="data-dependent"):
        export(load_model(ModelSource.of(complains)), tmp_path)
    assert capfd.readouterr().err == ""


def test_a_dimension_of_a_held_input_is_not_dynamic(tmp_path):
    assert export(load_model(ModelSource.of(tiles)), tmp_path).shapes["grid"] == (2, 2)
    assert EngineSpec.of(tiles).dynamic == ()
