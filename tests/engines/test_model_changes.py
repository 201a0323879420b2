"""What is tested is the model that is there now: within a session, and where a digest cannot see what changed."""

import json
import os
from functools import partial

import pytest
import torch
from torch import nn

from ditto_core.cache import Cache
from ditto_core.engines.workspace import Workspace
from ditto_core.model.loading import tiny_decoder
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec, ModelSource
from pytest_ditto.bench import Bench

EXAMPLES = {"x": torch.linspace(-1, 2, 24).reshape(3, 8)}
FACTOR = {"value": 1.0}
VARIABLE = "DITTO_TEST_FACTOR"


class Same(nn.Module):
    """Returns its input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(8))

    def forward(self, x):
        return self.linear(x)


class Scaled(Same):
    """Multiplies by a number that is a global of the module's."""

    def forward(self, x):
        return self.linear(x) * FACTOR["value"]


class ScaledByEnvironment(Same):
    """Multiplies by a number from where no digest looks."""

    def forward(self, x):
        return self.linear(x) * float(os.environ[VARIABLE])


def visible():
    return Scaled(), EXAMPLES


def random():
    return nn.Sequential(nn.Linear(8, 8)), {"input": EXAMPLES["x"]}


@pytest.fixture
def factor(monkeypatch):
    """Set the number in both places."""

    def change(value):
        monkeypatch.setitem(FACTOR, "value", value)
        monkeypatch.setenv(VARIABLE, str(value))

    change(1.0)
    return change


@pytest.fixture
def bench(tmp_path):
    said = []
    bench = Bench(Workspace(Cache(tmp_path), say=said.append))
    yield bench, said
    bench.close()


def output(pair):
    return pair.sessions.engine.step(EXAMPLES, lambda site, tensor: None)


def test_a_factory_whose_state_changed_is_tested_anew_in_the_same_session(factor, bench):
    bench, _ = bench
    spec, options = EngineSpec.of(visible), PairOptions(observer=False)
    first = bench.pair(spec, options)
    assert first.run()
    kept = bench.pair(spec, options)
    assert kept.sessions is first.sessions
    factor(3.0)
    other = bench.pair(spec, options)
    assert other.run()
    (value,) = output(other).values()
    torch.testing.assert_close(value, 3 * EXAMPLES["x"])


def test_a_factory_that_never_repeats_itself_is_said_and_asked_once(bench):
    bench, said = bench
    spec, options = EngineSpec.of(random), PairOptions(observer=False)
    first = bench.pair(spec, options)
    assert first.run()
    assert [bench.pair(spec, options).sessions for _ in range(2)] == [first.sessions] * 2
    assert [line for line in said if "random makes another model each time" in line] == said


@pytest.mark.parametrize("cheap", [True, False])
def test_a_large_factory_is_not_called_again_but_what_it_holds_is_looked_at(factor, tmp_path, monkeypatch, cheap):
    if not cheap:
        monkeypatch.setattr("ditto_core.engines.workspace.CHEAP", 0)
    weight = tmp_path / "weight"

    def from_file():
        module, examples = visible()
        with torch.no_grad():
            module.linear.weight.fill_(float(weight.read_text()))
        return module, examples

    weight.write_text("1")
    workspace, source = Workspace(Cache(tmp_path / "cache")), ModelSource(factory=from_file)
    first = workspace.digest(source)
    assert not workspace.renew(source)
    factor(3.0)
    assert workspace.renew(source)
    second = workspace.digest(source)
    weight.write_text("2")
    assert workspace.renew(source) == cheap
    assert (workspace.digest(source) != second) == cheap
    assert len({first, second}) == 2


def test_a_rewritten_checkpoint_is_loaded_again(tmp_path):
    def save(seed):
        tiny_decoder("llama", seed=seed, layers=1).save_pretrained(tmp_path / "model")

    save(1)
    workspace, source = Workspace(Cache(tmp_path / "cache")), ModelSource.of(str(tmp_path / "model"))
    first, model = workspace.digest(source), workspace.model(source)
    assert not workspace.renew(source)
    assert workspace.model(source) is model
    save(2)
    assert workspace.renew(source)
    assert workspace.digest(source) != first
    wanted = tiny_decoder("llama", seed=2, layers=1).state_dict()
    torch.testing.assert_close(dict(workspace.model(source).module.state_dict()), dict(wanted), rtol=0, atol=0)


