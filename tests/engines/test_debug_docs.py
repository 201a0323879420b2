"""Every command of docs/debugging.md runs as it stands there."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from benchmarks import debug_cases as cases
from ditto_core.cli import application
from ditto_core.spec import EngineSpec
from tests.engines.overflow import one_hot_norm

PAGE = Path(__file__).parents[2] / "docs" / "debugging.md"
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for line in block.splitlines()
    if line.startswith("ditto debug")
]


@pytest.fixture
def inside(tmp_path, monkeypatch, workspace):
    monkeypatch.chdir(tmp_path)
    case = cases.chain(8, "middle")
    onnx.save(case.bad, "bad.onnx")
    onnx.save(case.good, "good.onnx")
    np.savez("inputs.npz", **case.feed)
    np.savez("half.npz", x=one_hot_norm()[1]["x"].numpy())
    export = workspace.export(EngineSpec.of(one_hot_norm, dtype="float16")).directory
    for file in export.glob("model.onnx*"):
        shutil.copyfile(file, file.name)
    onnx.save(onnx.load("model.onnx"), "half.onnx")
    Path("check.py").write_text(
        "import onnx\nnames = [n.name for n in onnx.load('polygraphy_debug.onnx').graph.node]\n"
        "w = {t.name: t for t in onnx.load('polygraphy_debug.onnx').graph.initializer}\n"
        "g = {t.name: t for t in onnx.load('good.onnx').graph.initializer}\n"
        "raise SystemExit(any(w[n] != g[n] for n in w if n in g))\n"
    )
    Path("flaky.py").write_text("open('out.log', 'w').write('x')\n")


def test_the_commands_of_the_page_run_in_their_order(inside):
    assert len(COMMANDS) == 7
    for command in COMMANDS:
        words = [sys.executable if word == "python" else word for word in shlex.split(command)[1:]]
        done = CliRunner().invoke(application(), words)
        assert done.exit_code == 0, (command, done.output, done.exception)
    assert [n.name for n in onnx.load("reduced.onnx").graph.node] == ["mm4"]
    assert len(list(Path("ditto_debug_artifacts/good").glob("*.onnx"))) == 3
    assert Path("ditto_debug_artifacts/good/out_0001_rc0.log").exists()
