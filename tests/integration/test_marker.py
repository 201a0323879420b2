"""The marker: merged over scopes, checked against the known arguments, parametrized by lists."""

from __future__ import annotations

import pytest

from ditto_core.profile import Range
from pytest_ditto.marker import WANTED, Wanted


@pytest.fixture
def project(pytester: pytest.Pytester, isolated_environment: None) -> pytest.Pytester:
    """A project whose models cannot be made: collection names them only."""
    pytester.makepyfile(tiny="def tiny_llama(): raise AssertionError\n\ndef tiny_mlp(): raise AssertionError\n")
    pytester.syspathinsert()
    return pytester


def collected(project: pytest.Pytester, source: str, *arguments: str) -> dict[str, Wanted]:
    """Collect a file and return what each test asks for."""
    project.makepyfile("import pytest\nfrom tiny import tiny_llama, tiny_mlp\n" + source)
    items, _ = project.inline_genitems(*arguments)
    return {item.name: item.stash[WANTED] for item in items}


def test_marker_is_registered_with_its_signature(project):
    result = project.runpytest_inprocess("--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.ditto_engine(model, [*], backend='onnxruntime', dtype='float32', *"])


def test_nearest_marker_wins_for_each_argument(project):
    found = collected(
        project,
        """
pytestmark = pytest.mark.ditto_engine(model=tiny_llama, dtype="float16", attention="sdpa", threads=3)

@pytest.mark.ditto_engine(dtype="float64", profile={"batch": (1, 2, 3)})
class TestInner:
    @pytest.mark.ditto_engine(attention="eager", outputs="model.layers.*")
    def test_all(self, ditto): pass

    def test_class(self, ditto): pass

def test_module(ditto): pass
""",
    )
    everything, of_class, of_module = (found[name] for name in ("test_all", "test_class", "test_module"))
    assert (everything.spec.dtype, everything.spec.attention, everything.options.threads) == ("float64", "eager", 3)
    assert everything.spec.outputs == ("model.layers.*",)
    assert everything.spec.profile.batch == Range(1, 2, 3)
    assert (of_class.spec.dtype, of_class.spec.attention, of_class.spec.outputs) == ("float64", "sdpa", ("**",))
    assert (of_module.spec.dtype, of_module.spec.profile.batch) == ("float16", Range(1, 1, 8))


def test_an_engine_file_is_run_by_its_own_backend(project):
    found = collected(
        project,
        """
@pytest.mark.ditto_engine(model=tiny_llama, engine="exported/model.onnx", options={"level": "basic"})
def test_file(ditto): pass
""",
    )
    spec = found["test_file"].spec
    assert (spec.backend, spec.option("file"), spec.option("level")) == ("onnx-file", "exported/model.onnx", "basic")


def test_no_option_gives_an_engine_file_another_backend(project):
    found = collected(
        project,
        """
@pytest.mark.ditto_engine(model=tiny_llama, engine="exported/model.onnx")
def test_one(ditto): pass

@pytest.mark.ditto_engine(model=tiny_llama, engine="exported/model.onnx", dtype=["float32", "float16"])
def test_two(ditto): pass
""",
        "--ditto-backend=openvino",
    )
    assert [wanted.spec.backend for wanted in found.values()] == ["onnx-file"] * 3


def test_model_is_a_hub_id_a_path_or_a_callable(project):
    found = collected(
        project,
        """
@pytest.mark.ditto_engine("org/name")
def test_hub(ditto): pass

@pytest.mark.ditto_engine(tiny_mlp, dtype="fp16")
def test_callable(ditto_engine): pass
""",
    )
    assert found["test_hub"].spec.model.location == "org/name"
    assert found["test_callable"].spec.model.factory.__name__ == "tiny_mlp"
    assert found["test_callable"].spec.dtype == "float16"


def test_lists_make_one_test_each_with_readable_ids(project):
    found = collected(
        project,
        """
@pytest.mark.ditto_engine(model=tiny_llama, backend=["ort", "trt", "onnxruntime"], dtype=["fp16", "float32", "half"])
def test_x(ditto): pass
""",
    )
    assert list(found) == [
        "test_x[onnxruntime-float16]",
        "test_x[onnxruntime-float32]",
        "test_x[tensorrt-float16]",
        "test_x[tensorrt-float32]",
    ]
    assert [want.spec.label for want in found.values()] == [name[7:-1] for name in found]


