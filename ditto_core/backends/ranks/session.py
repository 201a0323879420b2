"""Several ranks as one session: all are asked at once, their tensors are joined."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from ditto_core.backends.child import TIMEOUT, Packed, ignore, pack, unpack
from ditto_core.backends.ranks.joining import disagreements, split_axes
from ditto_core.backends.ranks.rank import Seat
from ditto_core.errors import RunError
from ditto_core.model.examples import token_inputs
from ditto_core.session import SessionInfo, TapSink
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec
from ditto_core.system.worker import Worker

GRACE = 2.0
"""Seconds in which the ranks beside one that failed may tell of themselves."""

Part = tuple[bool, str, Packed]


class RanksSession:
    """Steps ``ranks`` child processes; implements :class:`~ditto_core.session.Session`.

    ``shapes``: those of taps and final outputs in the model for :func:`~ditto_core.model.examples.token_inputs`. The
    ranks run these first: ``axes`` are what their tensors are split along; others are the same on all ranks. Of one
    that is not, rank 0's tensor is delivered; of one that does not make up the model's, none.
    """

    def __init__(
        self,
        spec: EngineSpec,
        model: Path,
        taps: tuple[Tap, ...],
        ranks: int,
        shapes: Mapping[str, Sequence[int]],
        info: SessionInfo,
    ) -> None:
        self.taps, self.info = taps, info
        self._found: dict[str, str] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="ditto-ranks-")
        store = str(Path(self._folder.name) / "store")
        self._workers = [
            Worker("ditto_core.backends.ranks.rank:Rank", f"rank {rank} of the torch-tp engine", timeout=TIMEOUT)
            for rank in range(ranks)
        ]
        self._ask([("join", Seat(rank, ranks, store), spec, model, taps) for rank in range(ranks)])
        self.start(len(token_inputs()["input_ids"]))
        shown, outputs = self._shares(token_inputs())
        self.axes, self._refused = split_axes(shapes, {**shown, **outputs})

    @property
    def disagreements(self) -> Mapping[str, str]:
        """The sites whose tensor every rank should hold and one does not, since the sequence began, and those that
        cannot be joined."""
        return {**self._refused, **self._found}

    def start(self, batch: int) -> None:
        """Begin a new sequence on every rank."""
        self._found.clear()
        self._ask([("start", batch)] * len(self._workers))

    def step(self, inputs: Mapping[str, torch.Tensor], sink: TapSink) -> dict[str, torch.Tensor]:
        """Run one forward pass on all ranks; see :class:`~ditto_core.session.Session`.

        Raises :class:`RunError` when one of them fails or does not compute what the others do.
        """
        taps, outputs = self._shares(inputs)
        for site in [site for site in taps if site not in self._refused]:
            sink(site, self._joined(site, taps.pop(site)))
        return {name: self._joined(name, parts) for name, parts in outputs.items()}

    def _shares(
        self, inputs: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, list[torch.Tensor]], dict[str, list[torch.Tensor]]]:
        """Run one forward pass; return what each rank holds of every tap and final output."""
        given = {name: pack(tensor) for name, tensor in inputs.items()}
        found: list[dict[tuple[bool, str], torch.Tensor]] = [{} for _ in self._workers]

        def taker(rank: int) -> Callable[[Part], None]:
            return lambda part: found[rank].update({part[:2]: unpack(part[2])})

        self._ask([("step", given)] * len(self._workers), [taker(rank) for rank in range(len(self._workers))])
        for rank, own in enumerate(found):
            if odd := sorted(found[0].keys() ^ own.keys()):
                raise RunError(f"ranks 0 and {rank} do not compute the same tensors: only one has {odd[0][1]!r}")
        taps, outputs = (
            {name: [own.pop((kind, name)) for own in found] for is_tap, name in list(found[0]) if is_tap is kind}
            for kind in (True, False)
        )
        return taps, outputs

    def _joined(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if name in self.axes:
            return torch.cat(list(parts), self.axes[name])
        if name not in self._found:
            for each in disagreements(name, {f"rank {rank}": part for rank, part in enumerate(parts)}):
                self._found.setdefault(name, str(each))
        return parts[0]

    def _ask(self, questions: Sequence[Any], take: Sequence[Callable[[Any], None]] = ()) -> None:
        """Ask all ranks at once. When one fails the others wait for it in vain, so all are ended."""
        if not all(worker.alive for worker in self._workers):
            raise RunError("a rank's process has ended, its KV cache with it; open the engine again")
        takers = take or [ignore] * len(self._workers)
        with ThreadPoolExecutor(len(self._workers)) as pool:
            asked = [
                pool.submit(worker.ask, question, taker)
                for worker, question, taker in zip(self._workers, questions, takers, strict=True)
            ]
            if failed := self._first_failure(asked):
                for worker in self._workers:
                    worker.kill()
        if failed is not None:
            self.close()
            raise failed

    def _first_failure(self, asked: Sequence[Future[None]]) -> BaseException | None:
        """Wait for all ranks to answer, or for one to fail, and return the failure that is the cause of the others."""
        first = next(filter(None, (each.exception() for each in wait(asked, return_when=FIRST_EXCEPTION).done)), None)
        if first is None:
            return None
        wait(asked, GRACE)  # one that lost its peer may say so before it is known that the peer has died
        ends = zip(self._workers, asked, strict=True)
        died = [each.exception() for worker, each in ends if each.done() and not worker.alive]
        return next(filter(None, died), first)

    def close(self) -> None:
        """End all ranks."""
        for worker in self._workers:
            worker.close()
        self._folder.cleanup()
