"""What the options do to real runs."""

from __future__ import annotations

import json

import pytest

from tests.integration.conftest import AGREES, DIVERGES


def test_cache_dir_takes_the_engines(own_project, own_cache, monkeypatch):
    monkeypatch.delenv("DITTO_CACHE_DIR")
    own_project.makepyfile(AGREES)
    result = own_project.runpytest_inprocess(f"--ditto-cache-dir={own_cache}")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"ditto-engine: *onnxruntime *torch *; cache: {own_cache}"])
    entries = [json.loads(path.read_text()) for path in own_cache.glob("engine/*/entry.json")]
    assert sorted(len(entry["describe"]["outputs"]) for entry in entries) == [0, 1]  # without taps, and with


def test_artifacts_dir_takes_readable_by_products(project):
    project.makepyfile(AGREES)
    project.runpytest_inprocess("--ditto-artifacts-dir=artifacts").assert_outcomes(passed=1)
    folder = project.path / "artifacts" / "tiny_llama-onnxruntime-float32"
    names = {path.name for path in folder.iterdir()}
    assert names == {"graph_module.py", "graph.txt", "provenance.json", "model.onnx", "build_config.json"}
    folders = (folder, folder.with_name(f"{folder.name}-untapped"))
    assert set(folder.parent.iterdir()) == set(folders)
    assert [bool(json.loads((each / "build_config.json").read_text())["taps"]) for each in folders] == [True, False]


def test_threads_hold_while_a_run_lasts_unless_the_marker_says(project):
    project.makepyfile(
        """
        import pytest, torch
        from tiny import tiny_llama

        def threads_of(ditto):
            seen = []
            ditto.on_step = lambda step: seen.append(torch.get_num_threads())
            ditto.generate([3, 1, 4], max_new_tokens=1)
            return seen

        @pytest.mark.ditto_engine(model=tiny_llama)
        def test_option(ditto):
            before = torch.get_num_threads()
            assert threads_of(ditto) == [3]
            assert torch.get_num_threads() == before

        @pytest.mark.ditto_engine(model=tiny_llama, threads=2)
        def test_marker(ditto):
            assert threads_of(ditto) == [2]
        """
    )
    project.runpytest_inprocess("--ditto-threads=3").assert_outcomes(passed=2)


def test_no_observer_leaves_the_plain_engine_out(project):
    project.makepyfile(DIVERGES)
    with_observer = project.runpytest_inprocess()
    with_observer.stdout.fnmatch_lines(["E *observer effect: none, the engine without taps gives the same outputs"])
    without = project.runpytest_inprocess("--ditto-no-observer")
    without.stdout.fnmatch_lines(["E *observer effect: not measured"])


def test_tolerance_factor_replaces_the_markers(project):
    project.makepyfile(AGREES + DIVERGES.replace("import pytest\nfrom tiny import tiny_llama\n", ""))
    project.runpytest_inprocess("--ditto-tolerance-factor=4").assert_outcomes(passed=2)
    project.runpytest_inprocess("--ditto-tolerance-factor=1e-4").assert_outcomes(failed=2)


def test_backend_option_filters_lists_and_replaces_single_ones(project):
    project.makepyfile(
        """
        import pytest
        from tiny import tiny_llama

        @pytest.mark.ditto_engine(model=tiny_llama, backend=["tensorrt", "onnxruntime"])
        def test_list(ditto): pass

        @pytest.mark.ditto_engine(model=tiny_llama, backend="tensorrt")
        def test_single(ditto):
            assert ditto.spec.backend == "onnxruntime"

        @pytest.mark.ditto_engine(model=tiny_llama, backend=["tensorrt"])
        def test_other(ditto): pass
        """
    )
    result = project.runpytest_inprocess("-v", "-rs", "--ditto-backend=onnxruntime")
    result.assert_outcomes(passed=2, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "*::test_list[[]onnxruntime-float32] PASSED*",
            "*::test_single PASSED*",
            "*::test_other[[]no-backend] SKIPPED*",
            "SKIPPED * the marker lists tensorrt, and --ditto-backend keeps onnxruntime only",
        ]
    )


ABSENT_BACKEND = '''
from ditto_core.errors import BackendError

class AbsentBackendStandIn:
    """Stands in for a backend whose library is not installed."""

    name = "absent"
    dtypes = ("float32",)

    def check(self, spec):
        raise BackendError("absent is not installed: pip install absent")
'''

NEEDS_ABSENT = """
import pytest
from tiny import tiny_llama

@pytest.mark.ditto_engine(model=tiny_llama, backend="absent")
def test_engine(ditto): pass

@pytest.mark.ditto_engine(model=tiny_llama, reference="absent")
def test_reference(ditto): pass
"""


@pytest.fixture
def absent(project: pytest.Pytester) -> pytest.Pytester:
    """A project where a backend is registered whose library is missing."""
    project.makepyfile(absent_backend=ABSENT_BACKEND, test_absent=NEEDS_ABSENT)
    info = project.mkdir("absent-1.dist-info")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: absent-backend\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[ditto_core.backends]\nabsent = absent_backend:AbsentBackendStandIn\n")
    return project


def test_missing_backend_is_a_counted_visible_skip(absent):
    result = absent.runpytest_inprocess("-rs")
    result.assert_outcomes(skipped=2)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        [
            "skipped 2: absent is not installed: pip install absent",
            "SKIPPED * test_absent.py:*: absent is not installed: pip install absent",
        ],
    )


def test_a_run_whose_engines_were_all_skipped_says_so_in_red(absent):
    result = absent.runpytest_inprocess("--color=yes")
    result.stdout.re_match_lines([r".*\x1b\[31m.*NOTHING WAS COMPARED, all 2 tests .*--ditto-require-backends"])
    assert result.ret == pytest.ExitCode.OK


@pytest.mark.parametrize("other", ["raise ValueError", "ditto"])
def test_one_engine_that_was_there_is_not_all_skipped(absent, other):
    """It need not compare: another one that was built, or that failed on the way, is enough."""
    absent.makepyfile(
        test_other=f"""
        import pytest
        from tiny import tiny_llama

        @pytest.fixture
        def broken(): {"raise ValueError" if "raise" in other else "return 1"}

        @pytest.mark.ditto_engine(model=tiny_llama, backend="onnxruntime")
        def test_engine(broken, ditto): pass
        """
    )
    result = absent.runpytest_inprocess()
    result.stdout.fnmatch_lines(["skipped 2: absent is not installed: pip install absent"])
    result.stdout.no_fnmatch_line("*NOTHING WAS COMPARED*")


def test_require_backends_makes_it_an_error(absent):
    result = absent.runpytest_inprocess("--ditto-require-backends")
    result.assert_outcomes(errors=2)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(["ERROR *::test_engine - absent is not installed: pip install absent"])