def test_lists_go_with_parametrize_and_strict_mode(project):
    project.makeini("[pytest]\nstrict = true\nmarkers = none\n")
    found = collected(
        project,
        """
@pytest.mark.ditto_engine(model=tiny_llama, dtype=["float16", "float32"])
@pytest.mark.parametrize("steps", [1, 2])
def test_x(ditto, steps): pass
""",
    )
    assert sorted(found) == [
        f"test_x[{a}]" for a in sorted(f"onnxruntime-{d}-{s}" for d in ("float16", "float32") for s in (1, 2))
    ]


def test_a_single_value_does_not_parametrize(project):
    source = "@pytest.mark.ditto_engine(model=tiny_llama, dtype='float16')\ndef test_x(ditto): pass"
    assert list(collected(project, source)) == ["test_x"]


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("model=tiny_llama, backnd='x'", "has no argument 'backnd'; did you mean 'backend'? (known: model, *"),
        ("'a', 'b'", "takes one positional argument, the model, but got 2"),
        ("'a', model='b'", "got its model twice"),
        ("dtype='float16'", "names no model, expected a Hub id, a path or model=callable"),
        (
            "model=tiny_llama, dtype='float61'",
            "unknown dtype 'float61', expected one of float32, *did you mean 'float*'?",
        ),
        ("model=tiny_llama, dtype=['float32', 'int4']", "unknown dtype 'int4', expected one of *"),
        ("model=tiny_llama, dtype=[]", "has an empty list for dtype, expected at least one"),
        ("model=tiny_llama, backend='onnxruntim'", "unknown backend 'onnxruntim', *did you mean 'onnxruntime'?"),
        ("model=tiny_llama, attention='flash'", "unknown attention 'flash', expected eager or sdpa"),
        ("model=tiny_llama, profile={'lenght': (1, 2, 3)}", "unknown profile dimension 'lenght'*mean 'length'?"),
        ("model=tiny_llama, profile={'length': (5, 2, 3)}", "a shape range needs 0 <= min <= opt <= max, got 5, 2, 3"),
        ("model=tiny_llama, reference='eagre'", "unknown reference 'eagre', *did you mean 'eager'?"),
        ("model=tiny_llama, reference='eager:int3'", "unknown dtype 'int3'*"),
        ("model=tiny_llama, threads=-1", "the number of threads is -1, expected 0 (leave as it is) or more"),
        ("model=tiny_llama, tolerance='tight'", "a tolerance is a number or a table of selectors, got str"),
        ("model=tiny_llama, tolerance={'**': {'bond': 1}}", "*'**'*"),
        ("''", "the model is an empty string, expected a Hub id, a directory, *"),
    ],
)
def test_wrong_marker_ends_a_strict_run_before_any_test(project, marker, message):
    project.makepyfile(
        f"""
        import pytest
        from tiny import tiny_llama

        def test_before(): pass

        @pytest.mark.ditto_engine({marker})
        def test_x(ditto): pass
        """
    )
    result = project.runpytest_inprocess("--ditto-strict")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    errors = [line for line in result.errlines if line]
    assert len(errors) == 1
    result.stderr.fnmatch_lines([f"ERROR: test_wrong_marker*.py::test_x: *{message.replace('[', '[[]')}"])
    result.stdout.no_fnmatch_line("*passed*")


@pytest.mark.parametrize("where", [["--ditto-strict"], ["--strict"], []])
def test_a_wrong_marker_is_the_error_of_its_test_alone_unless_the_run_is_strict(project, where):
    project.makepyfile(
        """
        import pytest
        from tiny import tiny_llama

        def test_before(): pass

        @pytest.mark.ditto_engine(model=tiny_llama, dtype="float61")
        def test_wrong(ditto): pass

        @pytest.mark.ditto_engine(model=tiny_llama, dtype=["float32", "int4"])
        def test_wrong_list(ditto): pass

        @pytest.mark.ditto_engine(model=tiny_llama, dtpye="float32")
        def test_wrong_without_a_fixture(): pass

        def test_after(): pass
        """
    )
    result = project.runpytest_inprocess(*where)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    if where:
        assert len([line for line in result.errlines if line.startswith("ERROR: ")]) == 3
        result.stdout.no_fnmatch_line("*passed*")
    else:
        result.assert_outcomes(passed=2, errors=3)
        result.stdout.fnmatch_lines(
            ["____* test_wrong *____", "unknown dtype 'float61'*", "bad input in 3 tests: exit code 4"]
        )


