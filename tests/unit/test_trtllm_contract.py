"""Every call that the adapter makes binds to the recorded signature of every version in which it is made."""

import ast
import inspect
import json
from pathlib import Path

import pytest

from ditto_core.backends.trtllm import calls
from ditto_core.backends.trtllm.calls import ATTRIBUTES, CALLS, Call
from ditto_core.errors import RunError

DATA = json.loads((Path(__file__).parents[1] / "data" / "trtllm_signatures.json").read_text())
ADAPTER = Path(calls.__file__).parent
KINDS = {kind.name: kind for kind in type(inspect.Parameter("x", inspect.Parameter.KEYWORD_ONLY).kind)}
PAIRS = [(version, call) for version in DATA for call in CALLS if call.applies(version)]


def signature(entry):
    """A field of a dataclass or of a pydantic model is a keyword with a default or without."""
    kinds = {name: KINDS["KEYWORD_ONLY" if kind == "FIELD" else kind] for name, kind, _ in entry["parameters"]}
    empty = inspect.Parameter.empty
    found = [inspect.Parameter(n, kinds[n], default=empty if d is None else d) for n, _, d in entry["parameters"]]
    return inspect.Signature(sorted(found, key=lambda p: p.kind))


def recorded(version, name):
    if name not in DATA[version]:
        pytest.fail(f"the facts of {version} have no {name}, which the adapter calls")
    return DATA[version][name]


def named(entry):
    return {name for name, kind, _ in entry["parameters"] or () if not kind.startswith("VAR_")}


@pytest.mark.parametrize(
    ("version", "call"), PAIRS, ids=[f"{v}-{c.name.removeprefix('tensorrt_llm.')}" for v, c in PAIRS]
)
def test_call_binds_to_the_recorded_signature(version, call):
    entry = recorded(version, call.name)
    keywords = {name: object() for name in call.keywords if calls.within(call.keywords[name], version)}
    fields = set().union(*(named(recorded(version, name)) for name in call.fields))
    if entry["parameters"] is not None:
        signature(entry).bind(*(object() for _ in call.positional), **keywords)
        fields |= named(entry)
    elif not call.fields:
        assert not keywords, f"{call.name} is recorded by name alone: its keywords cannot be checked"
    unknown = set(keywords) - fields
    assert not unknown, f"{call.name} of {version} takes {sorted(unknown)} only through **kwargs, if at all"


@pytest.mark.parametrize("version", DATA)
@pytest.mark.parametrize(("name", "since"), ATTRIBUTES.items())
def test_what_is_read_is_recorded_from_its_first_version_on(version, name, since):
    known = name in DATA[version]
    assert known == (calls.release(version) >= calls.release(since))


def test_seven_versions_are_recorded():
    assert list(DATA) == ["0.12.0", "0.13.0", "0.14.0", "0.15.0", "0.16.0", "0.17.0.dev2024121700", "1.3.0rc3"]


def test_a_wrong_keyword_would_be_noticed():
    wrong = Call("tensorrt_llm.builder.BuildConfig", {"max_length": "0.12.0"})
    with pytest.raises(TypeError, match="max_length"):
        signature(DATA["0.16.0"][wrong.name]).bind(max_length=1)
    with pytest.raises(RunError, match=r"BuildConfig is called with 'max_seq', which its entry .* does not declare"):
        calls.BUILD_CONFIG(max_seq=1)


def test_version_bounds_choose_the_keywords_of_a_version():
    limits = {"max_tokens": 4, "max_new_tokens": 4}
    assert calls.REQUEST.available("0.12.0", **limits) == {"max_new_tokens": 4}
    assert calls.REQUEST.available("0.13.0", **limits) == {"max_tokens": 4}
    assert calls.BUILD_CONFIG.available("0.17.0.dev2024121700", use_fused_mlp=False) == {"use_fused_mlp": False}
    assert calls.BUILD_CONFIG.available("1.3.0rc3", use_fused_mlp=False) == {}


def imports(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize(
    "file", [*sorted(ADAPTER.glob("*.py")), ADAPTER.parents[1] / "trtllm_build.py"], ids=lambda p: p.name
)
def test_the_adapter_reaches_tensorrt_llm_through_the_table_alone(file):
    assert not [name for name in imports(file) if name.split(".")[0] in ("tensorrt_llm", "tensorrt")]
    assert file.name == "calls.py" or "import_module" not in file.read_text()


def test_every_entry_of_the_table_is_used():
    source = "\n".join(p.read_text() for p in [*ADAPTER.glob("*.py"), ADAPTER.parents[1] / "trtllm_build.py"])
    names = [name for name, value in vars(calls).items() if isinstance(value, Call)]
    assert len(names) == len(CALLS)
    assert not [name for name in names if f"calls.{name}" not in source]
