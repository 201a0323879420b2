"""`ditto init`: a first test of the user's model, and a workflow that runs it."""

from __future__ import annotations

import json
import os
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Annotated

import typer

from ditto_core.cli.engine_options import Trust
from ditto_core.errors import UsageError

if TYPE_CHECKING:
    from ditto_core.model.loading import LoadedModel
    from ditto_core.spec import ModelSource

WORKFLOW = Path(".github/workflows/ditto.yml")
TEXT_PROMPT, ID_PROMPT = "Once upon a time there was a", [3, 4, 5, 6]


def command(
    model: Annotated[
        str, typer.Argument(help="Hub id, model directory, GGUF file, or FILE.py:NAME of a callable that makes one.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="The test to write (default: test_engine.py, beside FILE.py for a callable).")
    ] = None,
    trust_remote_code: Trust = False,
    ci: Annotated[bool, typer.Option("--ci", help=f"Write {WORKFLOW} too.")] = False,
) -> None:
    """Write a first test of a model. The model is loaded to see what it takes; no file is overwritten."""
    from ditto_core.cli.model_argument import read_model
    from ditto_core.model.loading import load_model

    source = read_model(model, trust_remote_code)
    module = Path(model.rpartition(":")[0]) if source.factory is not None else Path()
    test = output or (module.parent if module.suffix == ".py" else Path()) / "test_engine.py"
    if module.suffix == ".py" and test.parent.resolve() != module.parent.resolve():
        raise UsageError(f"{test} cannot import {module}: write it beside, or give the model as package.module:NAME")
    for path in (test, *([WORKFLOW] if ci else [])):
        if path.exists():
            raise UsageError(f"{path} is there already: remove it{', or give --output' if path == test else ''}")
    write(test, test_of(model, source, load_model(source), test))
    if ci:
        write(WORKFLOW, filled("workflow.yml", test=test.as_posix()))


def test_of(model: str, source: ModelSource, loaded: LoadedModel, test: Path) -> str:
    """Return the test's source."""
    standard, imports, name = "", "", json.dumps(model)
    if source.factory is not None:
        where, _, name = model.rpartition(":")
        imports = f"\nfrom {Path(where).stem if where.endswith('.py') else where} import {name}\n"
    elif Path(model).expanduser().exists():
        standard = "from pathlib import Path\n\n"
        there = os.path.relpath(Path(model).expanduser().resolve(), test.parent.resolve())
        name = f"str(Path(__file__).parent / {json.dumps(there)})"
    if source.trust_remote_code:
        imports, name = "\nfrom ditto_core import ModelSource\n", f"ModelSource({name}, trust_remote_code=True)"
    prompt = str(ID_PROMPT) if loaded.tokenizer is None else f'"{TEXT_PROMPT}"'
    kind = "test_decoder.py" if loaded.decoder else "test_module.py"
    return filled(kind, label=source.label, standard=standard, imports=imports, model=name, prompt=prompt)


def filled(name: str, **values: str) -> str:
    """Return a template with its values."""
    return Template((files("ditto_core.cli") / "templates" / f"{name}.txt").read_text("utf-8")).substitute(values)


def write(path: Path, text: str) -> None:
    """Write a new file and say so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    typer.echo(str(path))
