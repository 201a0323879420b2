"""Answers that an engine lost, from the sample files of lm-evaluation-harness: replayed, counted by what is to blame.

``lm_eval --log_samples`` writes one JSON line a question and filter. Two such files, the engine's and the reference's,
give the questions that only the reference answers right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditto_core.compare.text import headline
from ditto_core.errors import UsageError, first_line, nearest
from ditto_core.system.files import parse_json, text_lines

if TYPE_CHECKING:
    from ditto_core.compare.comparison import Comparison

Replay = Callable[[str], "Comparison"]
"""Runs a text through engine and reference, with local errors."""

AGREES = "engine within its bounds"
ELSEWHERE = f"{AGREES}: a near tie, or what surrounds the model"
NOT_COMPARED = "not compared"


@dataclass(frozen=True)
class Sample:
    """One answered question: ``requests`` are the arguments of each request, ``responses`` what came back for each.

    ``scores`` are the metrics that are 0 or 1.
    """

    id: str
    filter: str
    requests: tuple[tuple[Any, ...], ...]
    responses: tuple[Any, ...]
    scores: Mapping[str, bool]


@dataclass(frozen=True)
class Lost:
    """A question that the reference alone answers right, and the text on which engine and reference should differ."""

    id: str
    text: str


@dataclass(frozen=True)
class Explained:
    """What the replay of one lost answer shows: the first site that adds error itself (else the first that diverges,
    else empty: the engine is within its bounds there, or what it does could not be judged and ``compared`` is False),
    and the cause that was named.
    """

    id: str
    site: str
    cause: str
    verdict: str
    compared: bool = True

    @property
    def where(self) -> str:
        """The site, or why there is none."""
        return self.site or (AGREES if self.compared else f"{NOT_COMPARED}: {self.verdict}")

    def to_json(self) -> dict[str, str | bool]:
        """Return a JSON-ready dictionary."""
        return asdict(self)


def read_samples(path: Path) -> list[Sample]:
    """Read a file of samples. Raises :class:`UsageError` with the line that is none."""
    try:
        lines = text_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {first_line(error)}") from error
    found = [sample_of(line, f"{path}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UsageError(f"{path} holds no samples, expected the lines of lm_eval --log_samples")
    return found


def sample_of(line: str, where: str) -> Sample:
    """Read one line."""
    try:
        data = parse_json(line)
        requests = tuple(map(arguments, listed(data["arguments"])))
        scores = {name: bool(value) for name, value in data.items() if is_score(name, value)}
        return Sample(str(data["doc_id"]), str(data.get("filter", "")), requests, tuple(data["resps"]), scores)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{where} is no sample of lm_eval --log_samples ({type(error).__name__} {first_line(error)})"
        ) from error


def is_score(name: str, value: Any) -> bool:
    """Tell whether a field is a metric with the values 0 and 1: right or wrong."""
    return name not in ("doc_id", "target") and isinstance(value, int | float) and value in (0, 1)


def arguments(request: Any) -> tuple[Any, ...]:
    """Return the arguments of a request: the harness writes ``{"arg_0": …}`` into files."""
    return tuple(listed(request))


def listed(value: Any) -> list[Any]:
    """Return the items of a list, or of a dictionary in the order that the harness numbers them."""
    if isinstance(value, Mapping):
        return [value[key] for key in sorted(value, key=lambda key: int(key.rpartition("_")[2]))]
    return list(value)


def lost_answers(
    engine: Iterable[Sample], reference: Iterable[Sample], metric: str = "", filter: str = ""
) -> list[Lost]:
    """Return the questions that the reference answers right and the engine wrong, by ``metric`` and ``filter``.

    Both default to the engine's first, of the filters that the reference has too. Raises :class:`UsageError` where a
    question is in one file only, is there twice or was asked otherwise, and for metrics and filters that are not there.
    """
    engine, reference = list(engine), list(reference)
    filter = common_filter(engine, reference, filter)
    ours, theirs = by_id(engine, filter, "engine"), by_id(reference, filter, "reference")
    if alone := sorted(ours.keys() ^ theirs.keys()):
        side = "engine" if alone[0] in ours else "reference"
        raise UsageError(f"question {alone[0]} is in the {side}'s samples only, with {len(alone) - 1} others")
    metric = metric or next(iter(first_of(ours).scores), "")
    lost = []
    for id, sample in ours.items():
        other = theirs[id]
        if sample.requests != other.requests:
            raise UsageError(f"question {id} was asked otherwise: the arguments of the two samples differ")
        if right(other, metric) and not right(sample, metric):
            lost.append(Lost(id, text_of(sample, other)))
    return lost


def common_filter(engine: Sequence[Sample], reference: Sequence[Sample], wanted: str) -> str:
    """Return the filter that both sides are read by: ``wanted``, else the engine's first that the reference has too."""
    ours, theirs = (list(dict.fromkeys(sample.filter for sample in side)) for side in (engine, reference))
    names = [name for name in ours if name in theirs]
    if not names:
        sides = f"the engine's are {', '.join(ours)}, the reference's {', '.join(theirs)}"
        raise UsageError(f"the samples have no filter in common: {sides}")
    if wanted and wanted not in names:
        expected = f"expected {', '.join(names)}{nearest(wanted, names)}"
        raise UsageError(f"{wanted!r} is no filter of both sides' samples, {expected}")
    return wanted or names[0]


