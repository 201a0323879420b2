"""A gate's result: records of every sample, receipts, and verdicts that anyone can recompute from them."""

from __future__ import annotations

import hmac
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ditto_core.errors import UsageError
from ditto_core.gates.policy import KL, Policy
from ditto_core.gates.record import Record
from ditto_core.gates.verdict import GateVerdict, judge
from ditto_core.system.files import parse_json, path_of, read_text
from ditto_core.system.fingerprint import fingerprint
from ditto_core.system.receipt import Receipt

SCHEMA_VERSION = 2
KEY_VARIABLE = "DITTO_GATE_KEY"
SOURCES = "`ditto gate run` and `ditto gate merge`"


@dataclass(frozen=True)
class Identity:
    """What makes two runs parts of the same gate: suite, engine, reference and how samples are scored.

    ``engine`` and ``reference`` are fingerprints; the labels are for people. ``dtype`` is the engine's: ``int8`` …
    ``floor``: the dtype of the eager model whose error is the limit, empty where stated budgets are. ``tokens``: the
    digest of the ids that the model's tokenizer makes of the suite's texts, empty where it has none.
    """

    suite: str
    suite_digest: str
    model: str
    engine: str
    engine_label: str
    reference: str
    reference_label: str
    dtype: str
    max_new_tokens: int
    floor: str = ""
    tokens: str = ""

    @property
    def key(self) -> str:
        """SHA-256 (hex) of all of it."""
        return fingerprint(self.__dict__)


