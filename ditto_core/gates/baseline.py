"""The reference's results, sample by sample, in a file of the repository: a gate then runs the engine alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ditto_core.errors import UsageError
from ditto_core.gates.policy import KL, Policy
from ditto_core.gates.result import GateResult, Identity
from ditto_core.gates.scoring import Known
from ditto_core.gates.suite import Suite
from ditto_core.system.files import parse_json, path_of, read_text
from ditto_core.system.fingerprint import fingerprint
from ditto_core.system.receipt import Receipt

SCHEMA_VERSION = 2
REMEDY = "write it anew with --update-baseline"


@dataclass(frozen=True)
class Baseline:
    """What the reference did on every sample of a suite, and the receipt of the run that found it."""

    identity: Identity
    receipt: Receipt
    samples: Mapping[str, Known]

    @classmethod
    def of(cls, result: GateResult) -> Baseline:
        """Take the baseline from a complete run. Raises :class:`UsageError` for one that lacks samples."""
        if result.missing:
            raise UsageError(f"no baseline: {result.summary}")
        samples = {r.id: Known(r.reference, r.tokens, r.floor, r.floor_kl) for r in result.records}
        return cls(result.identity, result.receipts[0], samples)

    def known(self, id: str) -> Known:
        """Return what is known of a sample. Raises :class:`UsageError`: a gate never leaves one out."""
        if id not in self.samples:
            raise UsageError(f"the baseline lacks sample {id!r}: {REMEDY}")
        return self.samples[id]

    def check(self, suite: Suite, model: str, run: Identity) -> None:
        """Raise :class:`UsageError` when a run is of other samples, another model, other tokens, another reference or
        another floor.

        ``model``: its digest.
        """
        for id in suite.ids:
            self.known(id)
        if suite.digest != self.identity.suite_digest:
            raise UsageError(f"the baseline is of other samples than suite {suite.name} has now: {REMEDY}")
        if model != self.receipt.model:
            raise UsageError(f"the baseline is of another model ({self.identity.model}): {REMEDY}")
        if run.tokens != self.identity.tokens:
            raise UsageError(f"the baseline has other token ids than the tokenizer makes of {suite.name} now: {REMEDY}")
        if run.reference_label != self.identity.reference_label:
            found = self.identity.reference_label
            raise UsageError(f"the baseline is of the reference {found}, expected {run.reference_label}: {REMEDY}")
        if run.floor and run.floor != self.identity.floor:
            found = self.identity.floor or "no dtype"
            raise UsageError(f"the baseline has the reference's error in {found}, expected {run.floor}: {REMEDY}")

    def warnings(self, receipt: Receipt, policy: Policy) -> list[str]:
        """Return what differs between the machine and versions that wrote the baseline and those of a run, and which of
        the policy's limits decide nothing beside it."""
        idle = [name for name in KL if math.isfinite(policy.limits.get(name, math.inf))]
        said = (f"no KL without the reference's logits: the limit of {name} decides nothing" for name in idle)
        return [f"baseline: {text}" for text in (*receipt.changes(self.receipt), *said)]

    def save(self, path: Path) -> None:
        """Write the baseline, one line a sample, so that a change of it can be reviewed. Raises :class:`TraceError`."""
        from ditto_core.system.files import replace_text

        body = self.to_json()
        head = {name: value for name, value in body.items() if name != "samples"} | {"digest": fingerprint(body)}
        lines = [f"  {json.dumps(id)}: {json.dumps(sample)}" for id, sample in body["samples"].items()]
        text = json.dumps(head, indent=1)[:-2] + ',\n "samples": {\n' + ",\n".join(lines) + "\n }\n}\n"
        replace_text(path, text)

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary for strict JSON."""
        samples = {id: known.to_json() for id, known in self.samples.items()}
        head = {"schema": SCHEMA_VERSION, "identity": self.identity.__dict__, "receipt": self.receipt.to_json()}
        return {**head, "samples": samples}

    @classmethod
    def load(cls, path: Path) -> Baseline:
        """Read what :meth:`save` wrote. Raises :class:`UsageError` when it is missing, damaged or changed by hand."""
        path = path_of(path, "a baseline")
        try:
            data = parse_json(read_text(path))
            digest = data.pop("digest")
            if digest != fingerprint(data):
                raise UsageError(f"baseline {path} was changed after it was written: {REMEDY}")
            if data["schema"] != SCHEMA_VERSION:
                raise UsageError(f"baseline {path} has schema {data['schema']!r}, expected {SCHEMA_VERSION}: {REMEDY}")
            samples = {id: Known.from_json(known) for id, known in data["samples"].items()}
            return cls(Identity(**data["identity"]), Receipt.from_json(data["receipt"]), samples)
        except FileNotFoundError as error:
            raise UsageError(f"baseline {path} is not there: {REMEDY}") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} is no baseline: {type(error).__name__} {error}") from error
