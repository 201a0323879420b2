"""The examples of docs/traces.md run, in their order, as a reader would run them."""

import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs/traces.md"


def blocks():
    return re.findall(r"^```(python|toml)\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)


def test_the_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran, names = [], {}
    for language, text in blocks():
        if language == "toml":
            Path("names.toml").write_text(text)
        else:
            exec(compile(text, str(DOCUMENT), "exec"), names)
        ran.append(language)
    assert ran == ["python", "python", "toml", "python", "python"]


def test_the_files_that_the_document_draws_are_those_that_are_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(blocks()[0][1], {})
    drawn = re.findall(r"^  (\S+)", DOCUMENT.read_text().split("```")[1], re.MULTILINE)
    assert sorted(p.name for p in Path("trace").iterdir()) == [n for n in sorted(drawn) if "step1" not in n]
