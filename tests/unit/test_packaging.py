"""What stands beside the code: the API reference, the map of the rooms, and what the wheel holds."""

import hashlib
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ditto_core.system.files import parse_toml

ROOT = Path(__file__).parents[2]
SCRIPT = "docs/make_api.py"


def make_api(folder, *, before=""):
    run = f"runpy.run_path('{SCRIPT}', run_name='__main__')"
    code = f"import sys, runpy\n{before}\nsys.argv = ['make_api', {str(folder)!r}]\n{run}"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    pytest.importorskip("pdoc", reason="the API reference is built by pdoc")
    folder = tmp_path_factory.mktemp("api")
    done = make_api(folder)
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr.lower()
    return folder


@pytest.mark.parametrize("module", ["ditto_core", "ditto_core.gates", "ditto_core.trace", "ditto_core.relations"])
def test_the_api_reference_has_every_public_name(api, module):
    page = (api / f"{module.replace('.', '/')}.html").read_text()
    names = importlib.import_module(module).__all__
    assert names
    assert [name for name in names if f'id="{name}"' not in page] == []


def test_a_name_that_the_api_reference_cannot_resolve_ends_its_build(tmp_path):
    pytest.importorskip("pdoc", reason="the API reference is built by pdoc")
    done = make_api(tmp_path, before="import ditto_core.sites as s; s.Tap.__annotations__['value'] = 'Nowhere'")
    assert done.returncode != 0
    assert "Nowhere" in done.stderr


def test_the_map_of_the_rooms_has_the_layers_that_are_checked():
    (contract,) = (
        c
        for c in parse_toml((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
        if c["type"] == "layers"
    )
    table = (ROOT / "ARCHITECTURE.md").read_text().split("| --- | --- |\n")[1].split("\n\n")[0]
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines()]
    assert rows == [re.split(r" \| ", layer) for layer in contract["layers"]]


def test_the_wheel_holds_the_pages_and_the_licence_and_says_that_both_packages_are_typed(tmp_path):
    hatchling = pytest.importorskip("hatchling.builders.wheel", reason="the wheel is built by hatchling")
    import zipfile

    (wheel,) = hatchling.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = zipfile.ZipFile(wheel).namelist()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert {name.removeprefix("ditto_core/docs/") for name in names if "/docs/" in name} == pages
    assert {"ditto_core/py.typed", "pytest_ditto/py.typed"} <= {*names}
    assert [name for name in names if name.endswith("licenses/LICENSE")]


def test_the_chart_library_is_what_its_readme_says():
    folder = ROOT / "ditto_core/report/assets/uplot"
    sums = dict(re.findall(r"^\| (\S+\.\w+) \| ([0-9a-f]{64}) \|$", (folder / "README.md").read_text(), re.MULTILINE))
    assert {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in sums} == sums
    assert set(sums) == {"uPlot.iife.min.js", "uPlot.min.css"}
    assert "MIT" in (folder / "LICENSE").read_text()
