"""What two engines are made of, side by side: settings, borders, and the operators of each module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ditto_core.backends.base import EngineLayer, EngineTensor, Inspection
    from ditto_core.engines.engine import Engine

NOWHERE = "(no module)"


@dataclass(frozen=True)
class Change:
    """What one engine has in a place and the other has in its stead; ``before`` is the engine compared against.

    ``place`` is a module path, or the name of a setting, input or output. An empty text: nothing.
    """

    kind: str
    place: str
    before: str
    now: str


def differences(engine: Engine, inside: Inspection | None, other: Engine, theirs: Inspection | None) -> list[Change]:
    """Return how ``engine`` differs from ``other``: settings, versions, borders, then modules in topological order.

    Operators are counted by kind, dtypes of their outputs and the modules that are fused with them; kernels, which a
    builder chooses by timing, are left out.
    """
    found = [*changed("setting", settings(other), settings(engine))]
    if inside is None or theirs is None:
        return found
    for kind, before, now in (("input", theirs.inputs, inside.inputs), ("output", theirs.outputs, inside.outputs)):
        found += changed(kind, borders(before), borders(now))
    return [*found, *changed_modules(by_module(theirs.layers), by_module(inside.layers))]


def to_json(changes: Iterable[Change]) -> list[dict[str, str]]:
    """Return the changes as JSON-ready dictionaries."""
    return [asdict(change) for change in changes]


def settings(engine: Engine) -> dict[str, str]:
    """Return what decides the bits of an engine, flat; its outputs are listed elsewhere."""
    flat: dict[str, Any] = {**engine.spec.to_json(), **engine.versions}
    for name in ("model", "options", "profile"):
        flat |= {f"{name} {key}": value for key, value in flat.pop(name).items()}
    return {name: str(value) for name, value in flat.items() if name not in ("outputs", "aliases")}


def borders(tensors: Iterable[EngineTensor]) -> dict[str, str]:
    """Return dtype and shape of inputs or outputs by name."""
    return {tensor.name: f"{tensor.dtype} [{', '.join(map(str, tensor.shape))}]" for tensor in tensors}


def changed(kind: str, before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Change]:
    """Yield the entries that differ, the new side's order first."""
    for name in dict.fromkeys((*now, *before)):
        if before.get(name, "") != now.get(name, ""):
            yield Change(kind, name, before.get(name, ""), now.get(name, ""))


def by_module(layers: Iterable[EngineLayer]) -> dict[str, Counter[str]]:
    """Count the operators of each module. A layer of several modules counts in each, with the others that it holds."""
    found: dict[str, Counter[str]] = {}
    for layer in layers:
        for module in layer.modules or (NOWHERE,):
            others = [name for name in layer.modules if name != module]
            label = " ".join(filter(None, (layer.kind, "/".join(layer.dtypes))))
            label += f" fused with {', '.join(others)}" if others else ""
            found.setdefault(module, Counter())[label] += 1
    return found


def changed_modules(before: Mapping[str, Counter[str]], now: Mapping[str, Counter[str]]) -> Iterator[Change]:
    """Yield the modules that hold other operators, with what only one side has."""
    for module in dict.fromkeys((*now, *before)):
        ours, theirs = now.get(module, Counter()), before.get(module, Counter())
        if ours != theirs:
            yield Change("module", module, listed(theirs - ours), listed(ours - theirs))


def listed(operators: Counter[str]) -> str:
    """Write counted operators: ``2 x MatMul float16, Cast float32``."""
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in sorted(operators.items()))
