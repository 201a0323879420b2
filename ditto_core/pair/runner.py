"""Run both sides of a pair once, with what belongs to a run: tolerance, noise floor, traces, local errors, receipt."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditto_core.compare.judging import of_few
from ditto_core.compare.text import NOT_SHOWN
from ditto_core.compare.tolerance import LUCK, Tolerance
from ditto_core.errors import first_line
from ditto_core.session import LacksTaps, RunsRanks
from ditto_core.stepping.comparer import NOT_DELIVERED
from ditto_core.stepping.floor import BESIDE_TRACES, MAKING, Floor, lacks, read_floor, write_floor
from ditto_core.stepping.sides import Recorder, Sides, TapReader, recording
from ditto_core.system.fingerprint import fingerprint
from ditto_core.system.receipt import arithmetic, machine, make_receipt, packages
from ditto_core.system.threads import torch_threads
from ditto_core.version import __version__

if TYPE_CHECKING:
    from ditto_core.compare.comparison import Comparison
    from ditto_core.localize import Localizer
    from ditto_core.pair.localizing import NotLocalized
    from ditto_core.pair.pair_options import PairOptions
    from ditto_core.pair.sessions import Sessions
    from ditto_core.session import Session
    from ditto_core.system.receipt import Receipt

RunFn = Callable[[Sides, "Floor | None"], "tuple[Comparison, Floor]"]
"""Steps the sides, with a noise floor where one is known; returns the comparison and the floor."""


CHEAP = 5.0
"""Seconds that a run may have taken for it to be run again for the reasons of what could not be judged."""

SAMPLES = 6
"""Samples of the noise floor where one is exceeded. Where a single number decides a norm, 16 % of healthy results are
beyond four times one sample of the same error; benchmarks/vllm.md has those beyond six."""

HELD = 4 << 30
"""Bytes of tensors that may be held for a step's samples."""

CORRECTED = (
    "the cached engine was of another model: its digest did not show what changed; "
    "the model was exported and the engine built again, and this is the new engine's verdict"
)


