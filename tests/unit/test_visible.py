"""Names of dumps, models and prompts in everything that is shown: nothing in them reaches a terminal or CI log raw."""

import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from ditto_core.cli import main
from ditto_core.compare.blame import Localization
from ditto_core.compare.dumps import compare_dumps
from ditto_core.compare.notebook import notebook_html
from ditto_core.compare.result import TokenResult
from ditto_core.compare.table import table
from ditto_core.compare.text import failure_message, headline, summary_line, token_message
from ditto_core.errors import BuildError, DittoError, SelectorError
from ditto_core.report.github import annotation, append_summary
from ditto_core.report.localization import localization_text
from ditto_core.report.write import write_report
from ditto_core.stepping.dumps import compare_offline
from ditto_core.visible import lines, source_path, visible
from pytest_ditto.reporting import add_tables, numbers_of
from pytest_ditto.tally import Tally

ESCAPED = {
    "\x1b[2J\x1b]0;owned\x07": r"\x1b[2J\x1b]0;owned\x07",
    "a\n::error file=x::pwned": r"a\n::error file=x::pwned",
    "::set-output name=x::y": r"\x3a:set-output name=x::y",
    "  ::stop-commands::z": r"  \x3a:stop-commands::z",
    "a##[add-mask]b": r"a#\x23[add-mask]b",
    "\r\nX": r"\r\nX",
    "a\x00b": r"a\x00b",
    "\u202egnp.exe": r"\u202egnp.exe",
    "\u2066a\u2069\u200f": r"\u2066a\u2069\u200f",
    "\x9b31m": r"\x9b31m",
    "\u2028line": r"\u2028line",
}
"""What is dangerous, and how it is shown."""
HTML = ("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "|pipe|[link](javascript:alert(5))`code`")
SAFE = ("model.layers.0.self_attn:q_rope", "Ġtoken", "模型", "é ♥", "a::b", "C:\\x")
NAMES = (*ESCAPED, *HTML)
ALL = " | ".join(NAMES)


@pytest.mark.parametrize(("raw", "shown"), ESCAPED.items())
def test_what_a_terminal_or_a_log_obeys_is_shown_as_its_escape(raw, shown):
    assert visible(raw) == shown
    assert visible(shown) == shown


@pytest.mark.parametrize("name", SAFE)
def test_other_names_stay(name):
    assert visible(name) is name


def test_texts_inside_of_structures_are_escaped_and_safe_structures_are_not_copied():
    info = TokenResult("p", (1,), (2,), "\x1b", "b", ())
    found = visible({"k\n": (info, ["\x00", 1.5])})
    assert found == {r"k\n": (replace(info, engine_text=r"\x1b"), [r"\x00", 1.5])}
    safe = {"k": (replace(info, engine_text="a"), [float("nan")])}
    assert visible(safe) is safe


def test_lines_keep_their_breaks_and_lose_commands():
    assert lines("one\n\ttwo\n::error::x\r") == "one\n\ttwo\n\\x3a:error::x\\r"


def test_an_error_shows_no_name_raw():
    shown = str(SelectorError(f"no site {ALL}"))
    assert harmless(shown) and "\n" not in shown
    assert str(BuildError(f"no site {ALL}")) == lines(f"no site {ALL}"), "one with a child's log keeps its lines"
    assert harmless(str(DittoError(ALL)))


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dumps")
    x = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0))
    torch.save(dict.fromkeys(NAMES, x + 0.1), folder / "a.pt")
    torch.save(dict.fromkeys(NAMES, x), folder / "b.pt")
    return folder


@pytest.fixture(scope="module")
def run(dumps):
    """A comparison whose every text is hostile."""
    found = compare_offline(compare_dumps(dumps / "a.pt", dumps / "b.pt"))
    side = {"label": ALL, "model": ALL, "backend": ALL, "facts": {ALL: ALL}, "recorded": False}
    return replace(
        found,
        engine=replace(found.engine, **side),
        reference=replace(found.reference, **side),
        notes=NAMES,
        tokens=(TokenResult(ALL, (1, 2), (1, 3), ALL, ALL),),
        missing=dict.fromkeys(NAMES, ALL),
        dump=ALL,
        repros={ALL: ALL},
    )


def harmless(text):
    """Tell whether a text holds nothing that a terminal or a CI log obeys. Its own line breaks and tabs are none."""
    bare = text.replace("\n", "").replace("\t", "")
    return bare.isprintable() and not re.search(r"^\s*::|##\[", text, re.MULTILINE)


