"""Exported files that several modules of tests start from."""

import pytest

from ditto_core.spec import EngineSpec, ModelSource
from tests import models


@pytest.fixture(scope="session")
def llama_file(workspace):
    return workspace.export(EngineSpec.of(ModelSource.of(models.llama))).onnx_path


@pytest.fixture(scope="session")
def bert_file(workspace):
    return workspace.export(EngineSpec.of(ModelSource.of(models.bert))).onnx_path
