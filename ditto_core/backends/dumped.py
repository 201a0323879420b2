"""Another tool's dump as a session: its tensors under this library's sites, in this library's layout, step by step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from ditto_core.backends.packing import new_tokens, to_rows
from ditto_core.backends.recorded import differs
from ditto_core.dumps import Dump, open_dump
from ditto_core.dumps.namemap import Entry, NameMap, check_rules
from ditto_core.errors import RunError, TraceError, UsageError
from ditto_core.session import SessionInfo, TapSink
from ditto_core.sites import Tap

LOGITS = "logits"
TOKENS = "input_ids"
NAMES_FILES = ("names.json", "names.toml")
PADDED_ON_THE_RIGHT = ("trtllm",)
"""Formats whose padded tensors have their padding on the right."""


class DumpSession:
    """Implements :class:`~ditto_core.backends.base.Session` over a :class:`~ditto_core.dumps.Dump`.

    A name of the dump means the tap that has it as its site, alias or value, after ``name_map``. Tensors of taps with
    axes ``batch, length`` may be packed [tokens, …] or padded on either side. A final output, one of ``outputs``, is
    what the dump calls so, or the site that is that output; others it has none. Where the dump also has inputs of the
    model, a step on others is refused. ``absent`` are the taps that it never had: what another tool dumped is compared,
    and what it did not dump is said.
    """

    def __init__(
        self, dump: Dump, taps: tuple[Tap, ...], name_map: NameMap, outputs: Collection[str] = (LOGITS,)
    ) -> None:
        self._dump = dump
        self._names = name_map
        self._finals = frozenset(outputs)
        self._side = side(dump, name_map)
        self._by_name = {name: tap for tap in reversed(taps) for name in (tap.value, *tap.aliases, tap.site)}
        self._next = 0
        known = self._entries(0)
        self.taps = tuple(tap for tap in taps if tap.site in known)
        self.absent = frozenset(tap.site for tap in taps) - known.keys()
        if not known:
            raise TraceError(self._no_name(taps))
        dtype = str(self._load(next(iter(known.values()))).dtype).removeprefix("torch.")
        facts = dict(dump.info)
        label, model = f"{dump.format} dump", dump.path.name
        self.info = SessionInfo(label, dump.format, dtype, model=model, facts=facts, recorded=True)

    def start(self, batch: int) -> None:
        """Go back to step 0."""
        self._next = 0

    def step(self, inputs: Mapping[str, torch.Tensor], sink: TapSink) -> dict[str, torch.Tensor]:
        """Replay the next step. Raises :class:`RunError` after the last one, or when ``inputs`` are not the dump's."""
        if self._next >= self._dump.steps:
            raise RunError(f"{self._dump.path} ends after {self._dump.steps} steps, step {self._next} was asked for")
        self._check_inputs(inputs)
        outputs = {}
        for site, entry in self._entries(self._next).items():
            tap = self._by_name.get(site)
            named = tap.value if tap else site
            axes = ("batch", "length", "") if named == LOGITS else ()
            tensor = self._rows(self._load(entry), inputs, tap.axes if tap else axes)
            if tap is not None:
                sink(tap.site, tensor)
            if named == LOGITS:
                self._check_rows(tensor, inputs)
            if named in self._finals:
                outputs[named] = tensor
        self._next += 1
        return outputs

    def close(self) -> None:
        """Nothing is held open."""

    def _entries(self, step: int) -> dict[str, Entry]:
        """Return what a step has: site (or ``logits``) -> entry, in the taps' topological order.

        Raises :class:`TraceError` when two different tensors are one tap, and when the step has no tensors.
        """
        found: dict[str, Entry] = {}
        names = self._dump.names(step)
        if not names:
            raise TraceError(f"{self._dump.path} holds nothing of step {step}")
        for name, entry in self._names.entries(names).items():
            bare = name.removeprefix("output:")  # as a step of a trace has it, without its manifest
            tap = self._by_name.get(name, self._by_name.get(bare))
            site = tap.site if tap else bare
            if site in found and not alike(self._load(found[site]), self._load(entry)):
                one, two = found[site].source, entry.source
                raise TraceError(f"{self._dump.path}: {one!r} and {two!r} are both {site}: ignore one in a name map")
            if tap or bare in self._finals:
                found[site] = entry
        return found

    def _load(self, entry: Entry) -> torch.Tensor:
        return entry.take(self._dump.load(self._next, entry.source))

    def _rows(self, tensor: torch.Tensor, inputs: Mapping[str, torch.Tensor], axes: tuple[str, ...]) -> torch.Tensor:
        if axes[:2] != ("batch", "length") or "attention_mask" not in inputs:
            return tensor
        return to_rows(tensor, new_tokens(inputs["attention_mask"], inputs[TOKENS].shape[1]), self._side)

    def _check_inputs(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Refuse other inputs than the recorded ones; what goes with tokens may have another layout."""
        held = {name.removeprefix("input:"): name for name in self._dump.names(self._next)}
        known = held.keys() - self._by_name.keys() - self._finals
        for name in (name for name in inputs if name in known):
            recorded = self._dump.load(self._next, held[name])
            if name == TOKENS:
                problem = other_tokens(inputs, self._rows(recorded, inputs, ("batch", "length")))
            elif TOKENS in inputs and recorded.shape != inputs[name].shape:
                continue
            else:
                problem = differs(name, inputs[name], as_given(recorded, inputs[name]))
            if problem:
                raise RunError(f"{self._dump.path} was recorded on other inputs: step {self._next}, {problem}")

    def _check_rows(self, logits: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> None:
        """Refuse a run of another batch: the dump's logits choose the tokens of every row."""
        if TOKENS in inputs and logits.shape[:1] != inputs[TOKENS].shape[:1]:
            shape, rows = list(logits.shape), len(inputs[TOKENS])
            raise RunError(
                f"{self._dump.path} has logits of shape {shape}, expected {rows} rows, one a prompt of the run"
            )

    def _no_name(self, taps: tuple[Tap, ...]) -> str:
        names = self._dump.names(0)
        example = f" (for example {names[0]!r} against {taps[0].site!r})" if taps else ""
        return (
            f"none of the {len(names)} names of {self._dump.path} is among the {len(taps)} taps of the engine"
            f"{example}: give name_map="
        )


def open_dumped(
    path: Path, taps: tuple[Tap, ...], name_map: Any = None, outputs: Collection[str] = (LOGITS,)
) -> DumpSession:
    """Open a dump of any tool as the reference of an engine with ``taps`` and final ``outputs``.

    ``name_map`` is what :meth:`NameMap.of` takes; without one, ``names.json`` or ``names.toml`` in the dump's folder is
    read. Raises :class:`TraceError` when the dump or the map is damaged, or none or two of its names are a tap's, and
    :class:`UsageError` for a rule of ``name_map`` that is about no name of the dump, and for two maps in its folder.
    """
    names, dump = NameMap.of(names_file(path) if name_map is None else name_map), open_dump(path)
    if name_map is not None:
        check_rules(names, (dump,))
    return DumpSession(dump, taps, names, outputs)


def names_file(path: Path) -> Path | None:
    """Return the name map in a dump's folder. Raises :class:`UsageError` when there are two."""
    found = [path / name for name in NAMES_FILES if (path / name).is_file()]
    if len(found) > 1:
        raise UsageError(f"{path} holds {' and '.join(NAMES_FILES)}, expected one: remove one, or give name_map=")
    return found[0] if found else None


def side(dump: Dump, name_map: NameMap) -> str:
    """Return on which side a dump's tensors are padded: as the name map says, else as its tool does."""
    if name_map.padding is not None and not name_map.padding.mask:
        return name_map.padding.side
    return "right" if dump.format in PADDED_ON_THE_RIGHT else "left"


def as_given(recorded: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """Return a recorded input in the dtype of a given one: a float16 engine gets float16's numbers."""
    if not given.is_floating_point():
        return recorded if recorded.is_floating_point() else recorded.to(given.dtype)
    least, most = torch.finfo(given.dtype).min, torch.finfo(given.dtype).max
    return torch.where(recorded.isfinite(), recorded.clamp(least, most), recorded).to(given.dtype)


def other_tokens(inputs: Mapping[str, torch.Tensor], recorded: torch.Tensor) -> str:
    """Say in words where recorded tokens [batch, length] are not the given ones; what stands on padding is ignored."""
    given = inputs[TOKENS].cpu()
    recorded = recorded.cpu().to(given.dtype)
    if recorded.shape == given.shape and "attention_mask" in inputs:
        real = new_tokens(inputs["attention_mask"], given.shape[1]).cpu()
        given, recorded = given * real, recorded * real
    return differs(TOKENS, given, recorded)


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors hold the same numbers."""
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=0, atol=0, equal_nan=True)
