"""`ditto align`: an engine file of any origin against its model or another file. Exit code 1: it goes wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ditto_core.cli.engine_options import Trust
from ditto_core.cli.results import Json, writable
from ditto_core.errors import UsageError
from ditto_core.system.atomic import write_atomic
from ditto_core.system.files import check_kept

if TYPE_CHECKING:
    from ditto_core.align.repair import Repair


def command(
    model: Annotated[
        str, typer.Argument(help="Hub id, directory, GGUF file, FILE.py:NAME, or an ONNX file that is right.")
    ],
    file: Annotated[Path, typer.Argument(help="ONNX file, or a folder with one.")],
    map_file: Annotated[
        Path | None,
        typer.Option("--map", help="Write the map of sites to values here, for review and reuse.", callback=writable),
    ] = None,
    inputs: Annotated[
        list[str] | None, typer.Option("--input", help="INPUT=ROLE where a name does not tell; repeatable.")
    ] = None,
    faults: Annotated[int, typer.Option(min=1, help="Faults to look for, each after those before are repaired.")] = 3,
    weights: Annotated[
        bool, typer.Option("--weights", help="Quantized file: tell what the weights cost and what the kernels do.")
    ] = False,
    trust_remote_code: Trust = False,
    json_file: Json = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every site.")] = False,
) -> None:
    """Align an engine file with its model or a file.

    By value; names its faults. A file in the model's place is an ONNX file that is right.
    """
    from ditto_core.align.aligning import concluded, study
    from ditto_core.align.alignment import summary
    from ditto_core.align.file import OnnxFile
    from ditto_core.align.quantized import measure_costs, quantized
    from ditto_core.align.repair import Repair, all_faults
    from ditto_core.align.verify import verified
    from ditto_core.cli.model_argument import model_path, read_model
    from ditto_core.model.beside import check_model_kept
    from ditto_core.model.loading import load_lean

    results = {"--map": map_file, "--json": json_file}
    check_kept(results, {"file": file})
    check_model_kept(results, {"model": model_path(model)})
    if Path(model).suffix == ".onnx":
        if map_file is not None:
            raise UsageError(f"--map is of a model's sites, {model} has none: --json writes the pairs of two files")
        between_files(Path(model), file, inputs or [], faults, json_file)
        return
    loaded = load_lean(read_model(model, trust_remote_code))
    engine = OnnxFile(file)
    whole = quantized(loaded, engine, roles(inputs or [])) if engine.quantization else None
    found = whole.study if whole else study(loaded, engine, roles(inputs or []))
    aligned = verified(concluded(found), found.model, found.file, found.batches[0])
    typer.echo(summary(aligned, loaded.label, most=10_000 if verbose else 8))
    for place in aligned.sites.values() if verbose else ():
        typer.echo(f"  {place.site} = {place}: {place.error:.1e}")
    if whole:
        aligned = replace(aligned, wrong=whole.weights.wrong)
    if map_file is not None:
        aligned.save(map_file)
    if weights and whole:
        typer.echo(measure_costs(whole))
    wrong = said([Repair(fault) for fault in whole.faults()]) if whole else []
    judged = whole is None or whole.judged
    wrong += said(all_faults(found, faults)) if judged else []
    if json_file is not None:
        write_atomic(json_file, json.dumps({**aligned.to_json(), "faults": wrong}, indent=1) + "\n")
    if wrong or (aligned.off and judged):
        raise typer.Exit(1)


def between_files(expected: Path, actual: Path, inputs: list[str], most: int, json_file: Path | None) -> None:
    """Align an ONNX file with another one that is right."""
    from ditto_core.align.feeds import random_feeds
    from ditto_core.align.file import OnnxFile
    from ditto_core.align.graphs import counterparts, lacking, of_files, summary
    from ditto_core.align.repair import repaired

    good = OnnxFile(expected)
    sides = of_files(OnnxFile(actual), good, random_feeds(good), roles(inputs))
    typer.echo(summary(sides, actual.name, expected.name))
    if gone := lacking(sides, [port.name for port in good.outputs]):
        typer.echo(f"nothing in {actual.name} is the output {', '.join(gone)} of {expected.name}")
    repairs = repaired(sides, most)[0]
    wrong = said(repairs)
    if json_file is not None:
        write_atomic(json_file, json.dumps({"pairs": counterparts(sides), "faults": wrong}, indent=1) + "\n")
    if wrong or gone:
        raise typer.Exit(1)


def said(repairs: Sequence[Repair]) -> list[dict[str, object]]:
    """Print faults and return them as JSON."""
    for number, repair in enumerate(repairs, 1):
        typer.echo(f"fault {number}: {repair}")
    return [
        {**repair.fault.to_json(), "repaired_with": list(repair.sites), "healed": repair.healed} for repair in repairs
    ]


def roles(texts: list[str]) -> dict[str, str]:
    """Read ``INPUT=ROLE``. Raises :class:`UsageError`."""
    pairs = [text.partition("=") for text in texts]
    for text, (name, equals, role) in zip(texts, pairs, strict=True):
        if not (name and equals and role):
            raise UsageError(f"--input got {text!r}, expected INPUT=ROLE such as tokens=input_ids")
    return {name: role for name, _, role in pairs}
