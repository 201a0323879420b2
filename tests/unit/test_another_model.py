"""An engine remembers what its model was: another one at the same place is refused, or said where a person named it."""

import re
from dataclasses import replace

import pytest

from ditto_core.backends.registry import get_backend
from ditto_core.cache import Cache
from ditto_core.cli.answers import opened
from ditto_core.cli.localize import localize_engine
from ditto_core.cli.run import check_model
from ditto_core.engines.engine import Engine
from ditto_core.engines.keys import graph_key
from ditto_core.engines.origin import another_model, content_of, refuse_another_model
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import UsageError
from ditto_core.pair.pair import Pair
from ditto_core.spec import EngineSpec, ModelSource

ORT = get_backend("onnxruntime")


def write_model(folder, weights):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return ModelSource(str(folder))


@pytest.fixture
def fresh(tmp_path):
    """Return workspaces that share a cache, as commands do."""
    return lambda: Workspace(Cache(tmp_path / "cache"))


@pytest.fixture
def engine(tmp_path, fresh):
    """Return an engine whose model was overwritten since."""
    source, directory = write_model(tmp_path / "m", b"first"), tmp_path / "engine"
    directory.mkdir()
    Engine(directory, EngineSpec.of(source), (), True, built_of=content_of(source, fresh().digest, ORT)).save_manifest()
    Pair(fresh(), Engine.load(directory).spec, engine=Engine.load(directory))
    write_model(tmp_path / "m", b"other")
    return Engine.load(directory)


@pytest.mark.parametrize(
    "use",
    [
        lambda workspace, engine: Pair(workspace, engine.spec, engine=engine),
        lambda workspace, engine: localize_engine(workspace, engine, ["text"], 1),
        lambda workspace, engine: opened(workspace, engine, {}),
        lambda workspace, engine: check_model(engine, ""),
    ],
    ids=["pair", "localize", "answers", "run"],
)
def test_an_engine_whose_model_was_overwritten_is_refused_in_one_line(use, engine, fresh):
    with pytest.raises(UsageError, match=r"was built of another model than .*/m is now: build the engine again"):
        use(fresh(), engine)


def test_a_model_that_is_named_is_said_to_be_another(engine, fresh, tmp_path, capsys):
    write_model(tmp_path / "moved", b"first")
    check_model(engine, str(tmp_path / "moved"))
    assert not capsys.readouterr().err
    check_model(engine, str(tmp_path / "m"))
    assert "was built of another model than" in capsys.readouterr().err


def test_a_tokenizer_without_weights_and_a_model_elsewhere_are_taken(engine, tmp_path):
    (tmp_path / "m" / "model.safetensors").unlink()
    check_model(engine, "")
    (tmp_path / "m").rename(tmp_path / "gone")
    check_model(engine, "")


def test_files_and_code_are_not_told_apart_by_their_digests(engine, fresh):
    assert another_model(engine, ModelSource(factory=dict), fresh().digest) == ""


@pytest.mark.parametrize("trust", [True, False])
def test_an_engine_that_is_opened_with_other_trust_says_what_to_give(trust, tmp_path, fresh):
    source = replace(write_model(tmp_path / "m", b"first"), trust_remote_code=trust)
    (tmp_path / "m" / "config.json").write_text('{"auto_map": {}}')
    engine = Engine(tmp_path, EngineSpec.of(source), (), True, built_of=content_of(source, fresh().digest, ORT))
    other = replace(source, trust_remote_code=not trust)
    option = "give --trust-remote-code, or" if trust else "leave out --trust-remote-code, or give"
    hint = f"{option} compare_engine ModelSource({source.location!r}, trust_remote_code={trust})"
    said = f"built with trust_remote_code={trust} and is opened with {not trust}: {hint}"
    with pytest.raises(UsageError, match=f"{re.escape(said)}$"):
        refuse_another_model(engine, other, fresh().digest)
    refuse_another_model(engine, source, fresh().digest)
    write_model(tmp_path / "m", b"other")
    assert "another model" in another_model(engine, other, fresh().digest)


@pytest.mark.parametrize(("name", "kept"), [("onnxruntime", True), ("torch-tp", False)])
def test_how_tokens_are_chosen_is_part_of_a_model_that_is_served_and_of_no_graph(name, kept, tmp_path, fresh):
    source = write_model(tmp_path / "m", b"first")
    spec, (before, now) = EngineSpec.of(source, backend=name), (fresh(), fresh())
    engine = Engine(tmp_path, spec, (), True, built_of=content_of(source, before.digest, get_backend(name)))
    keys = [graph_key(spec, before.digest(source, graph=True)), before.digest(source)]
    (tmp_path / "m" / "generation_config.json").write_text('{"temperature": 0.6}')
    assert (another_model(engine, source, now.digest) == "") == kept
    assert graph_key(spec, now.digest(source, graph=True)) == keys[0]
    assert now.digest(source) != keys[1]
