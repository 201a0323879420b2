"""What an engine file is made of: its configuration decides which input is what, so it is part of the cache key."""

from __future__ import annotations

import json

import pytest

from ditto_core.align.backend import FileBackend
from ditto_core.align.file import CONFIG, OnnxFile
from ditto_core.spec import EngineSpec
from tests.engines.onnx_files import two_layers


@pytest.fixture
def path(tmp_path):
    return two_layers(tmp_path / "model.onnx")


def configure(path, **decoder):
    path.with_name(CONFIG).write_text(json.dumps({"model": {"decoder": decoder}}))


def content(path):
    return FileBackend().content(EngineSpec.of("model", engine=path))


def test_another_configuration_is_another_engine(path):
    alone = content(path)
    configure(path, filename="model.onnx", inputs={"input_ids": "x"})
    one = content(path)
    configure(path, filename="model.onnx", inputs={"attention_mask": "x"})
    assert len({json.dumps(each) for each in (alone, one, content(path))}) == 3


def test_the_configuration_of_another_file_in_the_folder_is_not_this_files(path):
    alone = content(path)
    configure(path, filename="other.onnx", inputs={"input_ids": "x"})
    assert OnnxFile(path).settings == {}
    assert content(path) == alone


@pytest.mark.parametrize("filename", [{}, {"filename": "model.onnx"}, {"filename": "./model.onnx"}])
def test_a_configuration_that_names_this_file_or_none_is_this_files(path, filename):
    configure(path, **filename, inputs={"input_ids": "x"})
    assert OnnxFile(path).settings["inputs"] == {"input_ids": "x"}