def test_a_change_that_no_digest_sees_is_found_before_a_failure_is_reported(factor, tmp_path):
    def run():
        spec = EngineSpec.of(lambda: (ScaledByEnvironment(), EXAMPLES))
        pair = Pair(Workspace(Cache(tmp_path)), spec, PairOptions(localize_failed=0))
        return pair, pair.run()

    old, found = run()
    assert found
    assert not any("engine was of another model" in note for note in found.notes)
    factor(3.0)
    new, found = run()
    assert old.workspace.digest(old.spec.model) == new.workspace.digest(new.spec.model)
    assert found
    assert [note for note in found.notes if "engine was of another model" in note]
    (value,) = output(new).values()
    torch.testing.assert_close(value, 3 * EXAMPLES["x"])
    _, found = run()
    assert found
    assert not any("engine was of another model" in note for note in found.notes)


def test_a_failure_of_the_right_engine_stays_one(factor, tmp_path):
    def run():
        options = PairOptions(tolerance=1e-30, observer=False, localize_failed=0)
        with_rounding = EngineSpec.of(visible, dtype="float16")
        return Pair(Workspace(Cache(tmp_path)), with_rounding, options).run()

    factor(0.1)
    first, second = run(), run()
    assert not first
    assert not second
    assert second.notes == first.notes


def test_engines_of_equal_exports_are_one(factor, tmp_path):
    """A digest may differ where the graph does not: the engine is built once."""

    def build(name):
        source, workspace = ModelSource(factory=visible), Workspace(Cache(tmp_path))
        workspace.model(source).module.name = name
        return workspace.digest(source), workspace.build(EngineSpec.of(source))

    (one, first), (two, second) = build("a"), build("b")
    assert one != two
    assert first.directory == second.directory


@pytest.mark.parametrize("damage", ["a number", "truncated", "not ours", "deep"])
def test_a_damaged_noise_floor_is_said_and_measured_again(factor, tmp_path, damage):
    said = []

    def run():
        pair = Pair(Workspace(Cache(tmp_path), say=said.append), EngineSpec.of(visible), PairOptions(observer=False))
        return pair.run()

    def bounds(found):
        return [(r.site, r.verdict.bound) for r in found.results]

    factor(0.1)
    first = run()
    (path,) = (tmp_path / "state" / "floors").iterdir()
    sound = path.read_text()
    stored = json.loads(sound)
    site = next(iter(stored["floor"]))
    stored["floor"][site]["0"] = 1e9
    path.write_text(
        {"a number": json.dumps(stored), "truncated": sound[:-9], "not ours": "[1]", "deep": "[" * 9**5}[damage]
    )
    assert bounds(run()) == bounds(first)
    assert path.read_text() == sound
    assert [line for line in said if path.stem[:12] in line and "damaged" in line] == said


def test_a_noise_floor_of_another_number_of_threads_is_not_used(factor, tmp_path):
    for threads in (1, 2, torch.get_num_threads() + 2, 0):
        options = PairOptions(observer=False, threads=threads)
        assert Pair(Workspace(Cache(tmp_path)), EngineSpec.of(visible), options).run()
    known = {1, 2, torch.get_num_threads(), torch.get_num_threads() + 2}  # 0 is torch's own
    assert len([*(tmp_path / "state" / "floors").iterdir()]) == len(known)


@pytest.mark.parametrize(
    ("of", "change"),
    [
        *(("packages", partial(dict, {name: "0"})) for name in ("torch", "transformers", "pytest-ditto-engine")),
        ("machine", partial(dict, cpu="another")),
        ("arithmetic", partial(dict, tf32_matmul="true")),
        ("MAKING", 1),
    ],
)
def test_a_noise_floor_of_other_versions_or_of_another_machine_is_not_used(factor, tmp_path, monkeypatch, of, change):
    def run():
        assert Pair(Workspace(Cache(tmp_path)), EngineSpec.of(visible), PairOptions(observer=False)).run()

    run()
    monkeypatch.setattr(f"ditto_core.pair.runner.{of}", change)
    run()
    assert len([*(tmp_path / "state" / "floors").iterdir()]) == 2


def test_two_models_of_one_name_leave_artifacts_of_both(tmp_path):
    def named(part):
        def model():
            return nn.Sequential(part), {"input": EXAMPLES["x"]}

        return model

    said = []
    workspace = Workspace(Cache(tmp_path / "cache"), said.append, artifacts=tmp_path / "artifacts")
    for part in (nn.ReLU(), nn.Tanh()):
        workspace.build(EngineSpec.of(named(part)))
    first, second = sorted((tmp_path / "artifacts").iterdir())
    assert (first.name, [str(second) in line for line in said]) == ("model-onnxruntime-float32", [True])
    for folder, operator in ((first, "relu"), (second, "tanh")):
        assert operator in (folder / "graph.txt").read_text()
