"""Two dumps side by side: which tensors have a partner, which have none, and the pairs, read one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ditto_core.compare.ulp import coarser
from ditto_core.dumps import Dump, format_of, open_dump
from ditto_core.dumps.etdump import open_pair
from ditto_core.dumps.namemap import Entry, NameMap, check_rules, suffix_pairs
from ditto_core.dumps.padding import described, last_tokens, packed
from ditto_core.errors import TraceError, UsageError


@dataclass(frozen=True)
class DumpedPair:
    """Two tensors of the same name in the same step. ``problem`` says why they cannot be compared, if they cannot."""

    step: int
    name: str
    actual: torch.Tensor
    expected: torch.Tensor
    problem: str = ""


@dataclass(frozen=True)
class StepMatch:
    """The names of one step: entries of both sides under a common name, and the names that only one side has."""

    step: int
    matched: Mapping[str, tuple[Entry, Entry]]
    only_actual: tuple[str, ...]
    only_expected: tuple[str, ...]

    @property
    def alone(self) -> bool:
        """Tell whether one side alone has tensors in the step."""
        return not self.matched and bool(self.only_actual) != bool(self.only_expected)


@dataclass(frozen=True)
class DumpPairs:
    """Two dumps, aligned. ``notes`` are what the readers have to say: other ranks, an incomplete trace."""

    actual: Dump
    expected: Dump
    name_map: NameMap
    _matches: dict[int, StepMatch] = field(default_factory=dict, repr=False, compare=False)

    @property
    def steps(self) -> tuple[int, int]:
        """How many steps each side has; only the steps that both have are compared."""
        return self.actual.steps, self.expected.steps

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know before reading the result."""
        dumps = (self.actual, self.expected)
        counted = [f"{dump.path} numbers its steps from {dump.first}: here it is 0" for dump in dumps if dump.first]
        return (*self.actual.notes, *self.expected.notes, *counted, *filter(None, map(self._ignored, dumps)))

    def _ignored(self, dump: Dump) -> str:
        found = [name for name in dump.names(0) if self.name_map.ignores(name)] if dump.steps else []
        return f"{dump.path}: the name map ignores {len(found)} names, such as {found[0]}" if found else ""

    def match(self, step: int) -> StepMatch:
        """Align the names of one step, in the order of the side that knows the topology (else of ``expected``).

        Raises :class:`TraceError` when the name map makes two names the same, or a suffix fits several names.
        """
        if step not in self._matches:  # the names of some formats cost a parse of the file
            self._matches[step] = self._match(step)
        return self._matches[step]

    def _match(self, step: int) -> StepMatch:
        ours = self.name_map.entries(self.actual.names(step))
        theirs = self.name_map.entries(self.expected.names(step))
        partner = {name: name for name in ours if name in theirs}
        if self.name_map.suffix:
            partner |= suffix_pairs([n for n in ours if n not in theirs], [n for n in theirs if n not in ours])
        taken = {*partner.values()}
        partner |= role_pairs([n for n in ours if n not in partner], [n for n in theirs if n not in taken])
        pairs = {b: a for a, b in partner.items()}
        if self.actual.format == "trace" and self.expected.format != "trace":
            pairs = {partner[a]: a for a in ours if a in partner}
        else:
            pairs = {b: pairs[b] for b in theirs if b in pairs}
        return StepMatch(
            step=step,
            matched={b: (ours[a], theirs[b]) for b, a in pairs.items()},
            only_actual=tuple(n for n in ours if n not in partner),
            only_expected=tuple(n for n in theirs if n not in pairs),
        )

    def pairs(self) -> Iterator[DumpedPair]:
        """Yield every pair of every common step; two tensors are in memory at a time."""
        for match in self.matches():
            yield from self._step_pairs(match)

    def pair(self, step: int, name: str) -> DumpedPair:
        """Return one pair that :meth:`match` lists."""
        match = self.match(step)
        return next(self._step_pairs(replace(match, matched={name: match.matched[name]})))

    def only_actual(self) -> list[tuple[int, str]]:
        """Return step and name of every tensor that only ``actual`` has, of the steps that both have."""
        return [(match.step, name) for match in self.matches() if not match.alone for name in match.only_actual]

    def only_expected(self) -> list[tuple[int, str]]:
        """Return step and name of every tensor that only ``expected`` has, of the steps that both have."""
        return [(match.step, name) for match in self.matches() if not match.alone for name in match.only_expected]

    def lost_steps(self) -> tuple[list[int], list[int]]:
        """Return the steps of which ``actual`` has no tensor and ``expected`` has some, and the other way round."""
        alone = [match for match in self.matches() if match.alone]
        return [m.step for m in alone if m.only_expected], [m.step for m in alone if m.only_actual]

    def matches(self) -> Iterator[StepMatch]:
        """Yield the names of each step, as far as both sides go."""
        return map(self.match, range(min(self.steps)))

    def _step_pairs(self, match: StepMatch) -> Iterator[DumpedPair]:
        padding = self.name_map.padding if match.matched else None
        real = padding.real((self.actual, self.expected), match.step) if padding else None
        for name, (ours, theirs) in match.matched.items():
            actual = ours.take(self.actual.load(match.step, ours.source))
            expected = theirs.take(self.expected.load(match.step, theirs.source))
            if padding and real is not None:
                kept = both(packed(actual, real), packed(expected, real))
                if kept is None and padding.selects_last_token(name):
                    kept = both(last_tokens(actual, real), last_tokens(expected, real))
                actual, expected = kept or (actual, expected)
            why = problem(actual, expected)
            if why and actual.shape != expected.shape:
                why += packing(actual, expected) if real is None else described(real)
            yield DumpedPair(match.step, name, measurable(actual), measurable(expected), why)


