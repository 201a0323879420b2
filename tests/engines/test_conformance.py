"""The built-in backends keep every promise; a backend that breaks one fails exactly at that check."""

import re
import sys
from pathlib import Path

import pytest
from broken_backends import BROKEN

from ditto_core.backends.openvino import OpenVinoBackend
from ditto_core.cache import Cache
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import UsageError
from ditto_core.testing import backend_checks, check_backend
from ditto_core.testing.suite import PROMISES

SLOW = {"other_process", "memory", "batch_sizes", "cleanup"}
"""They start a process or run many steps; of a broken backend only its own promise is checked among them."""
PAGE = Path(__file__).parents[2] / "docs/backends.md"
NAMES = [promise.__name__ for promise in PROMISES]


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_a_built_in_backend_keeps_every_promise(workspace, backend):
    pytest.importorskip(backend)
    check_backend(backend, workspace=workspace)


def test_onnxruntime_keeps_its_promises_of_outputs_and_taps_in_float16(workspace):
    chosen = {"outputs", "decoding", "padding", "every_tap", "dtypes"}
    check_backend("onnxruntime", dtype="float16", workspace=workspace, without=set(NAMES) - chosen)


def test_there_is_a_broken_backend_for_each_promise():
    assert list(BROKEN) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_backend_that_breaks_a_promise_fails_at_that_check_alone(tmp_path, workspace, name):
    if name == "own_folder":  # it writes into the export
        workspace = Workspace(Cache(tmp_path))
    with pytest.raises(AssertionError) as caught:
        check_backend(BROKEN[name](), workspace=workspace, without=SLOW - {name})
    headline, *lines = str(caught.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines] == [name]
    assert headline.startswith(f"backend onnxruntime breaks 1 of {len(NAMES) - len(SLOW - {name})} promises")


def test_checks_are_named_and_run_one_by_one(workspace):
    checks = backend_checks("onnxruntime", workspace=workspace)
    assert [str(check) for check in checks] == NAMES
    next(check for check in checks if check.name == "unknown_option")()


def test_an_unknown_promise_is_refused_and_names_the_nearest():
    with pytest.raises(UsageError, match="'padding'") as caught:
        backend_checks("onnxruntime", without=["paddings"])
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(UsageError, match="leaves no check"):
        check_backend("onnxruntime", without=NAMES)


def test_openvino_without_its_look_at_the_inputs_is_found(workspace, monkeypatch):
    """OpenVINO itself takes an input that is missing from the step before, and one of a wrong rank as it is."""
    pytest.importorskip("openvino")
    monkeypatch.setattr("ditto_core.backends.openvino.OpenVinoSession._check", lambda self, feed: None)
    chosen = {"missing_input", "wrong_shape"}
    with pytest.raises(AssertionError) as caught:
        check_backend(OpenVinoBackend(), workspace=workspace, without=set(NAMES) - chosen)
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == sorted(chosen)


def test_the_whole_backend_of_the_documentation_keeps_every_promise(tmp_path, workspace, monkeypatch):
    pytest.importorskip("openvino")
    code = re.search(r"<!-- example: my_package.py -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    assert len(code.splitlines()) <= 60
    (tmp_path / "my_package.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_package", raising=False)
    from my_package import MyBackend

    check_backend(MyBackend(), workspace=workspace)
