"""Tolerances in files: ``[tool.ditto_core.tolerances]`` in pyproject.toml, a TOML file of its own, and calibration."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditto_core.compare.bounds import INTERNAL, Rule
from ditto_core.compare.tolerance import EPSILON, FACTOR, INTEGERS, Tolerance
from ditto_core.errors import UsageError
from ditto_core.system.files import parse_toml, read_text

if TYPE_CHECKING:
    from ditto_core.compare.comparison import Comparison

HEADROOM = 2.0


def project_tolerance(folder: Path) -> Tolerance:
    """Return the rules of the nearest ``pyproject.toml`` at or above ``folder``; none when it has no such table.

    They are for all of a project's models: one that matches no site is no error.
    """
    for parent in (folder, *folder.parents):
        path = parent / "pyproject.toml"
        if path.is_file():
            return Tolerance.of(read_table(path, "tool", "ditto_core", "tolerances")).optional()
    return Tolerance()


def load_tolerance(path: Path) -> Tolerance:
    """Read a TOML file with a ``[tolerances]`` table, as calibration writes it. Raises :class:`UsageError`."""
    if "tolerances" not in read_toml(path):
        raise UsageError(f"{path} has no [tolerances] table")
    return Tolerance.of(read_table(path, "tolerances"))


def read_toml(path: Path) -> Mapping[str, Any]:
    """Read a TOML file. Raises :class:`UsageError` when it is missing or no TOML."""
    try:
        table: Mapping[str, Any] = parse_toml(read_text(path))
    except FileNotFoundError:
        raise UsageError(f"{path} is missing, expected a TOML file") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as TOML: {error}") from error
    return table


def read_table(path: Path, *names: str) -> Mapping[str, Any]:
    """Return a table of a TOML file, empty where there is none. Raises :class:`UsageError` for what is no table."""
    table = read_toml(path)
    for i, name in enumerate(names, 1):
        inner = table.get(name, {})
        if not isinstance(inner, Mapping):
            raise UsageError(f"{path}: {'.'.join(names[:i])} is {inner!r}, expected a table")
        table = inner
    return table


@dataclass(frozen=True)
class Measured:
    """What comparisons measured: the worst rel-L2 by selector (layer numbers are ``*``), and what was compared."""

    errors: Mapping[str, float]
    sources: tuple[str, ...]

    @classmethod
    def of(cls, found: Comparison) -> Measured:
        """Take the errors of one comparison. One that failed is refused with :class:`UsageError`: bounds taken from a
        broken engine would make the fault pass for good. No bound is taken from an infinite error (NaN that healed or
        that a rule allows), nor from one that could not be judged: it would allow anything.
        """
        from ditto_core.compare.text import no_verdict  # loads torch, which reading a project's rules does not need

        if found.failures:
            bad = found.failures[0]
            raise UsageError(f"not calibrated: {bad.site}, step {bad.step} diverges ({bad.verdict}); mend that first")
        if found.unjudged_outputs:
            raise UsageError(f"not calibrated: {no_verdict(found)}")
        failed = next((f"step {step}: {verdict}" for step, verdict in found.logits_verdicts if not verdict.ok), None)
        if failed:
            raise UsageError(f"not calibrated: the logits diverge, {failed}; mend that first")
        integers = {tap.site for tap in found.taps if tap.dtype in INTEGERS}
        # An exact site got lucky: rounding alone may cost half of epsilon. Integers have no rounding.
        least = EPSILON.get(found.engine.dtype, 0.0) / 2
        worst: dict[str, float] = {}
        for result in found.results:
            if result.site in integers or result.metrics.rel_l2 == math.inf or not result.verdict.judged:
                continue
            # A bracket would begin a set; a question mark matches it.
            key = re.sub(r"(?<=\.)\d+(?=[.:]|$)", "*", result.site.replace("[", "?"))
            worst[key] = max(worst.get(key, least), result.metrics.rel_l2)
        return cls(worst, (f"{found.engine.label} against {found.reference.label}, {found.steps} steps",))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {"errors": dict(self.errors), "sources": list(self.sources)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measured:
        """Inverse of :meth:`to_json`."""
        return cls({site: float(error) for site, error in data["errors"].items()}, tuple(data["sources"]))

    def __or__(self, other: Measured) -> Measured:
        """Return the worst of both."""
        worst = {key: max(self.errors.get(key, 0.0), value) for key, value in other.errors.items()}
        return Measured({**self.errors, **worst}, tuple(dict.fromkeys((*self.sources, *other.sources))))


def calibrate(comparisons: Iterable[Comparison], path: Path, headroom: float = HEADROOM) -> int:
    """Write the measured rel-L2 of every site times ``headroom`` as rules; see :func:`write_rules`.

    Raises :class:`UsageError` as :meth:`Measured.of` does, and when nothing was compared.
    """
    return write_rules(map(Measured.of, comparisons), path, headroom)


def write_rules(measured: Iterable[Measured], path: Path, headroom: float = HEADROOM) -> int:
    """Write measured errors times ``headroom`` as rules, for a person to review and commit.

    Sites that differ by a layer number share a rule. Of a file that is already there the factor stays, the rules where
    nothing new was measured, and those that say more than a bound on rel-L2: a person wrote them. Returns the number
    of rules. Raises :class:`UsageError` when nothing was measured, :class:`TraceError` when the file cannot be written.
    """
    from ditto_core.system.files import replace_text

    worst = reduce(or_, measured, Measured({}, ()))
    if not worst.errors:
        raise UsageError("not calibrated: nothing was compared")
    known = load_tolerance(path) if path.exists() else Tolerance()
    written = {rule.selector for rule in known.rules if not rule.of_logits and rule != Rule(rule.selector, rule.bound)}
    new = {site: f"{value * headroom:.3e}" for site, value in worst.errors.items() if site not in written}
    rules: dict[str, list[str]] = {}
    for rule in known.rules:
        anew = None if rule.of_logits else new.pop(rule.selector, None)
        rules.setdefault(rule.selector, []).append(anew or spelled(rule))
    for site, text in new.items():
        rules.setdefault(site, []).append(text)
    lines = ["# Measured bounds on rel-L2: review before you commit.", f"# {headroom:g} x the worst of:"]
    lines += [f"#   {line}" for line in worst.sources]
    lines += ["[tolerances]", *([] if known.factor == FACTOR else [f"factor = {known.factor}"])]
    lines += [
        f"{json.dumps(site)} = {texts[0] if len(texts) == 1 else '[' + ', '.join(texts) + ']'}"
        for site, texts in rules.items()
    ]
    replace_text(path, "\n".join(lines) + "\n")
    return len(rules)


def spelled(rule: Rule) -> str:
    """Return a rule's value in TOML: a number, or a table of the fields that are set."""
    plain = Rule(rule.selector, rule.bound)
    if rule == plain:
        return f"{rule.bound}"
    names = [name for name in Rule.__dataclass_fields__ if name not in (*INTERNAL, "bound", "at_least")]
    changed = {name: getattr(rule, name) for name in names if getattr(rule, name) != getattr(plain, name)}
    least = "at_least" if rule.at_least else "bound"
    texts = (f"{k} = {json.dumps(v) if isinstance(v, str) else v}" for k, v in {least: rule.bound, **changed}.items())
    return f"{{ {', '.join(texts)} }}"
