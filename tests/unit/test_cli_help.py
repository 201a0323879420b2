"""What `ditto --help` says, and what it costs."""

import subprocess
import sys

import pytest


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
