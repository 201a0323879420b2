"""Name maps: how the names of a dump become the names that the other side uses.

A rule's pattern matches a whole name: ``{i}`` stands for one component (no dot, colon or slash), ``{rest:**}`` for any
number of them, and both can be used in the replacement. Names that no rule matches stay as they are; nothing is ever
matched by a part of a name or by position, and matching by suffix only happens where ``suffix`` says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ditto_core.dumps.base import Dump
from ditto_core.dumps.padding import Padding, whole_numbers
from ditto_core.errors import TraceError, UsageError, nearest
from ditto_core.system.files import parse_json, parse_toml, read_text, reading

_CAPTURE = re.compile(r"\{(\w+)(:\*\*)?\}")
_KEYS = ("names", "split", "suffix", "padding", "ignore")
_SPLIT_KEYS = ("from", "to", "sizes", "axis")


@dataclass(frozen=True)
class Rule:
    """``source`` becomes ``targets[0]``, or is cut along ``axis`` into all of them, in the ratio of ``sizes``.

    Raises :class:`UsageError` for a target with a capture that the source does not have, a ``*``, or sizes that do
    not fit the targets.
    """

    source: str
    targets: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    axis: int = -1

    def __post_init__(self) -> None:
        captures = {name for name, _deep in _CAPTURE.findall(self.source)}
        for target in self.targets:
            for name, _deep in _CAPTURE.findall(target):
                if name not in captures:
                    raise UsageError(f"name map: {target!r} uses {{{name}}}, which {self.source!r} does not capture")
        if "*" in _CAPTURE.sub("", self.source):
            raise UsageError(f"name map: {self.source!r} has a *, expected a capture: {{i}}, or {{rest:**}}")
        if len(self.targets) > 1 and (len(self.sizes) != len(self.targets) or min(self.sizes) < 1):
            raise UsageError(f"name map: {self.source!r} is cut into {len(self.targets)} names by sizes {self.sizes}")

    def match(self, name: str) -> list[str]:
        """Return what a name becomes, or an empty list when the rule is not about it."""
        found = self._pattern().fullmatch(name)
        if not found:
            return []
        return [_CAPTURE.sub(lambda m: found[f"c_{m[1]}"], target) for target in self.targets]

    def _pattern(self) -> re.Pattern[str]:
        out, end, seen = "", 0, set()
        for capture in _CAPTURE.finditer(self.source):
            name, deep = capture.groups()
            group = rf"(?P=c_{name})" if name in seen else rf"(?P<c_{name}>{'.+' if deep else '[^.:/]+'})"
            out += re.escape(self.source[end : capture.start()]) + group
            end = capture.end()
            seen.add(name)
        return re.compile(out + re.escape(self.source[end:]))


@dataclass(frozen=True)
class Entry:
    """One tensor under its mapped name: the tensor ``source`` of the dump, or the ``part``-th piece of it."""

    name: str
    source: str
    rule: Rule | None = None
    part: int = 0

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the piece of the source tensor. Raises :class:`TraceError` when the sizes do not divide its axis."""
        if self.rule is None or len(self.rule.targets) == 1:
            return tensor
        sizes, axis = self.rule.sizes, self.rule.axis
        if not -tensor.dim() <= axis < tensor.dim() or tensor.shape[axis] % sum(sizes):
            shape = list(tensor.shape)
            raise TraceError(f"{self.source!r} has shape {shape}: axis {axis} cannot be cut in the ratio {sizes}")
        unit = tensor.shape[axis] // sum(sizes)
        return tensor.narrow(axis, unit * sum(sizes[: self.part]), unit * sizes[self.part])


@dataclass(frozen=True)
class NameMap:
    """Rules, in order of precedence; ``padding`` tells which positions are real, ``suffix`` allows suffix matches.

    ``ignore`` are patterns of names that are no results, such as an engine's bookkeeping: they are left out.
    """

    rules: tuple[Rule, ...] = ()
    suffix: bool = False
    padding: Padding | None = None
    ignore: tuple[Rule, ...] = ()

    @classmethod
    def of(cls, source: NameMap | Mapping[str, str] | Iterable[tuple[str, str]] | Path | str | None) -> NameMap:
        """Wrap pairs ``pattern -> replacement`` or load a file; a map passes through, None is the empty map.

        Raises :class:`UsageError` for anything else.
        """
        if source is None:
            return cls()
        if isinstance(source, NameMap):
            return source
        if isinstance(source, str | Path):
            return cls.load(source)
        try:
            pairs = tuple(source.items() if isinstance(source, Mapping) else source)
            rules = tuple(Rule(text_of(a, "a pattern"), (text_of(b, repr(a)),)) for a, b in pairs)
        except (TypeError, ValueError) as error:
            raise UsageError(f"name map is {source!r}, expected a file, or names by pattern") from error
        return cls(rules)

    @classmethod
    def load(cls, path: Path | str) -> NameMap:
        """Read a ``.toml`` or ``.json`` file. Raises :class:`TraceError` when it is missing or not of the form."""
        path = Path(path)
        with reading(path):
            text = read_text(path)
            data = parse_toml(text) if path.suffix == ".toml" else parse_json(text)
            return cls.from_json(data)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> NameMap:
        """Build from the content of a file. Raises :class:`UsageError` for an unknown key."""
        known_keys(table_of(data, "the file"), _KEYS)
        splits = [split_rule(item) for item in list_of(data.get("split", []), "split")]
        names = [Rule(a, (text_of(b, repr(a)),)) for a, b in table_of(data.get("names", {}), "names").items()]
        padding = Padding.from_json(table_of(data["padding"], "padding")) if "padding" in data else None
        ignore = (text_of(item, "a pattern of ignore") for item in list_of(data.get("ignore", []), "ignore"))
        left_out = tuple(Rule(pattern, (pattern,)) for pattern in ignore)
        suffix = data.get("suffix", False)
        if not isinstance(suffix, bool):
            raise UsageError(f"name map: suffix is {suffix!r}, expected true or false")
        return cls((*splits, *names), suffix, padding, left_out)

    def entries(self, names: Sequence[str]) -> dict[str, Entry]:
        """Return mapped name -> entry, in the order of ``names``. The first rule that matches a name counts.

        Raises :class:`TraceError` when two names become the same.
        """
        found: dict[str, Entry] = {}
        kept = (name for name in names if not self.ignores(name))
        for entry in (e for name in kept for e in self._mapped(name)):
            if entry.name in found:
                one, two = found[entry.name].source, entry.source
                raise TraceError(f"name map: {one!r} and {two!r} both become {entry.name!r}")
            found[entry.name] = entry
        return found

    def ignores(self, name: str) -> bool:
        """Tell whether a name is left out."""
        return any(rule.match(name) for rule in self.ignore)

    def _mapped(self, name: str) -> list[Entry]:
        for rule in self.rules:
            if targets := rule.match(name):
                return [Entry(target, name, rule, part) for part, target in enumerate(targets)]
        return [Entry(name, name)]

    def unused(self, names: Iterable[str]) -> list[Rule]:
        """Return the rules that are about none of ``names``."""
        names = list(names)
        return [rule for rule in self.rules if not any(rule.match(name) for name in names)]


