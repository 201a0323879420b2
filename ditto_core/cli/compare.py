"""`ditto compare A B`: two dumps of any tool. Exit code 0: same, 1: they differ, 2: could not be compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ditto_core.cli.results import Json
from ditto_core.errors import UsageError
from ditto_core.system.files import check_kept
from ditto_core.visible import visible

if TYPE_CHECKING:
    from ditto_core.compare.bounds import Rule
    from ditto_core.compare.comparison import Comparison
    from ditto_core.compare.tolerance import Tolerance


DTYPE_HELP = (
    "The engine's dtype, whose bounds count where no rule does [default: the dump's]; of a quantized one (int8, "
    "int4 …) the logits are judged."
)


OF_FILES = ("actual", "expected", "json_file", "verbose")
"""What two ONNX files are compared with."""


def command(
    context: typer.Context,
    actual: Annotated[Path, typer.Argument(help="The engine's dump: our trace, another tool's, or an ONNX file.")],
    expected: Annotated[Path, typer.Argument(help="The reference's dump, or an ONNX file that is right.")],
    name_map: Annotated[Path | None, typer.Option(help="File that aligns the names of the two sides.")] = None,
    tolerance: Annotated[
        list[str] | None,
        typer.Option(help="SELECTOR=BOUND on rel-L2, METRIC:SELECTOR=BOUND, or METRIC:SELECTOR>=BOUND; repeatable."),
    ] = None,
    tolerances: Annotated[
        Path | None, typer.Option(help="TOML file of rules [default: tool.ditto_core.tolerances of pyproject.toml].")
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="Write twice the measured errors as rules to this file, for review.")
    ] = None,
    dtype: Annotated[str, typer.Option(help=DTYPE_HELP)] = "",
    rank: Annotated[str | None, typer.Option(help="tllm_debug: a rank's number or place, such as PP_0/TP_1.")] = None,
    runner: Annotated[str | None, typer.Option(help="Polygraphy: a runner's name or its beginning.")] = None,
    etrecord: Annotated[Path | None, typer.Option(help="ETDump: the ETRecord, if it is not beside it.")] = None,
    debug_buffer: Annotated[Path | None, typer.Option(help="ETDump: the debug buffer, if it is not beside it.")] = None,
    rtol: Annotated[float | None, typer.Option(help="Element-wise relative tolerance of the mismatch count.")] = None,
    atol: Annotated[float | None, typer.Option(help="Element-wise absolute tolerance of the mismatch count.")] = None,
    equal_nan: Annotated[bool, typer.Option("--equal-nan", help="A NaN equals a NaN.")] = False,
    validate: Annotated[bool, typer.Option("--validate", help="A NaN or Inf fails though both sides have it.")] = False,
    ignore_missing: Annotated[
        bool,
        typer.Option("--ignore-missing", help="Compare what both have; else a name of one side only is exit code 2."),
    ] = False,
    json_file: Json = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every tensor.")] = False,
) -> None:
    """Compare two dumps, step by step and name by name."""
    from ditto_core.compare.dumps import compare_dumps
    from ditto_core.compare.tolerance import EPSILON, QUANTIZED, Tolerance
    from ditto_core.spec import parse_dtype
    from ditto_core.stepping.dumps import compare_offline

    check_kept(
        {"--json": json_file, "--calibrate": calibrate},
        {"engine's dump": actual, "reference's dump": expected, "name map": name_map}
        | {"ETRecord": etrecord, "debug buffer": debug_buffer},
    )
    check_kept({"--json": json_file}, {"file of tolerances": tolerances})
    if ".onnx" in (actual.suffix, expected.suffix):
        compare_files(actual, expected, json_file, context)
        return
    place = int(rank) if rank is not None and rank.isdecimal() else rank
    options = {"rank": place, "runner": runner, "etrecord": etrecord, "debug_buffer": debug_buffer}
    pairs = compare_dumps(actual, expected, name_map=name_map, **options)
    found = compare_offline(
        pairs,
        tolerance=Tolerance(finite=validate).over(tolerance_of(tolerance or [], tolerances)),
        rtol=rtol,
        atol=atol,
        equal_nan=equal_nan,
        dtype=dtype if dtype in ("", *QUANTIZED, *EPSILON) else parse_dtype(dtype),
        ignore_missing=ignore_missing,
    )
    conclude(found, json_file, calibrate, verbose)


def conclude(found: Comparison, json_file: Path | None, calibrate: Path | None, verbose: bool) -> None:
    """Show and write what was found, and exit as it says: 1 where tensors differ, 2 where some were not compared, or
    none could be judged."""
    from ditto_core.compare.tolerance_files import calibrate as write_rules

    if json_file is not None:
        found.save(json_file)
    show(found, verbose)
    if calibrate is not None:
        typer.echo(f"{write_rules([found], calibrate)} rules in {calibrate}: review and commit it", err=True)
    if not found:
        raise typer.Exit(1 if found.differs and not found.missing else 2)


def compare_files(actual: Path, expected: Path, json_file: Path | None, context: typer.Context) -> None:
    """Compare two ONNX files value by value on random inputs.

    Raises :class:`UsageError` where only one is such, or where an option is given that is about dumps.
    """
    from ditto_core.cli.align import between_files

    if actual.suffix != expected.suffix:
        file, other = (actual, expected) if actual.suffix == ".onnx" else (expected, actual)
        raise UsageError(
            f"{file} is an ONNX file and {other} is not: `ditto align MODEL {file.name}` compares it with its model"
        )
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name not in OF_FILES and source is not None and source.name == "COMMANDLINE":
            name = max(option.opts, key=len)
            text = "two ONNX files are aligned value by value, within a bound of their dtype"
            raise UsageError(f"{name} is for dumps: {text}")
    between_files(expected, actual, [], 3, json_file)


def show(found: Comparison, verbose: bool) -> None:
    """Print the notes, the table, and why the comparison failed."""
    from ditto_core.compare.table import ROWS, table
    from ditto_core.compare.text import failure_message

    for note in found.notes:
        typer.echo(visible(f"note: {note}"), err=True)
    typer.echo(table(found, len(found.sites) if verbose else ROWS))
    if not found:
        typer.echo(failure_message(found), err=True)


def tolerance_of(texts: list[str], file: Path | None) -> Tolerance:
    """Return the rules of the command line, of which those on one selector hold together, over those of a file."""
    from ditto_core.compare.tolerance import Tolerance
    from ditto_core.compare.tolerance_files import load_tolerance, project_tolerance

    filed = load_tolerance(file) if file else project_tolerance(Path.cwd())
    rules = [parse_rule(text) for text in texts]
    said = [rule.selector for rule in rules]
    together = (replace(rule, also=rule.selector in said[:i]) for i, rule in enumerate(rules))
    return Tolerance(rules=tuple(together)).over(filed)


def parse_rule(text: str) -> Rule:
    """Read ``SELECTOR=BOUND``, ``METRIC:SELECTOR=BOUND`` or ``METRIC:SELECTOR>=BOUND``; a metric of yours may be
    ``package.module:function``.
    """
    from ditto_core.compare.bounds import Rule, is_metric

    name, _, bound = text.rpartition("=")
    least, name = name.endswith(">"), name.removesuffix(">")
    try:
        number = float(bound)
    except ValueError as error:
        raise UsageError(f"--tolerance got {text!r}, expected SELECTOR=BOUND such as '**=1e-3'") from error
    parts = name.split(":")
    for cut in (1, 2):
        metric = ":".join(parts[:cut])
        if len(parts) > cut and is_metric(metric):
            return Rule(":".join(parts[cut:]), number, metric=metric, at_least=least)
    return Rule(name, number, at_least=least)
