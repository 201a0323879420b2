"""An engine and its reference, ready to generate: what the ``ditto`` fixture is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ditto_core.compare.tolerance import Tolerance
from ditto_core.engines.engine import Engine
from ditto_core.engines.workspace import Workspace, torch_threads
from ditto_core.errors import DittoError, UsageError
from ditto_core.pair.inputs import rounded
from ditto_core.pair.options import PairOptions
from ditto_core.pair.sessions import PairSessions
from ditto_core.stepping.floor import Floor, read_floor, write_floor
from ditto_core.stepping.lockstep import Sides, TapReader, lockstep, recording, single_step
from ditto_core.stepping.prompts import Prompt, TokenBatch, encode
from ditto_core.system.fingerprint import fingerprint

if TYPE_CHECKING:
    from ditto_core.compare.blame import Localization
    from ditto_core.compare.comparison import Comparison
    from ditto_core.graphs.segments import Graph
    from ditto_core.localize import Localizer
    from ditto_core.repro.repro import Fed, Repro
    from ditto_core.spec import EngineSpec
    from ditto_core.system.receipt import Receipt


class Pair(PairSessions):
    """An engine beside its reference. ``engine`` is one that is built already; else the workspace builds ``spec``'s."""

    def __init__(
        self, workspace: Workspace, spec: EngineSpec, options: PairOptions | None = None, engine: Engine | None = None
    ) -> None:
        super().__init__(workspace, spec, options or PairOptions(), engine)
        self._tolerance = Tolerance.of(self.options.tolerance)
        self.on_step: Callable[[int], None] | None = None
        self.reader: TapReader | None = None
        self.comparisons: list[Comparison] = []
        self._fed: Fed | None = None

    def __repr__(self) -> str:
        return f"<Pair {self.spec.model.label} {self.spec.label} against {self.options.reference}>"

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = 10,
        forced: bool = True,
        localize: bool | None = None,
    ) -> Comparison:
        """Generate greedily on both sides in lockstep and compare every tap at every step.

        ``prompts``: one text or list of token ids, or several (left-padded into one batch). The prefill yields the
        first new token, so the run has ``max_new_tokens`` steps. ``forced``: the engine gets the reference's tokens.
        ``localize``: also measure the error that each tapped site adds by itself, and name causes (default: what the
        pair's options say).
        Raises :class:`UsageError` for an empty prompt or a length beyond the engine's profile.
        """
        if max_new_tokens < 1:
            raise UsageError(f"max_new_tokens is {max_new_tokens}, expected at least 1")
        model = self.workspace.model(self.spec.model, self.spec.attention)
        if not self.engine_files.decoder:
            raise UsageError(f"{self.spec.model.label} is no decoder: call run(inputs) instead of generate(prompts)")
        batch = self.encode(prompts)
        self._check_profile(batch, max_new_tokens)
        self._fed = batch
        decode = (lambda ids: str(model.tokenizer.decode(ids))) if model.tokenizer is not None else None

        def go(sides: Sides, floor: Floor | None) -> tuple[Comparison, Floor]:
            return lockstep(
                sides,
                batch,
                steps=max_new_tokens,
                forced=forced,
                tolerance=self._tolerance,
                floor=floor,
                decode=decode,
                on_step=self.on_step,
            )

        return self._run(go, [batch.input_ids.tolist(), batch.mask.tolist(), max_new_tokens], localize)

    def run(self, inputs: Mapping[str, torch.Tensor] | None = None, *, localize: bool | None = None) -> Comparison:
        """Compare one forward pass of a model that is no decoder, on its example inputs unless others are given."""
        model = self.workspace.model(self.spec.model, self.spec.attention)
        if self.engine_files.decoder:
            raise UsageError(f"{self.spec.model.label} is a decoder: call generate(prompts) instead of run(inputs)")
        given = inputs if inputs is not None else model.examples
        values = {name: torch.as_tensor(value) for name, value in given.items()}
        for name in values:
            if name not in model.examples:
                raise UsageError(f"{self.spec.model.label} has no input {name!r}, expected {', '.join(model.examples)}")
        self.workspace.export(self.spec).check(values)
        values = rounded(values, self.spec.dtype)
        self._fed = values
        key = {name: fingerprint(t.tolist()) for name, t in values.items()}

        def go(sides: Sides, floor: Floor | None) -> tuple[Comparison, Floor]:
            return single_step(sides, values, tolerance=self._tolerance, floor=floor)

        return self._run(go, key, localize)

    def localize(
        self,
        prompts: Prompt | Sequence[Prompt] | Mapping[str, torch.Tensor] | None = None,
        *,
        max_new_tokens: int = 4,
        fp32: bool = False,
        operators: bool = False,
    ) -> Comparison:
        """Run with every site tapped and measure the error that each adds by itself; see :mod:`ditto_core.localize`.

        The engine is built once more only when it does not show every site yet. ``fp32``: build it in float32, where
        faults show that hide below a narrow dtype's rounding. ``operators``: build once more with the inside of the
        first blamed site tapped, and name the operator. A model that is no decoder takes its inputs by name, or None
        for its examples. Returns the comparison; its ``localization`` is set.
        """
        from ditto_core.pair.localizing import localize_pair

        return localize_pair(self, prompts, max_new_tokens=max_new_tokens, fp32=fp32, operators=operators)

    @property
    def model_config(self) -> Any:
        """The model's own configuration, None where it has none."""
        return getattr(self.workspace.model(self.spec.model, self.spec.attention).module, "config", None)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, None where it has none."""
        return self.workspace.model(self.spec.model, self.spec.attention).tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model takes, 0 for a model without a vocabulary."""
        from ditto_core.model.wrappers import vocab_size

        return vocab_size(self.workspace.model(self.spec.model, self.spec.attention).module)

    def save_repro(self, site: str, directory: Path | str, *, step: int | None = None) -> Repro:
        """Write the operators of a site as the last run computed them, with real tensors and a test that fails alike.

        ``step`` defaults to the first at which the site failed, else 0. The engine runs once more up to there: a
        comparison keeps numbers only. Reports of the run link to the repro. See
        :func:`ditto_core.repro.repro.save_repro` for what is raised.
        """
        from ditto_core.repro.repro import find_tap, save_repro

        if self._fed is None or not self.comparisons:
            raise UsageError("nothing has run yet: call generate(prompts) or run() before save_repro(site, directory)")
        last = self.comparisons[-1]
        known = {tap.site: (tap.site, *tap.aliases) for tap in last.taps}  # a final output is no tap
        failed = (r.step for r in last.failures if site in known.get(r.site, (r.site,)))
        repro = save_repro(
            self.engine_files,
            self.engine,
            self.workspace.export(self.spec),
            self.workspace.model(self.spec.model, self.spec.attention),
            self._fed,
            site=site,
            directory=directory,
            step=next(failed, 0) if step is None else step,
            tokens=torch.tensor([row.reference for row in last.tokens]) if last.tokens else None,
        )
        saved = {find_tap(self.engine_files, site).site: str(repro.directory)}
        self.comparisons[-1] = replace(last, repros={**last.repros, **saved})
        return repro

    def encode(self, prompts: Prompt | Sequence[Prompt]) -> TokenBatch:
        """Turn prompts into a left-padded batch of this model's tokens."""
        from ditto_core.model.wrappers import vocab_size

        model = self.workspace.model(self.spec.model, self.spec.attention)
        pad = getattr(getattr(model.module, "config", None), "pad_token_id", None) or 0
        return encode(prompts, tokenizer=model.tokenizer, vocab_size=vocab_size(model.module), pad=pad)

    def renewed(self, options: PairOptions) -> Pair:
        """Hand the built engine and the open sessions over to a pair with no comparisons yet; this one keeps none.

        ``options`` must ask for the same sessions (:meth:`PairOptions.same_sessions`).
        """
        heir = Pair(self.workspace, self.spec, options, self._built)
        self._hand_over(heir)
        return heir

    def _check_profile(self, batch: TokenBatch, steps: int) -> None:
        length = batch.input_ids.shape[1]
        self.spec.profile.check(batch.rows, length, 0)
        self.spec.profile.check(batch.rows, 1 if steps > 1 else length, length + steps - 2 if steps > 1 else 0)

    def _run(
        self, go: Callable[[Sides, Floor | None], tuple[Comparison, Floor]], key: Any, localize: bool | None
    ) -> Comparison:
        self._check_tolerance()
        path = self.workspace.floor_path(self._floor_key(key))
        floor = read_floor(path)
        noisy = None if floor else self.noisy
        wanted = self.options.localize if localize is None else localize
        localizer = self._localizer() if wanted else None
        sides = Sides(self.engine, self.reference, noisy, self.plain, localizer=localizer or self.reader)
        start = time.perf_counter()
        with torch_threads(self.options.threads), recording(sides, self._writers()):
            comparison, measured = go(sides, floor)
        seconds = time.perf_counter() - start
        if noisy is not None and not floor:
            write_floor(path, measured)
        missing = {**self.engine_files.refused, **comparison.missing}
        notes = comparison.notes
        if missing and self.engine_files.facts.get("partial"):
            notes = (*notes, f"{len(missing)} sites are fused away in this engine and were not compared at every step")
            missing = {}
        if absent := [site for site in missing if site in getattr(self.reference, "absent", ())]:
            counts = f"{len(absent)} of {len(self.engine.taps)} sites"
            notes = (*notes, f"the reference's dump lacks {counts}: {names(absent)}")
            missing = {site: why for site, why in missing.items() if site not in absent}
        dump = str(self._dump_folder()) if self.options.dump else ""
        comparison = replace(comparison, missing=missing, notes=notes, dump=dump)
        comparison = replace(comparison, receipt=self._receipt())
        if localizer is not None:
            comparison = replace(comparison, localization=self._conclude(localizer, comparison))
        elif not comparison and seconds <= self.options.localize_failed:
            comparison = self._localized_again(go, comparison, measured)
        self.comparisons.append(comparison)
        return comparison

    def _check_tolerance(self) -> None:
        """Raise :class:`~ditto_core.errors.SelectorError` for a rule that is about no site of this engine."""
        if not self._tolerance.rules:
            return
        engine = self.engine_files
        taps = [name for tap in engine.taps for name in (tap.site, *tap.aliases)]
        finals = set(self.workspace.export(self.spec).finals) - {tap.value for tap in engine.taps}
        logits = [name for tap in engine.taps if tap.value == "logits" for name in (tap.site, *tap.aliases)]
        self._tolerance.check([*taps, *engine.refused, *finals], ["logits", *logits] if engine.decoder else [])

    def _localized_again(
        self, go: Callable[[Sides, Floor | None], tuple[Comparison, Floor]], failed: Comparison, floor: Floor
    ) -> Comparison:
        """Run once more for the local errors; a model that cannot be replayed on the engine's tensors only says so."""
        try:
            localizer = self._localizer()
            with torch_threads(self.options.threads):
                go(Sides(self.engine, self.reference, localizer=localizer), floor)
            return replace(failed, localization=self._conclude(localizer, failed))
        except DittoError as error:
            return replace(failed, notes=(*failed.notes, f"not localized: {error}"))

    def _localizer(self) -> Localizer:
        from ditto_core.localize import Localizer
        from ditto_core.localize.kernels import CoarseKernels

        model = self.workspace.model(self.spec.model, self.spec.attention)
        kernels = CoarseKernels(self.engine, self.engine.taps, self._graph)
        taps = (*self.engine.taps, *self.workspace.export(self.spec).behind(self.engine.taps))
        return Localizer(model, taps, self.spec.dtype, kernels=kernels)

    def _graph(self) -> Graph | None:
        from ditto_core.graphs.segments import Graph

        path = self.workspace.export(self.spec).onnx_path
        return Graph(path) if path.exists() else None

    def _conclude(self, localizer: Localizer, comparison: Comparison) -> Localization:
        from ditto_core.localize import conclude

        return conclude(localizer, comparison, self._graph())

    def _receipt(self) -> Receipt:
        from ditto_core.system.receipt import make_receipt

        model, reference = self.workspace.digest(self.spec.model), self.reference.info
        facts = [reference.backend, reference.dtype, reference.device, dict(reference.facts), self.spec.attention]
        return make_receipt(
            engine=self.engine_files.fingerprint,
            reference=fingerprint(model, facts),
            model=model,
            versions=self.engine_files.versions,
            threads=self.options.threads,
        )

    def _floor_key(self, key: Any) -> str:
        reference = self.reference.info
        facts = [reference.backend, reference.dtype, dict(reference.facts), self.spec.dtype, self.spec.attention]
        sites = [tap.site for tap in self.engine.taps]
        return fingerprint(self.workspace.digest(self.spec.model), facts, sites, key)

    def _dump_folder(self) -> Path:
        assert self.options.dump is not None
        count = len(self.comparisons)
        return self.options.dump / f"run{count}" if count else self.options.dump

    def _writers(self) -> Any:
        if self.options.dump is None:
            return None
        from ditto_core.trace import TraceWriter

        folder = self._dump_folder()
        sides = (("engine", self.engine), ("reference", self.reference))
        return tuple(TraceWriter(folder / name, session.info, self.engine.taps) for name, session in sides)


def names(sites: Sequence[str], most: int = 3) -> str:
    """List the first few sites."""
    return ", ".join(sites[:most]) + (" …" if len(sites) > most else "")
