"""Names of tensors in a model (sites), globs over them (selectors), and where each one lives (provenance)."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ditto_core.errors import SelectorError
from ditto_core.system.files import parse_json
from ditto_core.visible import source_path

RAW_PREFIXES = ("fx:", "onnx:", "trt:")
ALL = "**"
"""Selects every site that a selector without a port or a space can."""
PORTS = "**:**"
"""Selects every port of a site: inputs, further outputs and what the model's code names."""
OPERATORS = "**:** **"
"""Selects the operators of the model's own code, ``model.forward:42 interpolate``; selectors without a space do not."""


@dataclass(frozen=True)
class Tap:
    """One observable tensor.

    ``site`` is the canonical name, ``value`` the name of the ONNX value (a backend translates it to its own),
    ``fx_node`` the node of the exported program, ``axes`` one name per dimension: ``batch``, ``length`` (new tokens),
    ``past``, ``total`` (past + new), ``tokens`` (batch x length in one), ``head``, or an empty string. ``dtype`` is
    torch's name without the prefix. ``aliases`` are further sites that are the very same tensor. ``choice``: the tensor
    holds a router's scores, of which so many are chosen.
    """

    site: str
    value: str
    fx_node: str = ""
    module_class: str = ""
    source: str = ""
    dtype: str = ""
    axes: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    choice: int = 0

    def to_json(self) -> dict[str, object]:
        """Return a JSON-ready dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Tap:
        """Inverse of :meth:`to_json`. Raises ``TypeError`` for what is no tap."""
        fields = dict(data)
        for name in ("axes", "aliases"):
            fields[name] = tuple(fields.get(name, ()))  # type: ignore[arg-type]
        for name, value in fields.items():
            kind: type = int if name == "choice" else str
            if not all(isinstance(item, kind) for item in (value if isinstance(value, tuple) else (value,))):
                raise TypeError(f"{name} of a tap is {value!r}, expected {'a number' if kind is int else 'names'}")
        return cls(**fields)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Provenance:
    """Every site of an export, in topological order, and the modules that have no tensor of their own.

    ``branched``: the model has a ``torch.cond``; those that run inside a branch are among them.
    """

    taps: tuple[Tap, ...]
    unmapped: tuple[str, ...] = ()
    branched: bool = False

    def __post_init__(self) -> None:
        index = {name: i for i, tap in enumerate(self.taps) for name in (tap.site, *tap.aliases)}
        object.__setattr__(self, "_index", index)

    @property
    def sites(self) -> tuple[str, ...]:
        """All site names, aliases included, in topological order."""
        return tuple(self._index)  # type: ignore[attr-defined]

    def order(self, site: str) -> int:
        """Return the topological position of a site; unknown sites sort last."""
        return int(self._index.get(site, len(self.taps)))  # type: ignore[attr-defined]

    def find(self, site: str) -> Tap | None:
        """Return the tap that holds ``site`` (by its name or an alias), or None."""
        i = self._index.get(site)  # type: ignore[attr-defined]
        return None if i is None else self.taps[i]

    def select(self, selectors: Iterable[str]) -> list[Tap]:
        """Return the taps whose name or alias matches any selector, in topological order.

        A tap that is reached through an alias is returned under that alias. Raises :class:`SelectorError`, with the
        closest sites, when a selector matches nothing; one of all sites, ports or operators may: a model can have none.
        """
        chosen: dict[int, str] = {}
        for selector in selectors:
            hits = [site for site in self.sites if matches(selector, site)]
            if not hits and selector not in (ALL, PORTS, OPERATORS):
                why = self._untapped(path for path in self.unmapped if matches(selector, path))
                raise SelectorError(f"{no_match(selector, self.sites, why)}; `ditto sites MODEL` lists them")
            for site in hits:
                index = self.order(site)
                current = chosen.get(index)
                if current is None or site == self.taps[index].site:
                    chosen[index] = site
        return [rename(self.taps[i], site) for i, site in sorted(chosen.items())]

    @property
    def notes(self) -> tuple[str, ...]:
        """What to say where every site is compared: modules inside a branch have none. The outermost stand for all."""
        hidden = [path for path in self.unmapped if not any(site.startswith(f"{path}.") for site in self.sites)]
        said = self._untapped(path for path in hidden if not any(path.startswith(f"{other}.") for other in hidden))
        return (f"not compared: {said}",) if said and self.branched else ()

    def _untapped(self, modules: Iterable[str]) -> str:
        """Say why some of the modules without a tensor have none; nothing of no modules."""
        named = ", ".join(modules)
        why = "inside a branch of torch.cond, which shows only what it returns, or not called"
        return f"{named} ({why if self.branched else 'no tensor in the graph'})" if named else ""

    def save(self, path: Path) -> None:
        """Write as JSON."""
        taps = [t.to_json() for t in self.taps]
        data = {"taps": taps, "unmapped": list(self.unmapped), "branched": self.branched}
        path.write_text(json.dumps(data, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Provenance:
        """Inverse of :meth:`save`."""
        data = parse_json(path.read_text())
        taps = tuple(Tap.from_json(t) for t in data["taps"])
        return cls(taps, tuple(data["unmapped"]), data.get("branched") is True)


def rename(tap: Tap, site: str) -> Tap:
    """Return ``tap`` under one of its aliases."""
    if site == tap.site:
        return tap
    others = tuple(a for a in (tap.site, *tap.aliases) if a != site)
    return Tap(**{**tap.__dict__, "site": site, "aliases": others})


def final_site(name: str, taken: Mapping[str, Tap]) -> str:
    """Return the site of a final output that no module returned: its name, unless a module is called like that.

    ``taken`` are the taps by site, with those of final outputs or without.
    """
    return f"output:{name}" if name in taken and taken[name].value != name else name


def pattern(selector: str) -> re.Pattern[str]:
    """Compile a selector: ``*`` matches one path component, ``**`` any number, ``?`` one character, ``[03]`` a set.

    Without a port (``:in``, ``:q_rope``, ``:*``) only default ports match. Raises :class:`SelectorError` for a set that
    is none.
    """
    out, i = "", 0
    while i < len(selector):
        char = selector[i]
        if selector.startswith("**", i):
            out, i = out + "[^:]*", i + 2
            continue
        if char == "[" and "]" in selector[i:]:
            end = selector.index("]", i)
            out, i = out + selector[i : end + 1].replace("[!", "[^"), end + 1
            continue
        out += {"*": "[^.:]*", "?": "[^.:]"}.get(char, re.escape(char))
        i += 1
    try:
        return re.compile(out)
    except re.error as error:
        raise SelectorError(f"selector {selector!r} is malformed: {error}") from error


def matches(selector: str, site: str) -> bool:
    """Tell whether a selector matches a site. A name matches itself, whatever is in it: ``past[0].key``.

    An operator of the model's own code is matched by selectors with a space only: it is a tap on request.
    """
    if selector != site and is_operator(site) and " " not in selector:
        return False
    return selector == site or pattern(selector).fullmatch(site) is not None


def is_operator(site: str) -> bool:
    """Tell whether a site is an operator of the model's own code: module, function, line and operator."""
    return re.search(r":\d+ \S+$", site) is not None


def no_match(selector: str, sites: Sequence[str], untapped: str = "") -> str:
    """Build the one-line message for a selector that matches nothing, or what is ``untapped``."""
    close = difflib.get_close_matches(selector, sites, n=3, cutoff=0.3)
    which = f"; it matches {untapped}" if untapped else ""
    return f"selector {selector!r} matches none of {len(sites)} sites{which}; closest: {', '.join(close) or 'none'}"


def source_line(stack_trace: str) -> str:
    """Return ``file:line in function: code`` of the innermost frame that belongs to the model."""
    lines = stack_trace.splitlines()
    frames = [(i, line.strip()) for i, line in enumerate(lines) if line.strip().startswith("File ")]
    own = str(Path(__file__).parent)
    foreign = ("/torch/", "<eval_with_key>", own)
    chosen = [(i, f) for i, f in frames if not any(part in f for part in foreign)] or frames
    if not chosen:
        return ""
    i, frame = chosen[-1]
    path, line, function = (part.strip() for part in frame.removeprefix("File ").split(",", 2))
    code = lines[i + 1].strip() if i + 1 < len(lines) else ""
    shown = source_path(path.strip('"'))
    return f"{shown}:{line.removeprefix('line ')} {function}: {code}"
