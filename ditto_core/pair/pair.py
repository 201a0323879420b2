"""An engine and its reference, ready to generate: what the ``ditto`` fixture is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ditto_core.backends.base import check_runs
from ditto_core.compare.tolerance import Tolerance
from ditto_core.engines.engine import Engine
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import UsageError, check_type
from ditto_core.model.checkpoint import vocab_size
from ditto_core.model.forward import DECODED, can_generate, first_inputs
from ditto_core.pair.inputs import MORE, by_name, check_padding, digests, parts_not_run, rounded
from ditto_core.pair.pair_options import PairOptions
from ditto_core.pair.runner import RunFn, Runner
from ditto_core.pair.sessions import Sessions
from ditto_core.spec import EngineSpec
from ditto_core.stepping.choosing import allowed_tokens, first_ids
from ditto_core.stepping.floor import Floor
from ditto_core.stepping.inputs import input_differences, position_differences
from ditto_core.stepping.lockstep import Sides, TapReader, lockstep, rows_of, single_step
from ditto_core.stepping.prompts import Prompt, SourceBatch, TokenBatch, encode

if TYPE_CHECKING:
    from ditto_core.compare.blame import Localization
    from ditto_core.compare.comparison import Comparison
    from ditto_core.pair.replacing import Replaced
    from ditto_core.relations import InputRelations, Relation, Relations
    from ditto_core.repro.repro import Fed, Repro

AnyInputs = Prompt | Sequence[Prompt] | Mapping[str, torch.Tensor] | None
"""Prompts of a decoder, inputs by name of another model, or None for its examples."""
HELD = "the model's code reads its numbers, as an exporter cannot"


class Pair:
    """An engine beside its reference: their ``sessions``, and the comparisons of the runs so far.

    ``engine`` is one that is built already; else the workspace builds ``spec``'s. ``sessions`` are those of another
    pair of the same spec, whose options ask for the same ones (:meth:`PairOptions.same_sessions`).
    """

    def __init__(
        self,
        workspace: Workspace,
        spec: EngineSpec,
        options: PairOptions | None = None,
        engine: Engine | None = None,
        *,
        sessions: Sessions | None = None,
    ) -> None:
        check_type(workspace, Workspace, "workspace", "a Workspace")
        check_type(spec, EngineSpec, "spec", "an EngineSpec")
        check_type(options, (PairOptions, type(None)), "options", "PairOptions")
        check_type(engine, (Engine, type(None)), "engine", "an Engine")
        self.options = options or PairOptions()
        self.sessions = sessions or Sessions(workspace, spec, self.options, engine)
        self._runner = Runner(self.sessions, self.options)
        self.on_step: Callable[[int], None] | None = None
        self.reader: TapReader | None = None
        self.comparisons: list[Comparison] = []
        self._fed: Fed | None = None
        self._ran: tuple[RunFn, Any, Comparison] | None = None

    def __repr__(self) -> str:
        return f"<Pair {self.spec.model.label} {self.spec.label} against {self.options.reference}>"

    @property
    def workspace(self) -> Workspace:
        """Where the engine and the model come from."""
        return self.sessions.workspace

    @property
    def spec(self) -> EngineSpec:
        """What the engine is built from."""
        return self.sessions.spec

    @property
    def engine(self) -> Engine:
        """The built engine on disk; ``sessions.engine`` is its session."""
        return self.sessions.built

    def close(self) -> None:
        """Release the sessions that were opened."""
        self.sessions.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | Mapping[str, torch.Tensor],
        *,
        max_new_tokens: int = 10,
        forced: bool = True,
        localize: bool | None = None,
    ) -> Comparison:
        """Generate greedily on both sides in lockstep and compare every tap at every step.

        ``prompts``: one text or list of token ids, or several (left-padded into one batch). The prefill yields the
        first new token, so the run has ``max_new_tokens`` steps. ``forced``: the engine gets the reference's tokens.
        Of an encoder-decoder they are what is encoded (padded on the right), or the encoder's inputs by name; among
        those may be ``decoder_input_ids``, else the decoder starts with the token that its configuration says. A
        decoder whose example inputs hold more than tokens, such as images, takes its first step's inputs by name. The
        generation configuration's forced, suppressed and bad tokens and n-grams hold on both sides.
        ``localize``: also measure the error that each tapped site adds by itself, and name causes (default: what the
        pair's options say).
        Raises :class:`UsageError` for an empty prompt or a length beyond the engine's profile.
        """
        check_type(max_new_tokens, int, "max_new_tokens", "a whole number")
        if max_new_tokens < 1:
            raise UsageError(f"max_new_tokens is {max_new_tokens}, expected at least 1")
        model = self.sessions.model
        if not model.decoder and not model.staged:
            kind = "a decoder whose steps one graph can take" if can_generate(model.module) else "a decoder"
            raise UsageError(f"{self.spec.model.label} is not {kind}: call run(inputs) instead of generate(prompts)")
        batch = self._batch(prompts, max_new_tokens)  # before the engine is built: a text may have no tokenizer
        if isinstance(batch, TokenBatch):
            self._check_profile(batch, max_new_tokens)
        check_runs(self.spec.backend)
        self._check_fits(batch)
        self._fed = batch if isinstance(batch, TokenBatch) else batch.sequencer().inputs()
        tokenizer = self.tokenizer
        decode = (lambda ids: str(tokenizer.decode(ids))) if tokenizer is not None else None

        def run_fn(sides: Sides, floor: Floor | None) -> tuple[Comparison, Floor]:
            return lockstep(
                sides,
                batch,
                steps=max_new_tokens,
                forced=forced,
                tolerance=self._runner.tolerance,
                floor=floor,
                decode=decode,
                on_step=self.on_step,
            )

        notes = parts_not_run(self.model_config, batch.sequencer().inputs())
        notes += input_differences(self.sessions.engine, batch, model.module, tokenizer, self.spec.dtype)
        notes += self.sessions.weight_differences
        return self._run(run_fn, [digests(batch.sequencer().inputs()), max_new_tokens], localize, notes)

    def run(self, inputs: Mapping[str, torch.Tensor] | None = None, *, localize: bool | None = None) -> Comparison:
        """Compare one forward pass of a model that is not a decoder, on its example inputs unless others are given."""
        model = self.sessions.model
        if self.engine.decoder:
            raise UsageError(f"{self.spec.model.label} is a decoder: call generate(prompts) instead of run(inputs)")
        values = self._values(inputs if inputs is not None else model.examples)
        self.sessions.export.check(values)
        self._fed = values

        def run_fn(sides: Sides, floor: Floor | None) -> tuple[Comparison, Floor]:
            return single_step(sides, values, tolerance=self._runner.tolerance, floor=floor)

        return self._run(run_fn, digests(values), localize)

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
        first blamed site tapped, and name the operator. A model that is not a decoder takes its inputs by name, or None
        for its examples. A run of a few seconds is repeated with the model's tensors at the first blamed site, which
        proves it and shows what else is wrong. Returns the comparison; its ``localization`` is set. Raises
        :class:`~ditto_core.errors.RunError` where local errors cannot be measured.
        """
        from ditto_core.pair.localizing import required, with_every_site
        from ditto_core.pair.proving import SECONDS, proven

        if prompts is None and self.sessions.model.decoder:
            raise UsageError("localize needs a prompt: give text or token ids")
        if prompts is not None and (self.sessions.model.decoder or self.sessions.model.staged):
            self._batch(prompts, max_new_tokens)  # before the engine is built: a text may have no tokenizer
        spec = with_every_site(self.sessions, "float32" if fp32 else self.spec.dtype)
        whole = self if spec == self.spec else self._with_engine(spec)
        if whole is not self:
            self.sessions.close()  # not two engines in memory; they open again when they are asked for
        start = time.process_time()
        comparison = whole._feed(prompts, max_new_tokens, localize=True)
        found = required(comparison)
        if found and time.process_time() - start <= SECONDS:
            found = proven(whole.sessions, whole._replace, found)
        if operators and found:
            found = whole._name_operator(found, prompts, max_new_tokens)
        comparison = replace(comparison, localization=found)
        if whole is not self:
            whole.close()
            self.comparisons.append(comparison)
        return comparison

    @property
    def model_config(self) -> Any:
        """The model's own configuration, None where it has none."""
        return getattr(self.sessions.model.module, "config", None)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, None where it has none."""
        return self.sessions.model.tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model takes, 0 for a model without a vocabulary."""
        return vocab_size(self.model_config)

    def _values(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return inputs by name as tensors that the engine's dtype holds. Raises :class:`UsageError` for a name."""
        values = by_name(inputs, self.sessions.model.examples, self.spec.model.label)
        return rounded({name: torch.as_tensor(value) for name, value in values.items()}, self.spec.dtype)

    def _batch(
        self, prompts: Prompt | Sequence[Prompt] | Mapping[str, torch.Tensor], steps: int
    ) -> TokenBatch | SourceBatch:
        """Return what the generation of so many tokens starts from."""
        model, label = self.sessions.model, self.spec.model.label
        module: Any = model.module
        if not model.staged:
            if isinstance(prompts, Mapping):
                raise UsageError(f"{label} got inputs by name, expected text or token ids; {MORE}")
            return self.encode(prompts)
        texts: tuple[str, ...] = ()
        if isinstance(prompts, Mapping):
            given = self._values(prompts)
        elif DECODED not in model.examples:
            raise UsageError(f"{label} takes {', '.join(model.examples)}: call generate({{name: tensor}})")
        elif getattr(module, "main_input_name", "") == "input_ids":
            tokens = self.encode(prompts, left=False)
            given, texts = {"input_ids": tokens.input_ids, "attention_mask": tokens.mask}, tokens.texts
        else:
            raise UsageError(f"{label} encodes {module.main_input_name}: call generate({{name: tensor}})")
        config: Any = module.generation_config
        name = DECODED
        if DECODED not in model.examples:
            name, given = "input_ids", first_inputs(module, given)
        elif DECODED not in given:
            given[DECODED] = first_ids(module.config, config, rows_of(given))
        start = given.pop(name)
        return SourceBatch(given, start, texts, allowed_tokens(config, start.shape[1], steps), name)

    def _check_fits(self, batch: TokenBatch | SourceBatch) -> None:
        if isinstance(batch, TokenBatch):
            check_padding(self.sessions.export, batch)
        else:
            self.sessions.export.check(batch.sequencer().inputs())

    def encode(self, prompts: Prompt | Sequence[Prompt], *, left: bool = True) -> TokenBatch:
        """Turn prompts into a batch of this model's tokens, padded on the left or the right."""
        pad = int(getattr(self.model_config, "pad_token_id", None) or 0)
        return encode(prompts, tokenizer=self.tokenizer, vocab_size=self.vocab_size, pad=pad, left=left)

    def relations(self) -> Relations | InputRelations:
        """Return the relations of the engine's session, on tokens for a decoder, else on inputs by name.

        They are judged by the noise floor on the very inputs where the reference is eager, else by the table of dtypes.
        """
        from ditto_core.pair.relating import input_relations, token_relations

        sessions, tolerance = self.sessions, self._runner.tolerance
        if sessions.built.decoder:
            return token_relations(sessions, tolerance)
        return input_relations(sessions, self._values(sessions.model.examples), tolerance)

    def served_relations(self, ids: Sequence[int], *names: str) -> tuple[Relation, ...]:
        """Check that the ways in which a server serves agree on one prompt, on the engine without taps.

        ``names``: ``prefix_cache``, ``chunked_prefill``, ``batch``, ``prompt_logprobs`` (default: all). Raises
        :class:`UsageError` for a backend that serves in one way only.
        """
        from ditto_core.pair.relating import served_relations

        return served_relations(self.sessions, self._runner.tolerance, ids, names)

    def check_history(
        self, prompts: Sequence[Sequence[int]], events: Sequence[tuple[str, int]], *, new_tokens: int = 10
    ) -> tuple[Relation, ...]:
        """Check that a history of requests gives each of them what it gets alone, on the engine without taps.

        See :func:`~ditto_core.relations.requests.check_history`. The server is kept open for the next history.
        Raises :class:`UsageError` for a backend that takes no requests.
        """
        from ditto_core.pair.relating import token_relations
        from ditto_core.relations.requests import check_history

        terms = token_relations(self.sessions, self._runner.tolerance).terms_for([max(map(list, prompts), key=len)])
        return check_history(self.sessions.requests, prompts, events, new_tokens, terms)

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
            self.engine,
            self.sessions.engine,
            self.sessions.export,
            self.sessions.model,
            self._fed,
            site=site,
            directory=directory,
            step=next(failed, 0) if step is None else step,
            tokens=torch.tensor([row.reference for row in last.tokens]) if last.tokens else None,
        )
        saved = {find_tap(self.engine, site).site: str(repro.directory)}
        self.comparisons[-1] = replace(last, repros={**last.repros, **saved})
        return repro

    def replace(self, *sites: str) -> Replaced:
        """Run once more, on the last run's inputs, with the model's own tensors in the engine's place at ``sites``.

        The engine is cut there: what computes a site is left out, and the eager model, which steps along in the next
        higher precision, gives its tensor. What was caused at the sites is gone downstream; what remains is another
        fault. Raises :class:`UsageError` where nothing has run yet, and as
        :func:`~ditto_core.pair.replacing.open_with_model` does; :class:`~ditto_core.errors.RunError` for a tensor that
        the engine's dtype does not hold.
        """
        for site in sites:
            check_type(site, str, "a site", "its name")
        return self._replace(sites)

    def _replace(self, sites: Sequence[str], localizer: TapReader | None = None) -> Replaced:
        from ditto_core.pair.replacing import open_with_model, replaced

        if self._ran is None:
            raise UsageError("nothing has run yet: call generate(prompts) or run() before replace(site)")
        run_fn, key, before = self._ran
        session = open_with_model(self.sessions, sites, self.options.isolation, self.options.step_timeout)
        try:
            return replaced(sites, before, self._runner.with_engine(run_fn, key, session, localizer))
        finally:
            session.close()

    def _check_profile(self, batch: TokenBatch, steps: int) -> None:
        length = batch.input_ids.shape[1]
        self.spec.profile.check(batch.rows, length, 0)
        self.spec.profile.check(batch.rows, 1 if steps > 1 else length, length + steps - 2 if steps > 1 else 0)

    def _run(self, run_fn: RunFn, key: Any, localize: bool | None, notes: Sequence[str] = ()) -> Comparison:
        folder, count = self.options.dump, len(self.comparisons)
        dump = folder / f"run{count}" if folder and count else folder
        comparison = self._runner.run(run_fn, key, localize=localize, reader=self.reader, dump=dump)
        held = [f"{name} is a constant of this engine: {HELD}" for name in self.sessions.export.held]
        notes = *notes, *held, *position_differences(self.sessions.engine)
        noted = replace(comparison, notes=(*comparison.notes, *notes))
        self._ran = run_fn, key, noted
        self.comparisons.append(noted)  # a list of examples keeps the worst only
        return noted

    def _feed(self, prompts: AnyInputs, steps: int, *, localize: bool) -> Comparison:
        if prompts is None or (isinstance(prompts, Mapping) and not self.sessions.model.staged):
            return self.run(prompts, localize=localize)
        return self.generate(prompts, max_new_tokens=steps, localize=localize)

    def _with_engine(self, spec: EngineSpec) -> Pair:
        """Return a pair of the same workspace and options with another engine; no dump, and no engine without taps.

        Tolerances of names that only the first engine has mean nothing there.
        """
        rules = Tolerance.of(self.options.tolerance).optional()
        return Pair(self.workspace, spec, replace(self.options, dump=None, tolerance=rules, observer=False))

    def _name_operator(self, found: Localization, prompts: AnyInputs, steps: int) -> Localization:
        """Build once more with the operators of the first blamed site tapped, and blame one of them."""
        from ditto_core.pair.operators import OperatorCheck

        first, *others = found.blamed
        check = OperatorCheck(self.sessions, first)
        operator = check.only
        if len(check.values) > 1:
            self.sessions.close()  # not two engines in memory
            closer = self._with_engine(check.spec)
            try:
                closer.reader = reader = check.reader(closer.engine.taps)
                closer._feed(prompts, steps, localize=False)
            finally:
                closer.close()
            operator = reader.worst
        return replace(found, blamed=(replace(first, operator=operator), *others))
