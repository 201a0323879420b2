"""What a gate runs: samples from a JSONL file or from the text set that ships with this package."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from ditto_core.errors import UsageError, nearest
from ditto_core.system.files import parse_json, path_of, text_lines
from ditto_core.system.fingerprint import fingerprint

Text = str | tuple[int, ...]
"""Text, or token ids where a model has no tokenizer."""

TEXT, CHOICE, MATCH, PROMPT = "text", "choice", "match", "prompt"
FIELDS = ("id", "text", "prompt", "choices", "answer", "cluster")
QUESTIONS = 3
CHUNK_WORDS = 4
BUILT_IN = ("classics", "classics-choice")


@dataclass(frozen=True)
class Sample:
    """One sample. Which fields are set makes its kind:

    ``text``: perplexity on a text. ``prompt``, ``choices`` and ``answer`` (an index): multiple choice. ``prompt`` and
    ``answer`` (a text): exact match of a greedy continuation. ``prompt`` alone: agreement of greedy continuations.
    ``cluster``: samples that share a passage or a subject share one, and are resampled together.
    """

    id: str
    text: Text = ""
    prompt: Text = ""
    choices: tuple[Text, ...] = ()
    answer: Text | int | None = None
    cluster: str = ""

    @property
    def kind(self) -> str:
        """``text``, ``choice``, ``match`` or ``prompt``."""
        if self.text:
            return TEXT
        if self.choices:
            return CHOICE
        return PROMPT if self.answer is None else MATCH

    @property
    def texts(self) -> list[str]:
        """What a tokenizer reads: text, prompt and answer, and the prompt continued by each choice; no token ids."""
        continued = [f"{self.prompt}{choice}" for choice in self.choices if isinstance(choice, str)]
        return [text for text in (self.text, self.prompt, self.answer, *continued) if text and isinstance(text, str)]

    def to_json(self) -> dict[str, Any]:
        """Return the sample as a JSONL file has it."""
        return {name: value for name in FIELDS if (value := getattr(self, name)) not in ("", (), None)}

    @classmethod
    def from_json(cls, data: Any, default_id: str) -> Sample:
        """Read one line of a file. Raises ``ValueError`` with what was expected."""
        if not isinstance(data, Mapping):
            raise ValueError("a JSON object")  # noqa: TRY004 - one kind of error for all that a line can have wrong
        for name in data:
            if name not in FIELDS:
                raise ValueError(f"only the fields {', '.join(FIELDS)}, got {name!r}{nearest(name, FIELDS)}")
        fields = {name: frozen(value) for name, value in data.items() if value is not None}
        sample = cls(**{**fields, "id": str(fields.get("id", default_id))})
        sample.check()
        return sample

    def check(self) -> None:
        """Raise ``ValueError`` with what was expected of the sample."""
        self.check_types()
        if bool(self.text) == bool(self.prompt):
            raise ValueError("either 'text' or 'prompt', not empty")
        if self.text and (self.choices or self.answer is not None):
            raise ValueError("neither 'choices' nor 'answer' beside 'text'")
        if self.choices:
            self.check_choices()
        blank = isinstance(self.answer, str) and not self.answer.strip()  # every continuation would begin with it
        if not self.choices and (isinstance(self.answer, int) or blank or self.answer == ()):
            raise ValueError(f"'answer' to be a text, got {self.answer!r}")

    def check_choices(self) -> None:
        """Raise ``ValueError`` unless one of the choices, and no other like it, is the answer."""
        if not (isinstance(self.answer, int) and is_token(self.answer) and self.answer < len(self.choices)):
            raise ValueError(f"'answer' to be an index into the {len(self.choices)} choices, got {self.answer!r}")
        if len(self.choices) == 1 or not all(self.choices):
            raise ValueError("at least two choices, none of them empty")
        right = self.choices[self.answer]
        if self.choices.count(right) > 1:
            raise ValueError(f"one choice that is the answer, got {right!r} twice")

    def check_types(self) -> None:
        """Raise ``ValueError`` for a field that is neither text nor token ids."""
        if not isinstance(self.cluster, str):
            raise ValueError(f"'cluster' to be a text, got {self.cluster!r}")  # noqa: TRY004 - as in from_json
        if not isinstance(self.choices, tuple):
            raise ValueError(f"'choices' to be a list, got {self.choices!r}")  # noqa: TRY004 - as in from_json
        answer = () if self.answer is None or isinstance(self.answer, int) else self.answer
        choices = (("choices", choice) for choice in self.choices)
        for name, value in (("text", self.text), ("prompt", self.prompt), ("answer", answer), *choices):
            if not (isinstance(value, str) or (isinstance(value, tuple) and all(map(is_token, value)))):
                raise ValueError(f"{name!r} to hold text or a list of token ids, got {value!r}")


@dataclass(frozen=True)
class Suite:
    """Samples under a name. Ids are unique."""

    name: str
    samples: tuple[Sample, ...]

    def __post_init__(self) -> None:
        if not self.samples:
            raise UsageError(f"suite {self.name} has no sample")
        twice = [id for id, count in Counter(self.ids).items() if count > 1]
        if twice:
            raise UsageError(f"suite {self.name} has the sample {twice[0]!r} twice")

    @property
    def ids(self) -> tuple[str, ...]:
        """The samples' ids, in order."""
        return tuple(sample.id for sample in self.samples)

    @property
    def clusters(self) -> int:
        """How many samples or groups of them are independent evidence."""
        return len({("cluster", s.cluster) if s.cluster else ("sample", s.id) for s in self.samples})

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the samples' content."""
        return fingerprint([sample.to_json() for sample in self.samples])

    def tokens(self, tokenizer: Any) -> str:
        """Return the SHA-256 (hex) of the ids that a tokenizer makes of the texts; empty where either lacks."""
        texts = [text for sample in self.samples for text in sample.texts]
        return fingerprint([[*tokenizer(text)["input_ids"]] for text in texts]) if texts and tokenizer else ""

    def first(self, count: int) -> Suite:
        """Return the suite of the first ``count`` samples; 0 keeps all. Raises :class:`UsageError` below 0."""
        if count < 0:
            raise UsageError(f"the number of samples is {count}, expected at least 1, or 0 for all")
        return Suite(self.name, self.samples[:count]) if count else self


