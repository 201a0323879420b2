"""A text that names a reference or a backend is that one, whatever lies in the working directory; ``./`` is a path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ditto_core.backends.registry import backend_names
from ditto_core.engines.engine import MANIFEST_FILE
from ditto_core.errors import UsageError
from ditto_core.pair.comparing import _backend, _built
from ditto_core.pair.reference import check_reference, named_backend, recorded_at
from ditto_core.spec import EngineSpec

NAMES = ("eager", "eager:float32", "weights", "onnxruntime", "ort", *backend_names())


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Work where each name is a folder, too, that is an engine."""
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / MANIFEST_FILE).write_text(json.dumps({}))


@pytest.mark.parametrize("name", NAMES)
def test_a_known_name_is_no_dump_unless_it_is_written_as_a_path(name):
    assert recorded_at(name) is None
    assert recorded_at(f"./{name}") == recorded_at(Path(name)) == Path(name)
    with pytest.raises(UsageError, match="is no path of a dump"):
        check_reference(name if name != "weights" else "eager", name_map={"a": "b"})
    check_reference(f"./{name}", name_map={"a": "b"})


def test_a_backends_name_as_the_reference_is_that_backend():
    spec = EngineSpec.of("model")
    assert named_backend(spec, "ort:float16") == EngineSpec.of("model", dtype="float16")
    assert named_backend(spec, "./onnxruntime") is None


def test_a_backends_name_as_the_engine_is_that_backend():
    assert _built("ort") is None
    assert _backend("ort") == {"backend": "onnxruntime"}
    assert _backend("./onnxruntime") == {"engine": "./onnxruntime"}
    assert _backend(Path("onnxruntime")) == {"engine": "onnxruntime"}