def check_rules(rules: NameMap, dumps: Sequence[Dump]) -> None:
    """Raise :class:`UsageError` for a rule that is about no name of any step of any dump."""
    if not rules.rules:
        return
    left = rules
    for dump in dumps:
        for step in range(dump.steps):
            unused = left.unused(dump.names(step))
            if not unused:
                return
            left = NameMap(tuple(unused))
    names = [name for dump in dumps for name in dump.names(0)]
    rule = left.rules[0].source
    sides = "either side" if len(dumps) > 1 else str(dumps[0].path)
    raise UsageError(f"name map: {rule!r} matches none of {len(names)} names on {sides}{nearest(rule, names)}")


def split_rule(item: Any) -> Rule:
    """Build a rule from an entry of ``split``. Raises :class:`UsageError`."""
    known_keys(table_of(item, "an entry of split"), _SPLIT_KEYS)
    for key in ("from", "to", "sizes"):
        if key not in item:
            raise UsageError(f"name map: an entry of split has no key {key!r}, expected from, to and sizes")
    targets = tuple(text_of(target, "a name in split's to") for target in list_of(item["to"], "split's to"))
    sizes = whole_numbers(item["sizes"], "split's sizes")
    return Rule(text_of(item["from"], "split's from"), targets, sizes, int(item.get("axis", -1)))


def table_of(value: Any, what: str) -> Mapping[str, Any]:
    """Return a value of a file that has to be a table. Raises :class:`UsageError`."""
    if not isinstance(value, Mapping):
        raise UsageError(f"name map: {what} is {value!r}, expected a table")
    return value


def list_of(value: Any, what: str) -> Sequence[Any]:
    """Return a value of a file that has to be a list. Raises :class:`UsageError`."""
    if not isinstance(value, list | tuple):
        raise UsageError(f"name map: {what} is {value!r}, expected a list")
    return value


def text_of(value: Any, what: str) -> str:
    """Return a value of a file that has to be a text. Raises :class:`UsageError`."""
    if not isinstance(value, str):
        raise UsageError(f"name map: {what} is {value!r}, expected a name")
    return value


def known_keys(data: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise :class:`UsageError` for a key that is not known."""
    for key in data:
        if key not in known:
            raise UsageError(f"name map: unknown key {key!r}{nearest(key, known)} (known: {', '.join(known)})")


def suffix_pairs(left: Sequence[str], right: Sequence[str]) -> dict[str, str]:
    """Pair names of which one ends with the other, at a dot or slash; a pair must be the only choice on both sides.

    Returns left -> right. Raises :class:`TraceError` when a name has several partners.
    """
    by_last: dict[str, list[str]] = {}
    for b in right:
        by_last.setdefault(last_component(b), []).append(b)
    choices = {a: [b for b in by_last.get(last_component(a), ()) if ends_with(a, b) or ends_with(b, a)] for a in left}
    taken: dict[str, str] = {}
    for a, partners in choices.items():
        if len(partners) > 1:
            raise TraceError(
                f"{a!r} matches {len(partners)} names by suffix ({', '.join(partners[:3])}): use a name map"
            )
        for b in partners:
            if b in taken:
                raise TraceError(f"{taken[b]!r} and {a!r} both match {b!r} by suffix: use a name map")
            taken[b] = a
    return {a: b for b, a in taken.items()}


def ends_with(long: str, short: str) -> bool:
    """Tell whether ``short`` is made of the last components of ``long``."""
    return long.endswith((f".{short}", f"/{short}"))


def last_component(name: str) -> str:
    """Return what follows the last dot or slash."""
    return re.split(r"[./]", name)[-1]
