"""Outputs as trtexec prints them: C++ streams, six digits, nan and inf without quotes."""

import pytest
import torch

from ditto_core.dumps import format_of, open_dump
from ditto_core.errors import TraceError

PRINTED = """[
  { "name" : "scores"
  , "dimensions" : "1x2x3"
  , "values" : [ 0.5, -1.25e-07, 3, nan, -nan, -inf ]
  }
, { "name" : "ids"
  , "dimensions" : "2"
  , "values" : [ 7, 16777217 ]
  }
, { "name" : "nan and inf"
  , "dimensions" : ""
  , "values" : [ 1 ]
  }
]
"""


@pytest.fixture
def printed(tmp_path):
    path = tmp_path / "out.json"
    path.write_text(PRINTED)
    return path


def test_two_outputs_of_one_name_are_refused(printed):
    printed.write_text(PRINTED.replace('"ids"', '"scores"'))
    with pytest.raises(TraceError, match=r"out\.json holds two tensors that are named 'scores'"):
        open_dump(printed).names(0)


def test_exported_outputs_have_their_names_shapes_and_values(printed):
    dump = open_dump(printed)
    assert (dump.format, dump.steps, dump.names(0)) == ("trtexec", 1, ["scores", "ids", "nan and inf"])
    scores = dump.load(0, "scores")
    assert (scores.shape, scores.dtype) == ((1, 2, 3), torch.float32)
    assert scores[0, 0].tolist() == [0.5, pytest.approx(-1.25e-07), 3.0]
    assert scores[0, 1].isnan().tolist() == [True, True, False]
    assert scores[0, 1, 2] == -torch.inf
    assert dump.load(0, "nan and inf").shape == ()


def test_ids_that_float32_cannot_hold_stay_whole_numbers(printed):
    ids = open_dump(printed).load(0, "ids")
    assert (ids.dtype, ids.tolist()) == (torch.int64, [7, 16777217])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("1x2x3", "1x2x4"), "scores has 6 values, expected 1x2x4"),
        (("-1.25e-07", "-1.2.5"), "out.json cannot be read"),
        (("1x2x3", "1xtwo"), "scores cannot be read"),
    ],
)
def test_what_is_damaged_is_one_line_with_the_file(printed, change, said):
    printed.write_text(PRINTED.replace(*change))
    with pytest.raises(TraceError, match=said):
        open_dump(printed).load(0, "scores")


def test_other_json_is_not_taken_for_it(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('[{"name": "a", "values": []}]')
    assert format_of(path).name == "polygraphy"
