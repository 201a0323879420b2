"""A pipe in the place of a file is refused: reading it would never end."""

from __future__ import annotations

import os

import pytest

from ditto_core.cache import Cache
from ditto_core.cli.run import tensors_of
from ditto_core.compare.tolerance_files import load_tolerance
from ditto_core.dumps import open_dump
from ditto_core.dumps.namemap import NameMap
from ditto_core.errors import DittoError
from ditto_core.graphs.graph import Graph
from ditto_core.model.loading import load_model
from ditto_core.spec import ModelSource
from ditto_core.stepping.floor import read_floor
from tests.unit import test_deep_json


def loaded(path):
    dump = open_dump(path)
    return [dump.load(0, name) for name in dump.names(0)]


READERS = {
    **test_deep_json.READERS,
    "model.onnx": Graph.read,
    "tolerances.toml": load_tolerance,
    "names.toml": NameMap.load,
    "step0.safetensors": lambda path: loaded(path.parent),
    "step0.pt": lambda path: loaded(path.parent),
    "step0.npz": lambda path: loaded(path.parent),
    "inputs.safetensors": tensors_of,
    "config.json": lambda path: load_model(ModelSource(str(path.parent))),
    "weights.gguf": lambda path: load_model(ModelSource(str(path))),
}
"""What opens a file that a user names, by the name of the file."""


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_in_the_place_of_a_file_is_one_line(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises((DittoError, OSError)) as raised:
        READERS[name](tmp_path / name)
    assert "\n" not in str(raised.value)


def test_a_pipe_in_the_cache_is_damage(tmp_path):
    cache = Cache(tmp_path / "cache")
    made = cache.get_or_build("engine", "key", lambda folder: (folder / "file").write_text("x"), describe={})
    manifest = next(path for path in made.iterdir() if path.name != "file")
    manifest.unlink()
    os.mkfifo(manifest)
    assert cache.get_or_build("engine", "key", lambda folder: (folder / "file").write_text("y"), describe={}) == made
    assert (made / "file").read_text() == "y"

    said = []
    os.mkfifo(tmp_path / "floor.json")
    assert read_floor(tmp_path / "floor.json", said.append) is None
    assert "damaged" in said[0]