def test_a_skipped_test_needs_no_marker_and_one_that_is_expected_to_fail_is_told_its_bad_input(project):
    project.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("case", [pytest.param(1, marks=pytest.mark.skip(reason="later"))])
        def test_skipped(ditto, case): pass

        @pytest.mark.skipif(True, reason="never")
        @pytest.mark.ditto_engine("m", dtyp="float32")
        def test_never(ditto): pass
        """
    )
    result = project.runpytest()
    result.assert_outcomes(skipped=2)
    assert result.ret == 0
    project.makepyfile(
        """
        import pytest

        @pytest.mark.xfail(strict=True)
        @pytest.mark.ditto_engine("m", dtyp="float32")
        def test_x(ditto): pass
        """
    )
    result = project.runpytest()
    assert result.ret == 4
    result.stdout.fnmatch_lines(["note: *::test_x was expected to fail, but not by bad input: *no argument 'dtyp'*"])


def test_a_list_that_makes_no_tests_is_told_where_it_would(project):
    project.makepyfile(
        """
        import pytest

        LIST = pytest.mark.ditto_engine("m", dtype=["float32", "float16"])

        @pytest.mark.parametrize("case", [pytest.param(1, marks=LIST)])
        def test_param(ditto, case): pass

        @LIST
        def test_late(request): request.getfixturevalue("ditto")
        """
    )
    result = project.runpytest()
    assert result.ret == 4
    told = "*lists several values, which makes several tests only on a test that names the fixture: give one value in *"
    result.stdout.fnmatch_lines([told, told])


def test_every_wrong_test_has_its_line(project):
    project.makepyfile(
        """
        import pytest

        @pytest.mark.ditto_engine("m", bakend=1)
        def test_one(ditto): pass

        def test_two(ditto_reference): pass
        """
    )
    result = project.runpytest_inprocess("--ditto-strict")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [
            "ERROR: *::test_one: marker ditto_engine has no argument 'bakend'; did you mean 'backend'?*",
            "ERROR: *::test_two: the test uses a ditto fixture without a marker: add @pytest.mark.ditto_engine(model)",
        ]
    )


def test_wrong_marker_of_a_deselected_test_is_no_error(project):
    project.makepyfile(
        """
        import pytest

        @pytest.mark.ditto_engine("m", bakend=1)
        def test_one(ditto): pass

        def test_two(): pass
        """
    )
    assert project.runpytest_inprocess("-k", "two").ret == pytest.ExitCode.OK


def test_tolerances_of_the_project_stand_behind_the_markers(project):
    project.makepyprojecttoml('[tool.ditto_core.tolerances]\nfactor = 6\n"model.*" = 0.5\n')
    found = collected(
        project,
        """
@pytest.mark.ditto_engine(model=tiny_llama, tolerance={"model.norm": 0.25})
def test_x(ditto): pass
""",
    )
    tolerance = found["test_x"].options.tolerance
    assert tolerance.factor == 6
    assert [(rule.selector, rule.bound) for rule in tolerance.rules] == [("model.*", 0.5), ("model.norm", 0.25)]


def test_a_marker_that_pytest_put_on_the_model_is_refused(project):
    project.makepyfile("""
import pytest

def shrunk(layers=2): return object()

@pytest.mark.ditto_engine(shrunk)
def test_gone(ditto): assert False

def test_other(): pass
""")
    result = project.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    line = "marker ditto_engine is on 'shrunk', *@pytest.mark.ditto_engine(model=shrunk)"
    result.stdout.fnmatch_lines([f"*{line}"])


def test_a_class_may_have_one_marker_that_is_no_list(project):
    project.makepyfile("""
import pytest
from tiny import tiny_llama

class TestOne:
    pytestmark = pytest.mark.ditto_engine(model=tiny_llama)
    def test_marked(self, request): assert request.node.get_closest_marker("ditto_engine")
""")
    project.runpytest_inprocess().assert_outcomes(passed=1)


def test_a_marker_without_a_fixture_is_noted(project):
    project.makepyfile("""
import pytest
from tiny import tiny_llama

pytestmark = pytest.mark.ditto_engine(model=tiny_llama)

@pytest.mark.ditto_engine(dtype="float16")
def test_forgot(): pass

def test_other(): pass
""")
    result = project.runpytest_inprocess()
    result.assert_outcomes(passed=2)
    notes = [line for line in result.outlines if line.startswith("note: ")]
    name = "test_a_marker_without_a_fixture_is_noted.py::test_forgot"
    assert notes == [f"note: {name} has the marker ditto_engine but uses no ditto fixture: no engine ran"]
