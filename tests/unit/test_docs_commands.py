"""Every command that the documentation names exists, with the options that it is given there."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import typer

from ditto_core.cli import application
from ditto_core.compare.blame import Localization
from ditto_core.model.listing import ListedSite
from ditto_core.report.against import changes
from pytest_ditto.pytest_options import SETTINGS
from tests.comparisons import faulty, passing

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(text):
    """Yield the words of each `ditto …` in code: a span, or a line of a block."""
    blocks = re.findall(r"^ *```(?:bash|)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    spans = re.findall(r"`(ditto [^`\n]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE))
    for line in (*lines, *spans):
        if re.match(r"ditto [a-z]", line):
            yield shlex.split(line, comments=True)


def unknown(words):
    """Return what the command line does not know of one command."""
    command = typer.main.get_command(application())
    for place, word in enumerate(words[1:], 1):
        children = getattr(command, "commands", None)
        if children is None:
            break
        if word not in children:
            return f"{' '.join(words[:place])} has no command {word}"
        command = children[word]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    given = {word.split("=")[0] for word in words if re.fullmatch(r"--?[a-z][a-z-]*(=.*)?", word)}
    foreign = given - known - {"--help"}
    return f"{' '.join(words)}: no {', '.join(sorted(foreign))}" if foreign else ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_exist(page):
    text = page.read_text()
    wrong = [problem for words in commands(text) if "|" not in words and (problem := unknown(words))]
    assert wrong == []
    flags = set(re.findall(r"--ditto-[a-z-]+[a-z]", text))
    assert flags <= {setting.flag for setting in SETTINGS}


def test_the_pages_about_next_steps_name_commands():
    for name in ("agents.md", "engine-differs.md"):
        assert len([*commands((ROOT / "docs" / name).read_text())]) >= 5


def columns_of_agents(command):
    """Return the keys that docs/agents.md names for the JSON of a command, in its last cell."""
    page = (ROOT / "docs/agents.md").read_text().splitlines()
    row = next(line for line in page if line.startswith("|") and f"| `{command}" in line)
    return set(re.findall(r"`(\w+)`", row.rsplit("|", 2)[1]))


def test_keys_that_agents_are_told_are_in_the_json():
    found = changes(passing(), faulty()).to_json()
    assert columns_of_agents("ditto report") <= {*found, *found["sites"][0]}
    assert columns_of_agents("ditto sites") == {field.name for field in fields(ListedSite)}
    assert columns_of_agents("ditto compare") <= {*passing().to_json()}
    assert columns_of_agents("pytest") <= {*passing().to_json()}
    assert columns_of_agents("ditto localize") <= {*Localization("float32", 4.0, ()).to_json()}
