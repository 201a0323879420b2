"""Writing a trace: each step atomically, with one tensor in memory at a time."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch

from ditto_core.errors import TraceError, nearest
from ditto_core.session import SessionInfo
from ditto_core.sites import Tap
from ditto_core.system.atomic import temporary_name
from ditto_core.system.files import digest, replace_text, writing
from ditto_core.trace.manifest import MANIFEST, Manifest, StepMeta, TensorMeta
from ditto_core.trace.streamfile import SafetensorsStream, short
from ditto_core.trace.summary import COLUMNS, describe

_TEMPORARY = re.compile(r"\.(manifest\.json|step\d+\.(safetensors|txt))\.\d+\.tmp")
_OWN = re.compile(r"manifest\.json|step\d+\.(safetensors|txt)|" + _TEMPORARY.pattern)


class TraceWriter:
    """Writes a trace into ``directory``, which must be new, empty, or an older trace (that is then replaced).

    Each step appears as a whole or not at all, and the manifest is rewritten after each, so that a killed run leaves
    a readable trace of the steps that were complete. Raises :class:`TraceError` when the directory holds something
    else, cannot be written, or the disk is full. As a context manager it closes the trace unless an error came up.
    """

    def __init__(
        self, directory: Path | str, info: SessionInfo, taps: Sequence[Tap], *, prompts: Sequence[str] = ()
    ) -> None:
        self.directory = Path(directory)
        self._manifest = Manifest(info, tuple(taps), prompts=tuple(prompts))
        existed = self.directory.exists()
        try:
            with writing(self.directory):
                old = prepare(self.directory)
                self._publish(self._manifest)
                for path in old:
                    path.unlink()
        except TraceError:
            if not existed:
                with contextlib.suppress(OSError):
                    self.directory.rmdir()
            raise

    @contextlib.contextmanager
    def step(self, inputs: Mapping[str, torch.Tensor]) -> Iterator[StepWriter]:
        """Write one step as it runs, holding one tensor at a time::

            with writer.step(inputs) as step:
                step.finish(session.step(inputs, step.tap))

        A step that is left by an exception, or without ``finish``, is not recorded.
        """
        index = len(self._manifest.steps)
        step = StepWriter(self.directory, index, tuple(t.site for t in self._manifest.taps))
        try:
            for name, tensor in inputs.items():
                step.add("input", name, tensor)
            yield step
            if step.finished:
                self._commit(step)
        finally:
            step.discard()

    def write_step(
        self,
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
        taps: Mapping[str, torch.Tensor],
        tokens: Sequence[int] = (),
    ) -> None:
        """Write one step from tensors that are all at hand. ``tokens`` are those that it generated, one a row."""
        with self.step(inputs) as step:
            for site, tensor in taps.items():
                step.tap(site, tensor)
            step.finish(outputs, tokens)

    def close(self, texts: Sequence[str] = ()) -> None:
        """Mark the trace as complete. ``texts`` is what each row generated, in words."""
        with writing(self.directory / MANIFEST):
            self._publish(replace(self._manifest, complete=True, texts=tuple(texts)))

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        if kind is None and not self._manifest.complete:
            self.close()

    def _commit(self, step: StepWriter) -> None:
        paths = (step.path, step.text_path)
        try:
            with writing(step.path):
                meta = step.publish()
                self._publish(replace(self._manifest, steps=(*self._manifest.steps, meta)))
        except TraceError:
            for path in paths:
                path.unlink(missing_ok=True)
            raise

    def _publish(self, manifest: Manifest) -> None:
        replace_text(self.directory / MANIFEST, manifest.dumps())
        self._manifest = manifest


class StepWriter:
    """Writes the tensors of one step. :meth:`tap` is a sink as ``Session.step`` takes it."""

    def __init__(self, directory: Path, index: int, sites: tuple[str, ...]) -> None:
        self.path = directory / f"step{index}.safetensors"
        self.text_path = directory / f"step{index}.txt"
        self.finished = False
        self._index = index
        self._sites = sites
        self._tensors: list[TensorMeta] = []
        self._lines: list[str] = []
        self._tokens: tuple[int, ...] = ()
        self._temporary = temporary_name(self.path)
        with writing(self.path):
            self._stream = SafetensorsStream(self._temporary, sites)

    def add(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        """Append a tensor of any device and strides. ``kind`` is ``input``, ``tap`` or ``output``."""
        meta = TensorMeta(kind, name, short(tensor.dtype), tuple(tensor.shape))
        host = tensor.detach().cpu().contiguous()
        with writing(self.path):
            self._stream.add(meta.key, host)
        self._tensors.append(meta)
        self._lines.append(describe(host))

    def tap(self, site: str, tensor: torch.Tensor) -> None:
        """Append a tap. Raises :class:`TraceError` for a site that the writer was not told of."""
        if site not in self._sites:
            raise TraceError(
                f"tap {site!r} is not among the {len(self._sites)} of this trace{nearest(site, self._sites)}"
            )
        self.add("tap", site, tensor)

    def finish(self, outputs: Mapping[str, torch.Tensor], tokens: Sequence[int] = ()) -> None:
        """Append the outputs; ``tokens`` are those that the step generated, one a row."""
        for name, tensor in outputs.items():
            self.add("output", name, tensor)
        self._tokens = tuple(int(t) for t in tokens)
        self.finished = True

    def publish(self) -> StepMeta:
        """Rename the files to their final names, and return their manifest entries. Raises ``OSError``."""
        self._stream.close()
        sha256, size = digest(self._temporary), self._temporary.stat().st_size
        replace_text(self.text_path, self._summary())
        self._temporary.replace(self.path)
        return StepMeta(self._index, self.path.name, size, sha256, tuple(self._tensors), self._tokens)

    def discard(self) -> None:
        """Remove what was written under a temporary name; nothing after :meth:`publish`."""
        self._stream.discard()

    def _summary(self) -> str:
        width = max((len(t.key) for t in self._tensors), default=0)
        phase = "prefill" if self._index == 0 else "decode"
        rows = (f"{t.key:<{width}} {line}\n" for t, line in zip(self._tensors, self._lines, strict=True))
        return f"# step {self._index} ({phase})\n{'# name':<{width}} {COLUMNS}\n{''.join(rows)}"


def prepare(directory: Path) -> list[Path]:
    """Make ``directory`` ready for a new trace, and return the files of the old one that it holds.

    Raises ``OSError``, or :class:`TraceError` when there is anything that no trace consists of.
    """
    directory.mkdir(parents=True, exist_ok=True)
    present = sorted(directory.iterdir())
    known = _OWN if (directory / MANIFEST).exists() else _TEMPORARY
    foreign = [p.name for p in present if not known.fullmatch(p.name)]
    if foreign:
        raise TraceError(
            f"{directory} is not empty and not a trace (it holds {foreign[0]!r}): choose another directory"
        )
    if known is _OWN:
        Manifest.load(directory)
    return [p for p in present if p.name != MANIFEST]