def of_markdown(text):
    """Undo Markdown's escapes, as a reader sees it."""
    return re.sub(r"\\([\\`*_{}\[\]<>#|~])", r"\1", text)


def written(kind, run, folder):
    write_report(kind, {"" if kind == "junit" else ALL: run}, folder / "report")
    return (folder / "report").read_text("utf-8")


def job_summary(run, folder):
    append_summary({ALL: run}, {"GITHUB_STEP_SUMMARY": str(folder / "summary")})
    return (folder / "summary").read_text("utf-8")


def pytest_section(run, folder):
    report = SimpleNamespace(sections=[])
    add_tables(report, [run], [], everything=True)
    ((_, text),) = report.sections
    return text


def pytest_summary(run, folder):
    tally = Tally()
    tally.runs.append((numbers_of(run), "test_x.py::test", "failed"))
    tally.notes += NAMES
    tally.unavailable[ALL] += 1
    return "\n".join(tally.lines())


def localization(run, folder):
    return localization_text(Localization(ALL, 1.0, (), notes=NAMES), verbose=True)


SINKS = {
    "message": lambda run, folder: failure_message(run),
    "headline": lambda run, folder: headline(run),
    "tokens": lambda run, folder: token_message(run),
    "line": lambda run, folder: summary_line(run),
    "table": lambda run, folder: table(run, 99),
    "repr": lambda run, folder: repr(run),
    "notebook": lambda run, folder: notebook_html(run),
    "markdown": lambda run, folder: written("markdown", run, folder),
    "markdown of one": lambda run, folder: written("markdown", run, folder),
    "junit": lambda run, folder: written("junit", run, folder),
    "job summary": job_summary,
    "pytest section": pytest_section,
    "pytest summary": pytest_summary,
    "localization": localization,
}


@pytest.mark.parametrize("sink", SINKS.values(), ids=SINKS)
def test_no_sink_shows_a_name_raw(run, tmp_path, sink):
    text = sink(run, tmp_path)
    assert harmless(text)
    assert r"\x1b" in of_markdown(text)


def test_junit_is_well_formed_and_names_every_site(run, tmp_path):
    root = ElementTree.fromstring(written("junit", run, tmp_path))
    assert {visible(name) for name in NAMES} <= {case.get("name") for case in root.iter("testcase")}


def test_an_annotation_is_one_command_whatever_is_in_it():
    text = annotation(f"bad %\n{ALL}", "f,ile::x.py", 3, ALL)
    assert text.startswith("::error file=f%2Cile%3A%3Ax.py,line=3,title=")
    assert text.isprintable()
    assert "##[" not in text


def test_the_page_shows_no_name_raw(run, tmp_path):
    pytest.importorskip("jinja2")
    page = written("html", run, tmp_path)
    assert "\x1b" not in page
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200e\u200f\x00\x9b\u2028]", page)
    assert not [name for name in HTML[:2] if name in page]
    assert not re.search(r"""href=["']?javascript""", page)


def test_json_is_the_data_itself(run, tmp_path):
    data = json.loads(written("json", run, tmp_path))[ALL]
    assert [*data["missing"]] == [*NAMES]


def test_the_command_shows_no_name_raw(dumps, monkeypatch, capsys):
    def shown(*arguments):
        monkeypatch.setattr(sys, "argv", ["ditto", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        text = "\n".join(capsys.readouterr())
        assert harmless(text)
        return end.value.code, text

    code, text = shown("compare", dumps / "a.pt", dumps / "b.pt", "--verbose")
    assert (code, r"\x1b[2J" in text) == (1, True)
    code, text = shown("compare", dumps / "a.pt", dumps / "b.pt", "--tolerance", "\x1b[2J\n::error::x*=1")
    assert (code, r"\x1b[2J" in text) == (2, True)


def test_a_source_file_below_the_working_directory_is_named_so_that_it_opens(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "src" / "mine" / "models" / "deep" / "net.py"
    assert source_path(str(own)) == "src/mine/models/deep/net.py"
    assert source_path("/home/somebody/work/mine/models/net.py") == "mine/models/net.py"
    installed = tmp_path / ".venv/lib/python3.12/site-packages/transformers/models/llama/modeling_llama.py"
    assert source_path(str(installed)) == "models/llama/modeling_llama.py"
