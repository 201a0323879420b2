"""The examples of the README and of docs/quickstart.md run as a reader would run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
TABLES = re.compile(r"tolerance=(\{.*?\n\})", re.DOTALL)


def python_blocks(document):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)


def run(arguments, folder, cache):
    env = {**os.environ, "DITTO_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


def test_the_first_test_of_the_quickstart_passes(tmp_path, shared_cache_dir):
    test, _ = python_blocks("docs/quickstart.md")
    (tmp_path / "test_engine.py").write_text(test)
    done = run(["-m", "pytest", "-q", "test_engine.py"], tmp_path, shared_cache_dir)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_the_script_of_the_quickstart_runs(tmp_path, shared_cache_dir):
    _, script = python_blocks("docs/quickstart.md")
    (tmp_path / "script.py").write_text(script)
    done = run(["script.py"], tmp_path, shared_cache_dir)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True ")


def test_the_rules_of_the_tolerance_page_are_accepted():
    from ditto_core.compare.tolerance import Tolerance
    from ditto_core.system.files import parse_toml

    text = (ROOT / "docs/tolerances.md").read_text()
    first, second = (eval(table, {"torch": torch, "edit_distance": print}) for table in TABLES.findall(text))
    assert len(Tolerance.of(first).rules) == 7
    assert Tolerance.of(first).finite
    assert [rule.requested for rule in Tolerance.of(second).rules] == [
        "moved",
        "max_abs of torch.nn.modules.activation:Softmax",
        "",
        "builtins:print",
    ]
    (table,) = re.findall(r"^```toml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(Tolerance.of(parse_toml(table)["tool"]["ditto_core"]["tolerances"]).rules) == 1


def test_every_page_that_the_readme_links_to_is_there():
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