class Runner:
    """Runs the sessions of a pair as its options say."""

    def __init__(self, sessions: Sessions, options: PairOptions) -> None:
        self._sessions, self._options = sessions, options
        self.tolerance = Tolerance.of(options.tolerance)

    def run(
        self, run_fn: RunFn, key: Any, *, localize: bool | None, reader: TapReader | None, dump: Path | None
    ) -> Comparison:
        """Run and compare. ``key`` tells the inputs apart whose noise floors are kept, ``dump`` is the run's folder.

        Before a failure stands, the engine's export is checked to be of this model; of another one, all runs again.
        """
        options = self._options
        self._check_tolerance()
        wanted = options.localize if localize is None else localize

        def once(samples: int) -> tuple[Comparison, Floor, Localizer | NotLocalized | None]:
            localizer = self._localizer() if wanted else None
            return *self._once(run_fn, key, localizer or reader, dump, samples), localizer

        samples = self._samples(key)
        start = time.perf_counter()
        comparison, measured, localizer = once(samples)
        seconds = time.perf_counter() - start
        notes: tuple[str, ...] = ()
        if not comparison and self._sessions.correct():
            comparison, measured, localizer = once(samples)
            notes = (CORRECTED,)
        if samples == 1 and self._may_be_luck(comparison):
            comparison, measured, localizer = once(SAMPLES)
        comparison = replace(comparison, notes=(*comparison.notes, *notes))
        if seconds <= CHEAP:
            comparison = self._conditioned(run_fn, comparison, measured)
        if localizer is not None:
            return self._localized(localizer, comparison)
        if not comparison and seconds <= options.localize_failed:
            return self._localized_again(run_fn, comparison, measured)
        return comparison

    def with_engine(self, run_fn: RunFn, key: Any, engine: Session, localizer: TapReader | None = None) -> Comparison:
        """Run with another session in the engine's place, judged by the noise floor that is kept for these inputs."""
        sessions = self._sessions
        floor = read_floor(self._floor_path(key, self._samples(key)), sessions.workspace.say)
        sides = Sides(engine, sessions.reference, localizer=localizer, axes=sessions.output_axes)
        with torch_threads(self._options.threads):
            return run_fn(sides, floor)[0]

    def _once(
        self,
        run_fn: RunFn,
        key: Any,
        localizer: TapReader | None,
        dump: Path | None,
        samples: int,
        *,
        anew: bool = False,
    ) -> tuple[Comparison, Floor]:
        """Run both sides; a noise floor of so many samples that is not known yet is measured and kept.

        One of a run that ended early, or did not compare a site at a step, is measured ``anew``.
        """
        sessions = self._sessions
        path = self._floor_path(key, samples)
        floor = None if anew else read_floor(path, sessions.workspace.say)
        low_precision = None if floor else sessions.low_precision
        sides = Sides(
            sessions.engine,
            sessions.reference,
            low_precision,
            sessions.untapped,
            localizer=localizer,
            axes=sessions.output_axes,
            samples=() if low_precision is None else sessions.samples(samples - 1),
        )
        with torch_threads(self._options.threads), recording(sides, self._writers(dump)):
            comparison, measured = run_fn(sides, floor)
        if floor and lacks(floor, comparison.results) and sessions.low_precision is not None:
            return self._once(run_fn, key, localizer, dump, samples, anew=True)
        if low_precision is not None:
            write_floor(path, measured)
        if dump is not None:
            write_floor(dump / BESIDE_TRACES, measured)
        comparison = self._settled(comparison)
        if samples > 1:
            note = f"noise floor: of {samples} runs in {sessions.spec.dtype}, each with other rounding"
            comparison = replace(comparison, notes=(*comparison.notes, note))
        return replace(comparison, dump=str(dump or ""), receipt=self._receipt()), measured

    def _may_be_luck(self, comparison: Comparison) -> bool:
        """Tell whether a single sample of the noise floor may be too small by chance where the comparison fails first:
        a fault further on does not make that site a bad one."""
        first = comparison.first_bad
        if first is None or first.floor is None or self._sessions.low_precision is None:
            return False
        size = sum(4 * r.metrics.count for r in comparison.results if r.step == 0)
        return (first.verdict.margin <= LUCK or of_few(first)) and size * SAMPLES <= HELD

    def _check_tolerance(self) -> None:
        """Raise :class:`~ditto_core.errors.SelectorError` for a rule that is about no site of this engine."""
        if not self.tolerance.rules:
            return
        engine = self._sessions.built
        taps = [name for tap in engine.taps for name in (tap.site, *tap.aliases)]
        finals = set(self._sessions.export.finals)
        logits = [name for tap in engine.taps if tap.value == "logits" for name in (tap.site, *tap.aliases)]
        self.tolerance.check([*taps, *engine.refused, *finals], ["logits", *logits] if engine.decoder else [])

    def _settled(self, comparison: Comparison) -> Comparison:
        """Turn sites that an engine of fused layers, or a reference's dump, is known to lack into notes."""
        engine, reference = self._sessions.built, self._sessions.reference
        missing = {**engine.refused, **comparison.missing}
        notes = (*comparison.notes, *engine.facts.get("notes", ()))
        if engine.partial:
            unseen = [site for site, why in missing.items() if site in engine.refused or why.startswith(NOT_DELIVERED)]
            notes = (*notes, *unshown(unseen, self._sessions.export.finals))
            missing = {site: why for site, why in missing.items() if site not in unseen}
        missing = {**missing, **engine.facts.get("wrong", {}), **disagreement(self._sessions.engine)}
        known = reference.absent if isinstance(reference, LacksTaps) else frozenset()
        if absent := [site for site in missing if site in known]:
            counts = f"{len(absent)} of {len(engine.taps)} sites"
            notes = (*notes, f"the reference's dump lacks {counts}: {names(absent)}")
            missing = {site: why for site, why in missing.items() if site not in absent}
        return replace(comparison, missing=missing, notes=notes)

    def _conditioned(self, run_fn: RunFn, comparison: Comparison, floor: Floor) -> Comparison:
        """Run once more for the conditioning of sites where the reference's own error is too large to judge by.

        It is that of the first step.
        """
        from ditto_core.backends.eager import EagerSession

        reference = self._sessions.reference
        sites = {r.site for r in comparison.inconclusive if r.step == 0 and r.floor and math.isfinite(r.floor)}
        if not sites or not isinstance(reference, EagerSession):
            return comparison
        with torch_threads(self._options.threads), reference.conditioning(sites) as found:
            run_fn(Sides(self._sessions.engine, reference), floor)
        known = {(0, site): value for site, value in found.items()}
        results = tuple(replace(r, conditioning=known.get((r.step, r.site))) for r in comparison.results)
        return replace(comparison, results=results).judged(comparison.tolerance)

    def _localized_again(self, run_fn: RunFn, failed: Comparison, floor: Floor) -> Comparison:
        """Run once more for the local errors; a model that cannot be replayed on the engine's tensors only says so."""
        try:
            failed = self._localized_in(self._sessions, run_fn, failed, floor)
            return self._among_operators(run_fn, failed)
        except Exception as error:  # noqa: BLE001 - the verdict stands, whatever an explanation of it does
            return replace(failed, notes=(*failed.notes, f"not localized: {type(error).__name__}: {first_line(error)}"))

    def _localized_in(self, sessions: Sessions, run_fn: RunFn, failed: Comparison, floor: Floor | None) -> Comparison:
        """Run some sessions for the local errors alone."""
        from ditto_core.pair.localizing import localized, open_localizer

        localizer = open_localizer(sessions)
        with torch_threads(self._options.threads):
            run_fn(Sides(sessions.engine, sessions.reference, localizer=localizer), floor)
        return localized(sessions, localizer, failed)

    def _among_operators(self, run_fn: RunFn, failed: Comparison) -> Comparison:
        """Where lines of the model lie before the blamed site that no site shows, let another engine show them.

        It is built where the first one was built as fast as a run may take; else the lines are listed.
        """
        from ditto_core.pair.localizing import with_every_site
        from ditto_core.pair.sessions import Sessions

        sessions, first = self._sessions, failed.localization.first if failed.localization else None
        seconds = sessions.built.facts.get("build_seconds", math.inf)
        if first is None or not first.between or sessions.given or seconds > self._options.localize_failed:
            return failed
        spec = with_every_site(sessions, sessions.spec.dtype)
        if spec == sessions.spec:
            return failed
        finer = Sessions(sessions.workspace, spec, self._options, None)
        try:
            found = self._localized_in(finer, run_fn, failed, None)
        finally:
            finer.close()
        named = found.localization.first if found.localization else None
        return found if named and named.site != first.site else failed

    def _localizer(self) -> Localizer | NotLocalized:
        from ditto_core.pair.localizing import open_localizer

        return open_localizer(self._sessions)

    def _localized(self, localizer: Localizer | NotLocalized, comparison: Comparison) -> Comparison:
        from ditto_core.pair.localizing import localized

        return localized(self._sessions, localizer, comparison)

    def _receipt(self) -> Receipt:
        engine, digest = self._sessions.built, self._sessions.workspace.digest(self._sessions.spec.model)
        reference = self._sessions.reference.info
        facts = [reference.backend, reference.dtype, reference.device, dict(reference.facts)]
        return make_receipt(
            engine=engine.fingerprint,
            reference=fingerprint(digest, [*facts, self._sessions.spec.attention]),
            model=digest,
            versions=engine.versions,
            threads=self._options.threads,
        )

    def _samples(self, key: Any) -> int:
        """Return of how many samples the noise floor of these inputs is: more where one was too small before."""
        return SAMPLES if self._floor_path(key, SAMPLES).exists() else 1

    def _floor_path(self, key: Any, samples: int) -> Path:
        return self._sessions.workspace.floor_path(self._floor_key(key if samples == 1 else [key, samples]))

    def _floor_key(self, key: Any) -> str:
        import torch

        threads = self._options.threads or torch.get_num_threads()
        spec, reference = self._sessions.spec, self._sessions.reference.info
        facts = [reference.backend, reference.dtype, reference.device, dict(reference.facts)]
        model = [self._sessions.workspace.digest(spec.model), self._sessions.built.facts.get("export")]
        sites = [tap.site for tap in self._sessions.engine.taps]
        here = [__version__, MAKING, packages(), machine(), arithmetic(), threads]
        return fingerprint(model, here, facts, spec.dtype, spec.attention, sites, key)

    def _writers(self, folder: Path | None) -> tuple[Recorder, Recorder] | None:
        if folder is None:
            return None
        from ditto_core.trace import TraceWriter

        engine, reference, taps = self._sessions.engine, self._sessions.reference, self._sessions.engine.taps
        return (
            TraceWriter(folder / "engine", engine.info, taps),
            TraceWriter(folder / "reference", reference.info, taps),
        )


def unshown(sites: Sequence[str], finals: Collection[str]) -> Iterator[str]:
    """Yield what to say of sites that an engine of fused layers does not show; its outputs are named."""
    if outputs := [site for site in sites if site in finals]:
        yield f"{NOT_SHOWN}this engine has no output {', '.join(outputs)}"
    if sites:
        yield f"{NOT_SHOWN}{len(sites)} sites that this engine does not show at every step: {names(sites)}"


def disagreement(engine: Session) -> dict[str, str]:
    """Return the first site at which the ranks of an engine hold different tensors and should not, with the reason."""
    found = engine.disagreements if isinstance(engine, RunsRanks) else {}
    more = f"; so they do at {len(found) - 1} later sites" if len(found) > 1 else ""
    return {site: f"{why}{more}" for site, why in list(found.items())[:1]}


def names(sites: Sequence[str], most: int = 3) -> str:
    """List the first few sites."""
    return ", ".join(sites[:most]) + (" …" if len(sites) > most else "")
