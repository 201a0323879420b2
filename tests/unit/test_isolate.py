import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ditto_core.errors import BackendError, BuildError, RunError, UsageError
from ditto_core.system.isolate import error_of, run_isolated

HERE = "test_isolate"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


# what the children do


def echo(**kwargs):
    print("working on it")
    return {"pid": os.getpid(), **kwargs}


def segfault():
    print("about to touch address 0", flush=True)
    ctypes.string_at(0)


def abort():
    os.abort()


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def leave(code):
    os._exit(code)


def hang(file=None):
    if file:
        Path(file).write_text(str(os.getpid()))
    time.sleep(600)


def fail_with_usage():
    raise UsageError("step needs batch 9")


def fail_with_value():
    print("layer 3")
    raise ValueError("no such layer")


def not_json():
    return {1, 2}


def variable(name):
    return os.environ.get(name)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.02)


def test_the_result_comes_back_from_another_process_and_its_output_goes_to_the_log(tmp_path, capfd):
    result = run_isolated(f"{HERE}:echo", {"a": [1, 2.5, None]}, log=tmp_path / "log.txt")
    assert result["a"] == [1, 2.5, None]
    assert result["pid"] != os.getpid()
    assert (tmp_path / "log.txt").read_text() == "working on it\n"
    assert capfd.readouterr() == ("", "")


def test_a_segfault_becomes_an_error_with_the_logs_tail():
    with pytest.raises(BuildError) as caught:
        run_isolated(f"{HERE}:segfault", {})
    first, *tail = str(caught.value).splitlines()
    assert first == "segfault in a child process: killed by signal 11 (segmentation fault)"
    assert "  | about to touch address 0" in tail


@pytest.mark.parametrize(
    ("target", "kwargs", "cause"),
    [
        ("abort", {}, r"killed by signal 6 \(abort\)"),
        ("be_killed", {}, r"killed by signal 9 \(out of memory\?\)"),
        ("leave", {"code": 3}, "exited with code 3"),
        ("leave", {"code": 0}, "ended without a result"),
        ("not_json", {}, "raised TypeError: Object of type set is not JSON serializable"),
        ("missing", {}, "raised AttributeError"),
    ],
)
def test_every_other_end_names_its_cause(target, kwargs, cause):
    with pytest.raises(RunError, match=cause):
        run_isolated(f"{HERE}:{target}", kwargs, failure=RunError)


def test_a_hang_ends_at_the_timeout_and_the_child_is_gone(tmp_path):
    with pytest.raises(BuildError, match=r"still running after 5 s \(hang\?\), killed"):
        run_isolated(f"{HERE}:hang", {"file": str(tmp_path / "pid")}, timeout=5)
    assert not alive(int((tmp_path / "pid").read_text()))


def test_our_own_errors_come_back_as_the_same_class_and_message():
    with pytest.raises(UsageError) as caught:
        run_isolated(f"{HERE}:fail_with_usage", {})
    assert str(caught.value) == "step needs batch 9"
    assert not isinstance(caught.value, BackendError)


def test_a_foreign_exception_becomes_a_build_error_with_the_traceback():
    with pytest.raises(BuildError) as caught:
        run_isolated(f"{HERE}:fail_with_value", {})
    text = str(caught.value)
    assert text.splitlines()[0] == "fail_with_value in a child process: raised ValueError: no such layer"
    assert "  | layer 3" in text
    assert "in fail_with_value" in text


def test_the_environment_is_added_to(monkeypatch):
    monkeypatch.setenv("DITTO_TEST_OUTER", "outer")
    assert run_isolated(f"{HERE}:variable", {"name": "DITTO_TEST_OUTER"}, env={"X": "1"}) == "outer"
    assert run_isolated(f"{HERE}:variable", {"name": "DITTO_TEST_INNER"}, env={"DITTO_TEST_INNER": "in"}) == "in"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_the_child_does_not_outlive_its_parent_and_no_file_stays(tmp_path, how):
    script = f"""
        from ditto_core.system.isolate import run_isolated
        run_isolated("{HERE}:hang", {{"file": {str(tmp_path / "pid")!r}}})
    """
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    (tmp_path / "temporary").mkdir()
    environment = {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(tmp_path / "temporary")}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    parent = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    child = int((tmp_path / "pid").read_text())
    assert alive(child)
    parent.send_signal(how)
    parent.wait(timeout=30)
    wait_until(lambda: not alive(child))
    assert [*(tmp_path / "temporary").iterdir()] == []


def test_a_class_that_a_child_names_is_not_imported_from_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with (tmp_path / "log").open("a+b") as log:
        error = error_of({"class": "stranger:Odd", "message": "m"}, "module:work", log, RunError)
    assert str(error) == "work in a child process: raised Odd: m"