@dataclass(frozen=True)
class GateResult:
    """What a gate, or a shard of it, found. True when every sample is there and no verdict fails.

    ``ids`` are all samples of the suite in order, ``records`` those that were run. One receipt a machine's part.
    """

    identity: Identity
    policy: Policy
    ids: tuple[str, ...]
    records: tuple[Record, ...]
    receipts: tuple[Receipt, ...]
    shard: str = ""
    notes: tuple[str, ...] = ()

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Samples of the suite that have no record, or one that lacks some of its results."""
        kl, floor = any(r.kl for r in self.records), any(r.floor for r in self.records)
        there = {
            record.id
            for record in self.records
            if record.whole and (not kl or len(record.kl) == len(record.engine.top)) and (not floor or record.floor)
        }
        return tuple(id for id in self.ids if id not in there)

    @cached_property
    def verdicts(self) -> tuple[GateVerdict, ...]:
        """One verdict a metric, worked out from the records."""
        order = {id: i for i, id in enumerate(self.ids)}
        records = sorted(self.records, key=lambda record: order[record.id])
        return judge(records, self.policy, self.identity.dtype, self.identity.floor)

    @property
    def failures(self) -> tuple[GateVerdict, ...]:
        """The verdicts that fail."""
        return tuple(verdict for verdict in self.verdicts if not verdict.ok)

    @property
    def undecided(self) -> bool:
        """Tell whether the gate could not fail, and so does not pass: no bound at all, too few samples for one, or none
        for a limit that was set."""
        return not any(verdict.judged for verdict in self.verdicts) or bool(self.unsettled or self.unmeasured)

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """The metrics that the policy limits and no sample yields: accuracy without answers, perplexity without texts.

        Beside a baseline there is no KL at all, which a note says (:meth:`~ditto_core.gates.Baseline.warnings`).
        """
        found = {verdict.metric for verdict in self.verdicts}
        found |= set() if any(record.kl for record in self.records) else set(KL)
        return tuple(name for name, limit in self.policy.limits.items() if math.isfinite(limit) and name not in found)

    @property
    def unsettled(self) -> tuple[GateVerdict, ...]:
        """The verdicts that the samples are too few to decide."""
        return tuple(verdict for verdict in self.verdicts if verdict.judged and not verdict.decided)

    def __bool__(self) -> bool:
        return not self.missing and not self.failures and not self.undecided

    def __repr__(self) -> str:
        return f"<GateResult: {self.summary}>"

    @property
    def summary(self) -> str:
        """One line: verdict and number first."""
        head = f"gate {self.identity.suite} on {self.identity.engine_label} against {self.identity.reference_label}"
        if self.missing:
            more = f" and {len(self.missing) - 1} more" if len(self.missing) > 1 else ""
            return f"{head}: INCOMPLETE, sample {self.missing[0]!r}{more} missing of {len(self.ids)}"
        if self.failures:
            return f"{head}: FAILED, {describe(self.failures[0])}"
        if self.unsettled:
            first = self.unsettled[0]
            return f"{head}: UNDECIDED, {describe(first)}: too few {first.evidence} to exclude twice the limit"
        if self.unmeasured:
            return f"{head}: UNDECIDED, {self.unmeasured[0]} has a limit and no sample yields it"
        if self.undecided:
            return f"{head}: FAILED, none of its metrics has a limit"
        return f"{head}: passed, {len(self.ids)} samples"

    def assert_passed(self) -> None:
        """Raise ``AssertionError`` with the verdict, the failed metrics and what each rests on, unless it passed."""
        __tracebackhide__ = True
        if not self:
            lines = [f"  {describe(verdict)} [{verdict.detail}]" for verdict in self.failures[1:]]
            raise AssertionError("\n".join([self.summary, *lines]))

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary for strict JSON, with a digest of all the rest."""
        body = {
            "schema": SCHEMA_VERSION,
            "ok": bool(self),
            "summary": self.summary,
            "identity": self.identity.__dict__,
            "policy": self.policy.to_json(),
            "shard": self.shard,
            "notes": list(self.notes),
            "receipts": [receipt.to_json() for receipt in self.receipts],
            "verdicts": [] if self.missing else [verdict.to_json() for verdict in self.verdicts],
            "ids": list(self.ids),
            "records": [record.to_json() for record in self.records],
        }
        digest = fingerprint(body)
        key = signing_key()
        return {**body, "digest": digest, **({"signature": sign(digest, key)} if key else {})}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GateResult:
        """Read a result. Its verdicts are worked out again.

        Raises :class:`UsageError` when it is damaged, or ``DITTO_GATE_KEY`` is set and did not sign it.
        """
        try:
            body = {name: value for name, value in data.items() if name not in ("digest", "signature")}
            if data["schema"] != SCHEMA_VERSION:
                raise UsageError(f"gate result of schema {data['schema']!r}, expected {SCHEMA_VERSION}")
            if fingerprint(body) != data["digest"]:
                raise UsageError("the gate result was changed after it was written: its digest does not match")
            check_signature(data["digest"], data.get("signature"))
            check_ids([record["id"] for record in data["records"]], data["ids"])
            return cls(
                identity=Identity(**data["identity"]),
                policy=Policy.from_json(data["policy"]),
                ids=tuple(data["ids"]),
                records=tuple(Record.from_json(record) for record in data["records"]),
                receipts=tuple(Receipt.from_json(receipt) for receipt in data["receipts"]),
                shard=data["shard"],
                notes=tuple(data["notes"]),
            )
        except KeyError as error:
            raise UsageError(f"no gate result: it has no {error}, expected what {SOURCES} write") from error
        except (TypeError, AttributeError, ValueError) as error:
            raise UsageError(f"no gate result: {error}, expected what {SOURCES} write") from error

    def save(self, path: Path) -> None:
        """Write the result as JSON, so that nobody sees a part of it. Raises :class:`TraceError`."""
        from ditto_core.system.files import replace_text

        replace_text(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> GateResult:
        """Read what :meth:`save` wrote. Raises :class:`UsageError`."""
        path = path_of(path, "a gate's result")
        try:
            return cls.from_json(parse_json(read_text(path)))
        except OSError as error:
            raise UsageError(f"{path} is no gate result ({error.strerror}), expected what {SOURCES} write") from error
        except ValueError as error:
            raise UsageError(f"{path} is no gate result ({error}), expected what {SOURCES} write") from error
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error


def signing_key() -> bytes:
    """Return the key that signs results, from the environment; empty where there is none."""
    return os.environ.get(KEY_VARIABLE, "").encode()


def sign(digest: str, key: bytes) -> str:
    """Return HMAC-SHA256 (hex) of a result's digest."""
    return hmac.new(key, digest.encode(), "sha256").hexdigest()


def check_signature(digest: str, signature: Any) -> None:
    """Raise :class:`UsageError` when there is a key and it did not sign the digest."""
    key = signing_key()
    if key and not hmac.compare_digest(sign(digest, key), str(signature)):
        what = "is not signed" if signature is None else "is signed with another key"
        raise UsageError(f"the gate result {what}, expected the signature of the key in {KEY_VARIABLE}")


def check_ids(found: Sequence[str], ids: Sequence[str]) -> None:
    """Raise :class:`UsageError` for a record of no sample of the suite, or two of one."""
    known: set[str] = set(ids)
    for id in found:
        if id not in known:
            raise UsageError(f"the gate result has a record of {id!r}, which its suite lacks or which it has twice")
        known.remove(id)


def describe(verdict: GateVerdict) -> str:
    """Return a verdict in one line: number and bound."""
    interval = f"[{verdict.low:.4g}, {verdict.high:.4g}]"
    if verdict.p is not None and verdict.limit == 0:
        return f"{verdict.metric} {verdict.estimate:.4g} {interval}: p {verdict.p:.2g} ({verdict.test})"
    bound = "no limit" if math.isinf(verdict.limit) else f"limit {verdict.limit:.4g}"
    return f"{verdict.metric} {verdict.estimate:.4g} {interval}: {bound}"


def merge(results: Sequence[GateResult]) -> GateResult:
    """Put the shards of one gate together.

    Raises :class:`UsageError` when they are not of one gate, or two have the same sample. A sample that no shard has
    makes the merged result incomplete, which is a failure.
    """
    if not results:
        raise UsageError("no shard to merge, expected at least one")
    first = results[0]
    for other in results[1:]:
        same_gate(first, other)
    records: dict[str, Record] = {}
    for record in (record for result in results for record in result.records):
        if record.id in records:
            raise UsageError(f"sample {record.id!r} is in two shards")
        records[record.id] = record
    ordered = tuple(records[id] for id in first.ids if id in records)
    receipts = tuple(receipt for result in results for receipt in result.receipts)
    notes = tuple(dict.fromkeys(note for result in results for note in result.notes))
    return replace(first, records=ordered, receipts=receipts, shard="", notes=notes)


def same_gate(first: GateResult, other: GateResult) -> None:
    """Raise :class:`UsageError` that names what two shards do not share."""
    for name, value in first.identity.__dict__.items():
        theirs = getattr(other.identity, name)
        if theirs != value:
            raise UsageError(f"shards of different gates: {name} is {value!r} in one and {theirs!r} in another")
    if first.ids != other.ids or first.policy != other.policy:
        raise UsageError("shards of different gates: they differ in their samples or policy")
