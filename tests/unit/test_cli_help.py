"""What `ditto --help` says, and what it costs."""

import subprocess
import sys
from pathlib import Path

import pytest

from ditto_core.cli.docs import command
from ditto_core.errors import UsageError

PAGES = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("group", [(), ("debug",), ("gate",), ("cache",)])
def test_help_is_made_without_torch_and_no_line_of_it_is_cut_off(group):
    code = "import sys; from ditto_core.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, *group, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, commands = done.stdout.split("Commands:")
    assert "..." not in commands


def test_version_is_that_of_the_distribution():
    done = subprocess.run(
        [sys.executable, "-m", "ditto_core", "--version"], capture_output=True, text=True, check=False
    )
    assert done.stdout == "pytest-ditto-engine 0.1.0\n"


def test_the_pages_of_the_documentation_are_listed_and_printed(capsys):
    command()
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert listed["quickstart"] == "Quickstart"
    assert listed.keys() == {path.stem for path in PAGES.glob("*.md")}
    command("ci")
    assert capsys.readouterr().out == (PAGES / "ci.md").read_text()
    with pytest.raises(UsageError, match="did you mean 'quickstart'"):
        command("quikstart")
