"""``FILE.py:NAME`` is a callable of that file, whatever else has its name."""

from __future__ import annotations

import sys

import pytest

from ditto_core.cli.model_argument import read_model
from ditto_core.errors import ModelError


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Work in an empty folder, and forget what was imported there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"def make():\n    return {value!r}\n")
    return f"{path}:make"


def test_a_file_beside_a_package_of_its_name_is_the_file(tmp_path):
    write(tmp_path / "network" / "__init__.py", "package")
    assert read_model(write(tmp_path / "network.py", "file")).factory() == "file"


def test_a_file_in_a_folder_that_lacks_it_is_not_another_folders(tmp_path):
    write(tmp_path / "other_network.py", "working directory")
    (tmp_path / "typo").mkdir()
    with pytest.raises(ModelError, match=r"^typo/other_network\.py cannot be imported: there is no such file$"):
        read_model("typo/other_network.py:make")


def test_a_missing_file_names_the_nearest_beside_it(tmp_path):
    write(tmp_path / "network.py", "file")
    with pytest.raises(ModelError, match=r"there is no such file.*network\.py"):
        read_model("netwrok.py:make")


def test_two_files_of_one_name_are_two_models(tmp_path):
    given = [write(tmp_path / version / "network.py", version) for version in ("v1", "v2")]
    assert [read_model(text).factory() for text in given] == ["v1", "v2"]


def test_a_file_keeps_its_own_name_and_finds_its_siblings(tmp_path):
    write(tmp_path / "sub" / "sibling_of_it.py", "sibling")
    (tmp_path / "sub" / "its_network.py").write_text("from sibling_of_it import make\n\ndef mine(): return make()\n")
    source = read_model("sub/its_network.py:mine")
    assert source.factory() == "sibling"
    assert source.factory.__module__ == "its_network"
