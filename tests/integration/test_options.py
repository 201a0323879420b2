"""Every option: its spellings, which of them wins, and what a bad value says."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_ditto.pytest_options import OPTIONS, PytestOptions

TAKEN = ("update", "prune", "prune-dry-run", "prune-shared", "introspect", "lock", "verify")
"""Options of another plugin, `pytest-ditto`: the same name twice would stop pytest from starting."""


def read(pytester: pytest.Pytester, *arguments: str) -> PytestOptions:
    """Configure pytest and return what was read."""
    return pytester.parseconfigure(*arguments).stash[OPTIONS]


@pytest.fixture(autouse=True)
def no_settings(isolated_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DITTO_CACHE_DIR")


def test_defaults(pytester):
    assert read(pytester) == PytestOptions()


def test_command_line(pytester):
    options = read(
        pytester,
        *(
            "--ditto-dump-dir=d",
            "--ditto-dump=all",
            "--ditto-cache-dir=c",
            "--ditto-artifacts-dir=a",
            "--ditto-threads=2",
        ),
        *(
            "--ditto-backend=onnxruntime",
            "--ditto-require-backends",
            "--ditto-no-observer",
            "--ditto-tolerance-factor=2.5",
        ),
    )
    root = pytester.path
    assert options == PytestOptions(root / "d", "all", root / "c", root / "a", 2, "onnxruntime", True, False, 2.5)


def test_ini_keys(pytester):
    pytester.makeini(
        """
        [pytest]
        ditto_engine_dump_dir = d
        ditto_engine_dump = all
        ditto_engine_cache_dir = c
        ditto_engine_artifacts_dir = a
        ditto_engine_threads = 2
        ditto_engine_backend = onnxruntime
        ditto_engine_require_backends = yes
        ditto_engine_observer = false
        ditto_engine_tolerance_factor = 2.5
        """
    )
    root = pytester.path
    expected = PytestOptions(root / "d", "all", root / "c", root / "a", 2, "onnxruntime", True, False, 2.5)
    assert read(pytester) == expected


@pytest.mark.parametrize("table", ["pytest", "pytest.ini_options"])
def test_values_of_toml_are_numbers_truths_and_lists(pytester, table):
    typed = table == "pytest"  # in ini_options everything is text or a list, before pytest 9 there is no other table
    numbers = ("2", "2.5", "true") if typed else ('"2"', '"2.5"', '"true"')
    pytester.makepyprojecttoml(
        f"""
        [tool.{table}]
        ditto_engine_dump_dir = ["d"]
        ditto_engine_reports = ["json:a.json", "markdown:b.md"]
        ditto_engine_threads = {numbers[0]}
        ditto_engine_tolerance_factor = {numbers[1]}
        ditto_engine_require_backends = {numbers[2]}
        """
    )
    options, root = read(pytester), pytester.path
    assert options == PytestOptions(
        dump_dir=root / "d",
        reports=(("json", root / "a.json"), ("markdown", root / "b.md")),
        threads=2,
        tolerance_factor=2.5,
        require_backends=True,
    )


def test_command_line_over_environment_over_ini(pytester, monkeypatch):
    pytester.makeini("[pytest]\nditto_engine_cache_dir = ini\nditto_engine_threads = 7\n")
    assert read(pytester).cache_dir == pytester.path / "ini"
    monkeypatch.setenv("DITTO_CACHE_DIR", "environment")
    assert read(pytester).cache_dir == pytester.path / "environment"
    assert read(pytester, "--ditto-cache-dir", "line").cache_dir == pytester.path / "line"
    assert read(pytester, "--ditto-cache-dir", "line").threads == 7


def test_relative_folders_start_where_they_are_written(pytester, monkeypatch):
    pytester.makeini("[pytest]\nditto_engine_cache_dir = c\nditto_engine_dump_dir = d\n")
    below = pytester.mkdir("below")
    monkeypatch.chdir(below)
    options = read(
        pytester, f"--rootdir={pytester.path}", "-c", str(pytester.path / "tox.ini"), "--ditto-dump-dir", "d"
    )
    assert (options.cache_dir, options.dump_dir) == (pytester.path / "c", below / "d")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--ditto-dump=al", "--ditto-dump is 'al', expected failed or all; did you mean 'all'?"),
        (
            "--ditto-threads=-1",
            "--ditto-threads is '-1', expected a whole number of torch threads, 0 to leave torch's own",
        ),
        ("--ditto-threads=two", "--ditto-threads is 'two', expected a whole number of torch threads*"),
        (
            "--ditto-backend=onnx",
            "--ditto-backend is 'onnx', expected one of *onnxruntime*; did you mean 'onnxruntime'?",
        ),
        (
            "--ditto-tolerance-factor=0",
            "--ditto-tolerance-factor is '0', expected a multiple of the noise floor above 0*",
        ),
        ("--ditto-tolerance-factor=nan", "--ditto-tolerance-factor is 'nan', expected a multiple of the noise floor*"),
        ("--ditto-tolerance-factor=x", "--ditto-tolerance-factor is 'x', expected a multiple of the noise floor*"),
        (
            "--ditto-dump-dir=file",
            "--ditto-dump-dir is 'file', expected a folder that can be written to: */file is a file",
        ),
        ("--ditto-cache-dir=file/x", "--ditto-cache-dir is 'file/x', expected a folder that*: */file is a file"),
    ],
)
def test_bad_value_is_one_line_and_exit_code_4(pytester, argument, message):
    (pytester.path / "file").touch()
    result = pytester.runpytest_inprocess(argument)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert len([line for line in result.errlines if line]) == 1
    result.stderr.fnmatch_lines([f"ERROR: {message}"])


def test_bad_value_names_where_it_stands(pytester, monkeypatch):
    pytester.makeini("[pytest]\nditto_engine_require_backends = perhaps\n")
    result = pytester.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: ini key ditto_engine_require_backends is 'perhaps', expected true or false"])
    monkeypatch.setenv("DITTO_THREADS", "many")
    result = pytester.runpytest_inprocess()
    result.stderr.fnmatch_lines(["ERROR: environment variable DITTO_THREADS is 'many', expected a whole number*"])


def test_help_has_one_group_and_no_name_that_others_took(pytester):
    result = pytester.runpytest_inprocess("--help")
    text = result.stdout.str()
    assert text.count("\nditto-engine: engines beside their reference:") == 1
    names = {word.split("=")[0] for word in text.split() if word.startswith("--ditto-")}
    assert "--ditto-dump-dir" in names
    assert not names & {f"--ditto-{name}" for name in TAKEN}


def test_unwritable_folder_is_named(pytester, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != pytester.path)
    result = pytester.runpytest_inprocess("--ditto-dump-dir=new")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: --ditto-dump-dir is 'new', expected a folder that can be written to: * let you"]
    )