def load_suite(name: str | Path) -> Suite:
    """Return a suite that ships with this package, or read a JSONL file. Raises :class:`UsageError`."""
    if str(name) == "classics":
        return classics()
    if str(name) == "classics-choice":
        return multiple_choice(classics())
    path = path_of(name, "suite")
    if not path.is_file():
        hint = nearest(path.name, BUILT_IN)
        raise UsageError(f"suite {str(name)!r} is neither a JSONL file nor one of {', '.join(BUILT_IN)}{hint}")
    try:
        return Suite(path.stem, tuple(read_lines(path.name, text_lines(path))))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"suite {path} cannot be read: {error}") from error


def read_lines(name: str, lines: Iterable[str]) -> Iterable[Sample]:
    """Yield the sample of each line that is not blank. Raises :class:`UsageError` that names the line."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield Sample.from_json(parse_json(line), str(number))
        except ValueError as error:
            expected = f"JSON ({error})" if isinstance(error, json.JSONDecodeError) else str(error)
            raise UsageError(f"{name}, line {number}: expected {expected}") from error


def classics() -> Suite:
    """Return the text set that ships with this package: short passages of English works in the public domain.

    Each line of ``classics.jsonl`` is an id that names author and work, and the passage.
    """
    text = files("ditto_core.gates").joinpath("classics.jsonl").read_text("utf-8")
    return Suite("classics", tuple(read_lines("classics.jsonl", text.splitlines())))


def multiple_choice(suite: Suite, *, questions: int = QUESTIONS, seed: int = 0) -> Suite:
    """Turn texts into questions: which four words come next, of four places in the same passage?

    All choices share the passage's words and style, so that only the order tells. The same for the same ``seed``.
    Passages that are too short are left out.
    """
    made = [
        s for sample in suite.samples for s in questions_of(sample, questions, random.Random(f"{seed}:{sample.id}"))
    ]
    return Suite(f"{suite.name}-choice", tuple(made))


def questions_of(sample: Sample, count: int, generator: random.Random) -> list[Sample]:
    """Return up to ``count`` questions about one text."""
    if not isinstance(sample.text, str):
        raise UsageError(f"sample {sample.id!r} is no text: multiple choice is made of words")
    words = sample.text.split()
    chunks = [" ".join(words[i : i + CHUNK_WORDS]) for i in range(0, len(words) - CHUNK_WORDS + 1, CHUNK_WORDS)]
    places = [i for i in range(2, len(chunks)) if chunks.count(chunks[i]) == 1]
    if len(set(chunks)) < 6 or len(places) < count:
        return []
    return [question(sample.id, chunks, place, generator) for place in sorted(generator.sample(places, count))]


def question(name: str, chunks: Sequence[str], place: int, generator: random.Random) -> Sample:
    """Return the question what comes at ``place``."""
    others = sorted(set(chunks) - {chunks[place]})
    choices = [chunks[place], *generator.sample(others, 3)]
    generator.shuffle(choices)
    answer = choices.index(chunks[place])
    return Sample(
        f"{name}/{place}",
        prompt=" ".join(chunks[:place]),
        choices=tuple(f" {c}" for c in choices),
        answer=answer,
        cluster=name,
    )


def is_token(value: Any) -> bool:
    """Tell whether a value can be a token id: an integer of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def frozen(value: Any) -> Any:
    """Return a value with its lists, inner ones too, as tuples."""
    return tuple(frozen(item) for item in value) if isinstance(value, list) else value