def role_pairs(ours: Sequence[str], theirs: Sequence[str]) -> dict[str, str]:
    """Pair names that differ in a trace's ``input:`` or ``output:`` alone; other tools do not write the role.

    Where a trace has both, the name is that of the output, which comes last.
    """
    found, bare = (
        {name.removeprefix("input:").removeprefix("output:"): name for name in side} for side in (ours, theirs)
    )
    return {found[short]: bare[short] for short in found if short in bare}


def both(actual: torch.Tensor | None, expected: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the two tensors when both are there: a tensor that only one side could pack stays as it was dumped."""
    return None if actual is None or expected is None else (actual, expected)


def measurable(tensor: torch.Tensor) -> torch.Tensor:
    """View complex numbers as [..., 2] of their parts, and uint64 below 2^63 as int64; any other tensor as it is."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype == torch.uint64:
        signed = tensor.view(torch.int64)
        return signed if not signed.numel() or int(signed.min()) >= 0 else tensor
    return tensor


def problem(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Say why two tensors cannot be compared; nothing is broadcast."""
    if actual.shape != expected.shape:
        return f"shape {list(actual.shape)} against {list(expected.shape)}"
    if actual.is_complex() != expected.is_complex():
        return f"{actual.dtype} against {expected.dtype}: complex numbers against real ones".replace("torch.", "")
    actual, expected = measurable(actual), measurable(expected)
    try:
        coarser(actual.dtype, expected.dtype)
    except UsageError as error:
        return str(error)
    large = torch.uint64 in (actual.dtype, expected.dtype)
    return "uint64 numbers of 2^63 and more are not compared" if large else ""


def packing(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Say that one of two tensors may be packed, [tokens, …] or [1, tokens, …], and the other [batch, length, …]."""
    short, long = sorted((actual, expected), key=lambda tensor: tensor.dim())
    flat = short[0] if short.dim() == long.dim() and short.shape[:1] == (1,) else short
    by_token = long.dim() > 2 or not long.is_floating_point()  # hidden states and logits, or token ids
    same = 0 < flat.dim() == long.dim() - 1 and flat.shape[1:] == long.shape[2:]
    if not (by_token and same) or flat.shape[0] > long.shape[0] * long.shape[1]:
        return ""
    return ": packed tokens against padded rows, give the name map a `padding` (lengths of the prompts, or a mask)"


def compare_dumps(
    actual: Dump | Path | str,
    expected: Dump | Path | str,
    *,
    name_map: NameMap | Mapping[str, str] | Iterable[tuple[str, str]] | Path | str | None = None,
    **options: Any,
) -> DumpPairs:
    """Align two dumps (opened, or paths of any known format).

    The rules of ``name_map`` are applied to the names of both sides, so that they bring either to the other's, or both
    to a third form. ``options`` are those of :func:`ditto_core.dumps.open_dump`; each side gets those that its format
    has. Raises :class:`UsageError` for a rule that is about no name on either side or an option that neither format
    has, :class:`TraceError` when a dump cannot be read or not one name of the first step is on both sides.
    """
    sides = (actual, expected)
    check_options(sides, options)
    ours, theirs = run_and_record(sides, options) or tuple(opened(side, options) for side in sides)
    pairs = DumpPairs(*by_number(ours, theirs), NameMap.of(name_map))
    if not min(pairs.steps):
        empty = pairs.actual if not pairs.actual.steps else pairs.expected
        raise TraceError(f"{empty.path} holds no steps: there is nothing to compare")
    check_rules(pairs.name_map, (pairs.actual, pairs.expected))
    match = next((match for match in pairs.matches() if not match.alone), pairs.match(0))
    if not match.matched:
        raise TraceError(no_match(pairs, match))
    return pairs


def by_number(ours: Dump, theirs: Dump) -> tuple[Dump, Dump]:
    """Put steps beside each other to which one tool gave one number; where they share none, each counts from its first.

    What stands before the later one's first step is empty there.
    """
    dumps = (ours, theirs)
    first, last = min(d.first for d in dumps), min(d.first + d.steps for d in dumps)
    if ours.info.get("layout") != theirs.info.get("layout") or last <= max(d.first for d in dumps):
        return dumps
    return replace(ours, first=first, openers=[*[dict] * (ours.first - first), *ours.openers]), replace(
        theirs, first=first, openers=[*[dict] * (theirs.first - first), *theirs.openers]
    )


def run_and_record(sides: Sequence[Dump | Path | str], options: Mapping[str, Any]) -> tuple[Dump, Dump] | None:
    """Open an ETDump beside the ETRecord of its program: which tensors they share, only both of them tell."""
    if any(isinstance(side, Dump) for side in sides) or [format_of(s).name for s in sides] != ["etdump", "etrecord"]:  # type: ignore[arg-type]
        return None
    run, record = (Path(side) for side in sides)  # type: ignore[arg-type]
    return open_pair(run, record, options.get("debug_buffer"))


def opened(dump: Dump | Path | str, options: Mapping[str, Any]) -> Dump:
    """Open a path with the options that its format has; a dump passes through."""
    if isinstance(dump, Dump):
        return dump
    takes = format_of(dump).options
    return open_dump(dump, **{name: value for name, value in options.items() if name in takes})


def check_options(sides: Iterable[Dump | Path | str], options: Mapping[str, Any]) -> None:
    """Raise :class:`UsageError` for an option that is set and that neither side's format has, or that is one run's."""
    wanted = [name for name, value in options.items() if value is not None]
    if not wanted:
        return
    forms = [format_of(side) for side in sides if not isinstance(side, Dump)]
    known = {name for form in forms for name in form.options}
    for name in wanted:
        if name not in known:
            formats = " nor ".join(dict.fromkeys(form.name for form in forms))
            listed = ", ".join(sorted(known)) or "none"
            raise UsageError(f"a dump of format {formats} has no option {name!r} (options: {listed})")
    if "debug_buffer" in wanted and [form.name for form in forms] == ["etdump", "etdump"]:
        raise UsageError(
            "debug_buffer is given once for two ETDumps: give each a folder with its own, or open_dump() of each side"
        )


def no_match(pairs: DumpPairs, match: StepMatch) -> str:
    """Say in one line that no name is on both sides, and what would help."""
    ours, theirs = match.only_actual, match.only_expected
    if not (ours and theirs):
        empty = pairs.actual if not ours else pairs.expected
        ignored = len(empty.names(match.step))
        others = f" but the {ignored} that the name map ignores" if ignored else ""
        return f"{empty.path} holds no tensors{others}: there is nothing to compare"
    text = f"none of the {len(ours)} names of {pairs.actual.path} is among the {len(theirs)} of {pairs.expected.path}"
    return f"{text} (for example {ours[0]!r} against {theirs[0]!r}): give a name map"
