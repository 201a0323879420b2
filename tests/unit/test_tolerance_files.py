"""Tolerances in files: where they are looked for, what is refused, and what a suite's measurements become."""

import json

import pytest

from ditto_core.compare.tolerance_files import Measured, load_tolerance, project_tolerance, write_rules
from ditto_core.errors import UsageError


def test_a_folder_without_a_project_has_no_rules(tmp_path):
    assert project_tolerance(tmp_path).rules == ()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1", r"has no \[tolerances\] table"),
        ("tolerances = 5", "tolerances is 5, expected a table"),
        ("[tolerances", "cannot be read as TOML"),
    ],
)
def test_a_file_of_something_else_is_one_line(tmp_path, text, told):
    path = tmp_path / "t.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=told) as error:
        load_tolerance(path)
    assert str(path) in str(error.value)
    with pytest.raises(UsageError, match=r"none\.toml is missing, expected a TOML file"):
        load_tolerance(tmp_path / "none.toml")


def test_the_worst_of_several_measurements_times_the_headroom_is_the_rule(tmp_path):
    first = Measured({"model.layers.*.mlp": 1e-3, "lm_head": 2e-3}, ("a",))
    second = Measured.from_json(json.loads(json.dumps(Measured({"model.layers.*.mlp": 4e-3}, ("b", "a")).to_json())))
    path = tmp_path / "rules.toml"
    assert write_rules([first, second], path, headroom=3.0) == 2
    bounds = {rule.selector: rule.bound for rule in load_tolerance(path).rules}
    assert bounds == pytest.approx({"model.layers.*.mlp": 1.2e-2, "lm_head": 6e-3})
    assert (first | second).sources == ("a", "b")


def test_nothing_measured_writes_no_file(tmp_path):
    with pytest.raises(UsageError, match="nothing was compared"):
        write_rules([Measured({}, ())], tmp_path / "rules.toml")
    assert not (tmp_path / "rules.toml").exists()
