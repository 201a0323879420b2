"""Folders of artifacts: one for each engine, whatever its model is called."""

from dataclasses import replace

import pytest

from ditto_core.engines.artifacts import artifacts_folder
from ditto_core.spec import EngineSpec, ModelSource

NAME = "model-onnxruntime-float32"


def model():
    """A factory of the name that the folders below have."""


@pytest.fixture
def folder_of(tmp_path):
    """Return what gives a spec's folder; ``said`` holds what was said meanwhile."""

    def find(spec, built_of=""):
        return artifacts_folder(tmp_path / "artifacts", spec, built_of, find.said.append)

    find.said = []
    return find


def at(place):
    return EngineSpec.of(ModelSource(f"/{place}/model"))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (at("a"), at("b")),
        (at("a"), replace(at("a"), options=(("quantize", "int8"),))),
        (at("a"), EngineSpec.of(ModelSource("/a/model", trust_remote_code=True))),
        (EngineSpec.of("org/model"), EngineSpec.of(ModelSource("org/model", revision="v2"))),
    ],
    ids=["place", "options", "trust", "revision"],
)
def test_engines_of_one_label_have_folders_of_their_own_and_the_second_is_said(first, second, folder_of, tmp_path):
    folders = [folder_of(first), folder_of(second)]
    assert folders[0].name == NAME and folders[1].name.startswith(f"{NAME}-")
    assert len(folder_of.said) == 1 and str(folders[1]) in folder_of.said[0]
    assert [folder_of(first), folder_of(second)] == folders == sorted((tmp_path / "artifacts").iterdir())


def test_what_a_factory_makes_is_told_by_its_content(folder_of):
    spec = EngineSpec.of(model)
    first, second = folder_of(spec, "module 1"), folder_of(spec, "module 2")
    assert first.name == NAME and second != first == folder_of(spec, "module 1")


def test_a_model_whose_files_change_keeps_its_folder(folder_of):
    assert folder_of(at("a"), "files 1") == folder_of(at("a"), "files 2")
    assert not folder_of.said


def test_a_folder_that_cannot_be_read_is_another_engines(folder_of, tmp_path):
    config = tmp_path / "artifacts" / NAME / "build_config.json"
    config.parent.mkdir(parents=True)
    config.write_text("{")
    assert folder_of(at("a")).name.startswith(f"{NAME}-")
    assert config.read_text() == "{"
