"""The search for a diverging prompt, on real engines."""

import json
import re
import shlex
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from ditto_core.errors import UsageError
from ditto_core.fuzz import Corpus, Fuzzer, Limits, compare
from ditto_core.model.loading import tiny_decoder
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec

LIMITS = Limits(rows=2, length=12, steps=1)


def windowed():
    return tiny_decoder("mistral", sliding_window=5)


def whole():
    return tiny_decoder("mistral", sliding_window=200)


@pytest.fixture(scope="module")
def diverging(workspace):
    """An engine with a window of 5 keys beside one without: they part from the sixth token on."""
    reference = EngineSpec.of(whole, outputs="model.layers.*")
    options = PairOptions(reference=reference, observer=False)
    pair = Pair(workspace, EngineSpec.of(windowed, outputs="model.layers.*"), options)
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def healthy(workspace):
    pair = Pair(workspace, EngineSpec.of(windowed, outputs="model.layers.*"), PairOptions(observer=False))
    yield pair
    pair.close()


def test_a_divergence_is_shrunk_to_the_shortest_prompt(diverging, tmp_path):
    outcome = Fuzzer(diverging, Corpus(tmp_path, 0, "toy"), LIMITS).search(600)
    assert outcome.failure.shrunk
    assert [len(row) for row in outcome.failure.rows] == [6]
    assert outcome.failure.message.startswith("engine diverges at model.layers.0, step 0: rel_l2 ")
    assert not compare(diverging, outcome.failure.rows, 1)
    assert compare(diverging, [outcome.failure.rows[0][:5]], 1)


def test_the_next_run_begins_with_the_failure_and_forgets_it_once_it_is_repaired(diverging, healthy, tmp_path):
    first = Fuzzer(diverging, Corpus(tmp_path, 0, "toy"), LIMITS).search(600)
    again = Fuzzer(diverging, Corpus(tmp_path, 0, "toy"), LIMITS).search(600)
    assert again.failure == first.failure
    assert again.tried == 1
    repaired = Corpus(tmp_path, 0, "toy")
    assert Fuzzer(healthy, repaired, LIMITS).search(1).failure is None
    assert repaired.failure is None


def test_a_shrunk_failure_that_fails_otherwise_now_is_told_as_it_is_and_shrunk_again(diverging, tmp_path):
    first = Fuzzer(diverging, Corpus(tmp_path, 0, "toy"), LIMITS).search(600).failure
    corpus = Corpus(tmp_path, 0, "toy")
    corpus.failure = replace(first, rows=((*first.rows[0], 1, 2),), message="engine diverges elsewhere")
    found = Fuzzer(diverging, corpus, LIMITS).search(600).failure
    assert found.shrunk
    assert found == corpus.failure
    assert found.message.startswith("engine diverges at model.layers.0, step 0: rel_l2 ")
    assert [len(row) for row in found.rows] == [6]


def test_an_interrupted_search_keeps_the_smallest_failure_so_far_and_goes_on(diverging, tmp_path):
    class Interrupt(Exception):
        """Ctrl-C at an unlucky moment."""

    corpus = Corpus(tmp_path, 0, "toy")

    def stop(tried, margin):
        if corpus.failure is not None:
            raise Interrupt

    with pytest.raises(Interrupt):
        Fuzzer(diverging, corpus, LIMITS, stop).search(600)
    left = Corpus(tmp_path, 0, "toy").failure
    assert not left.shrunk
    outcome = Fuzzer(diverging, Corpus(tmp_path, 0, "toy"), LIMITS).search(600)
    assert outcome.failure.shrunk
    assert [len(row) for row in outcome.failure.rows] == [6]


def test_a_healthy_engine_is_searched_until_the_deadline_and_rounds_go_on_with_the_same_seed(
    healthy, tmp_path, monkeypatch
):
    first = Corpus(tmp_path, 3, "toy")
    monkeypatch.setattr("ditto_core.fuzz.time", SimpleNamespace(monotonic=count(1.0).__next__))  # a second a look
    outcome = Fuzzer(healthy, first, LIMITS).search(60)
    assert outcome.failure is None
    assert 0 < outcome.margin < 1
    assert outcome.tried == first.state.tried > 0
    second = Corpus(tmp_path, 3, "toy")
    assert (second.state.rounds, second.state.tried) == (first.state.rounds, first.state.tried)
    assert second.state.hardest[0][0] == pytest.approx(outcome.margin)
    assert Corpus(tmp_path, 4, "toy").state.rounds == 0
    with pytest.raises(UsageError, match=r"corpus.* toy.* other.* --corpus"):
        Corpus(tmp_path, 3, "other")


def test_the_time_begins_when_the_engine_is_built(workspace, tmp_path, monkeypatch):
    seconds = [0.0]

    def slow():
        seconds[0] += 600
        return tiny_decoder("mistral", sliding_window=6)

    monkeypatch.setattr("ditto_core.fuzz.time", SimpleNamespace(monotonic=lambda: seconds[0]))
    pair = Pair(workspace, EngineSpec.of(slow, outputs="model.layers.0"), PairOptions(observer=False))

    def tick(tried, margin):
        seconds[0] += 20

    outcome = Fuzzer(pair, Corpus(tmp_path, 0, "slow"), LIMITS, tick).search(60)
    pair.close()
    assert outcome.tried == 3


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    whole().save_pretrained(directory)
    return str(directory)


def test_the_command_exits_with_0_1_or_2(model_directory, shared_cache_dir, tmp_path):
    from ditto_core.cli import application

    common = ["fuzz", model_directory, "--cache-dir", str(shared_cache_dir), "--corpus", str(tmp_path)]
    common += ["--add-output", "model.layers.*", "--max-output-len", "1", "--max-input-len", "8"]
    fine = CliRunner().invoke(application(), [*common, "--deadline", "1s"])
    assert fine.exit_code == 0, fine.output
    assert "no divergence in " in fine.output
    strict = [*common, "--tolerance-factor", "1e-6"]
    found = CliRunner().invoke(application(), [*strict, "--deadline", "60s"])
    assert found.exit_code == 1, found.output
    again = next(line for line in found.output.splitlines() if line.startswith("again: "))
    assert "--tolerance-factor 1e-06" in again
    assert again.split("--input-ids ")[1].isdecimal()  # a single token
    assert json.loads((tmp_path / "failure.json").read_text())["shrunk"]
    arguments = shlex.split(again.removeprefix("again: ditto "))
    replayed = CliRunner().invoke(application(), arguments)
    assert replayed.exit_code == 1, replayed.output
    assert "engine diverges at model.layers.0, step 0: " in replayed.output
    other = tmp_path / "other" / Path(model_directory).name
    windowed().save_pretrained(other)
    stranger = CliRunner().invoke(application(), ["fuzz", str(other), *common[2:], "--deadline", "1s"])
    assert isinstance(stranger.exception, UsageError)
    assert re.search(r"belongs to (\S+) \(\w{12}\) .*, not to \1 \(\w{12}\) ", str(stranger.exception))
    wrong = CliRunner().invoke(application(), [*common, "--deadline", "soon"])
    assert isinstance(wrong.exception, UsageError)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("fuzz.json", "{", ".*JSON"),
        ("fuzz.json", '{"identity": "toy"}', ".*corpus"),
        ("failure.json", '{"rows": 5}', ".*corpus"),
        ("failure.json", "[]", ".*corpus"),
    ],
)
def test_a_damaged_corpus_is_an_error_that_names_the_file(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=f"{name} {message}"):
        Corpus(tmp_path, 0, "toy").failure  # noqa: B018
