"""`ditto init` writes a test that passes as it is."""

import sys
from pathlib import Path

import pytest
import yaml

from ditto_core.cli.init import command
from ditto_core.errors import UsageError
from ditto_core.model.loading import tiny_decoder
from tests.engines.test_docs import run

MODELS = """
import torch
from ditto_core.model.loading import tiny_decoder

def llama():
    return tiny_decoder("llama")

def conv():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()), {"input": torch.randn(2, 3, 8, 8)}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    Path("own_models.py").write_text(MODELS)
    yield tmp_path
    sys.modules.pop("own_models", None)


def test_the_tests_that_it_writes_pass(folder, shared_cache_dir):
    tiny_decoder("llama").save_pretrained("weights")
    command("own_models.py:llama", ci=True)
    command("own_models.py:conv", Path("test_conv.py"))
    command("weights", Path("tests/test_weights.py"))
    assert "ditto.run()" in Path("test_conv.py").read_text()
    assert 'Path(__file__).parent / "../weights"' in Path("tests/test_weights.py").read_text()
    done = run(["-m", "pytest", "-q", "-p", "no:cacheprovider"], folder, shared_cache_dir)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    (job,) = yaml.safe_load(Path(".github/workflows/ditto.yml").read_text())["jobs"].values()
    lines = [step["run"] for step in job["steps"] if "run" in step]
    assert lines[1].split()[:3] == ["pytest", "test_engine.py", "--ditto-require-backends"]
    assert "ditto-${{ runner.os }}-${{ github.sha }}" in str(job)


def test_nothing_is_overwritten(folder):
    Path("test_engine.py").write_text("mine")
    with pytest.raises(UsageError, match=r"test_engine\.py is there already"):
        command("own_models.py:llama")
    with pytest.raises(UsageError, match=r"tests/test_a\.py cannot import own_models\.py"):
        command("own_models.py:llama", Path("tests/test_a.py"))
    assert Path("test_engine.py").read_text() == "mine"
    assert not Path("tests").exists()