def by_id(samples: Sequence[Sample], filter: str, side: str) -> dict[str, Sample]:
    """Return the samples of one filter by question. Raises :class:`UsageError` for a question that is there twice."""
    kept = [sample for sample in samples if sample.filter == filter]
    counts = Counter(sample.id for sample in kept)
    if twice := [id for id, count in counts.items() if count > 1]:
        raise UsageError(f"question {twice[0]} is {counts[twice[0]]} times in the {side}'s samples, expected once")
    return {sample.id: sample for sample in kept}


def first_of(samples: Mapping[str, Sample]) -> Sample:
    """Return the first sample."""
    return next(iter(samples.values()))


def right(sample: Sample, metric: str) -> bool:
    """Tell whether a question was answered right. Raises :class:`UsageError` for a metric that does not tell."""
    if metric not in sample.scores:
        known = ", ".join(sample.scores) or "none"
        raise UsageError(
            f"question {sample.id} has no metric {metric!r} of 0 or 1 (it has: {known}){nearest(metric, sample.scores)}"
        )
    return sample.scores[metric]


def text_of(engine: Sample, reference: Sample) -> str:
    """Return the text whose last token decides: generated answers up to where they part, else the reference's choice.

    Of a multiple-choice question that is the context with the continuation to which the reference gives most.
    """
    sides = engine.responses, reference.responses
    if len(reference.requests) > 1:
        best = max(range(len(reference.requests)), key=lambda i: likelihood(reference.responses[i]))
        return "".join(part for part in reference.requests[best] if isinstance(part, str))
    context = reference.requests[0][0] if reference.requests and reference.requests[0] else None
    if not isinstance(context, str):
        raise UsageError(f"question {reference.id} has a prompt of type {type(context).__name__}, expected a text")
    ours, theirs = (innermost(responses) for responses in sides)
    if not isinstance(ours, str) or not isinstance(theirs, str):
        return context
    return context + "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))


def innermost(value: Any) -> Any:
    """Return the first item of nested lists."""
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return value


def likelihood(response: Any) -> float:
    """Return the log-likelihood of a continuation; the harness writes numbers as texts."""
    return float(innermost(response))


def explain(lost: Sequence[Lost], replay: Replay, say: Callable[[str], None] = lambda text: None) -> list[Explained]:
    """Replay each lost answer, and take the site that is to blame for what happens there."""
    found = []
    for i, answer in enumerate(lost, 1):
        found.append(explained(answer.id, replay(answer.text)))
        say(f"{i} of {len(lost)}: question {answer.id}: {found[-1].where}")
    return found


def explained(id: str, run: Comparison) -> Explained:
    """Return what one comparison blames."""
    blamed = run.localization.blamed if run.localization else ()
    bad = run.first_bad.site if run.first_bad else "" if run.logits_ok else "logits"
    site = blamed[0].site if blamed else bad
    cause = run.localization.cause if run.localization else None
    kind = cause.kind if cause and cause.site == site else ""
    return Explained(id, site, kind, headline(run), bool(run) or run.differs)


def tally(found: Sequence[Explained]) -> Iterator[str]:
    """Yield a line for each site: how many lost answers it explains, and the cause most often named there."""
    for where, count in Counter(each.where for each in found).most_common():
        causes = Counter(each.cause for each in found if each.where == where and each.cause).most_common(1)
        what = f" ({causes[0][0]})" if causes else ""
        yield f"{count} of {len(found)} lost answers: {ELSEWHERE if where == AGREES else where}{what}"
