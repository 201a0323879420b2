"""What a session owes: the model's outputs at each step, sequences apart from each other, refusals, and no leaks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from ditto_core.errors import DittoError
from ditto_core.session import Session
from ditto_core.testing.building import check_unknown_option, open_damaged, refused
from ditto_core.testing.subject import Feed, Subject, classifier, run, same, step, tokens

MEMORY_STEPS, SETTLED_AFTER = 200, 50
MEMORY_BOUND = 32 << 20
"""Bytes. The 150 steps that are watched deliver 75 MiB of logits: whoever keeps those exceeds it."""
SESSIONS = 6


def outputs(subject: Subject) -> None:
    """A prefill returns the model's final outputs: names, shapes and values. The cache is not among them."""
    with subject.session(subject.engine()) as session:
        (actual,) = run(session, tokens(steps=0))
    assert set(actual.outputs) == set(subject.export().finals), (
        f"outputs are {sorted(actual.outputs)}, expected {sorted(subject.export().finals)}"
    )
    (expected,) = subject.reference((), tokens(steps=0))
    for name, tensor in expected.outputs.items():
        assert actual.outputs[name].shape == tensor.shape, (
            f"{name} has shape {tuple(actual.outputs[name].shape)}, expected {tuple(tensor.shape)}"
        )
        subject.assert_near(actual.outputs[name], tensor, name)


def decoding(subject: Subject) -> None:
    """Steps of single tokens after a prefill into an empty cache return what the model returns there."""
    expected = subject.reference((), tokens())
    with subject.session(subject.engine()) as session:
        actual = run(session, tokens())
    for number in range(1, len(expected)):
        subject.assert_near(
            actual[number].outputs.get("logits"), expected[number].outputs["logits"], f"logits, step {number}"
        )


def batch_sizes(subject: Subject) -> None:
    """Any number of rows and tokens within the profile can be run, one of each included."""
    for rows, length in ((1, 1), (1, 5), (3, 7), (8, 64)):
        with subject.session(subject.engine()) as session:
            actual = run(session, tokens(rows, length, steps=1))[-1].outputs.get("logits")
        expected = subject.reference((), tokens(rows, length, steps=1))[-1].outputs["logits"]
        subject.assert_near(actual, expected, f"logits, {rows} rows, {length} tokens")


def padding(subject: Subject) -> None:
    """A row that is padded on the left returns what it returns in the model, at its real tokens."""
    expected = subject.reference((), tokens(padding=(0, 3)))
    with subject.session(subject.engine()) as session:
        actual = run(session, tokens(padding=(0, 3)))
    for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        row = ours.outputs["logits"][1, -1]
        subject.assert_near(row, theirs.outputs["logits"][1, -1], f"logits of the padded row, step {number}")


def restart(subject: Subject) -> None:
    """After ``start`` a session knows nothing of the sequence before, also with another number of rows."""
    with subject.session(subject.engine()) as session:
        first = run(session, tokens())
        run(session, tokens(3, 4, seed=1))
        assert same(first, run(session, tokens())), "a sequence differs when the session ran another one before it"


def two_sessions(subject: Subject) -> None:
    """Two sessions of one engine that are stepped in turn do not see each other."""
    built = subject.engine()
    with subject.session(built) as session:
        alone = run(session, tokens())
    with subject.session(built) as one, subject.session(built) as two:
        one.start(2)
        two.start(2)
        together = []
        for feed, other in zip(tokens(), tokens(seed=1), strict=True):
            together.append(step(one, feed))
            step(two, other)
    assert same(alone, together), "a sequence differs when another session is stepped beside it"


def determinism(subject: Subject) -> None:
    """The same steps return the same bits in a new session."""
    built = subject.engine(subject.every_tap())
    with subject.session(built) as session:
        first = run(session, tokens())
    with subject.session(built) as session:
        assert same(first, run(session, tokens())), "two runs of the same engine on the same tokens differ"


def inputs_kept(subject: Subject) -> None:
    """A step does not change its inputs: the reference is fed the same tensors."""
    feeds = tokens()
    with subject.session(subject.engine()) as session:
        run(session, feeds)
    for given, fresh in zip(feeds, tokens(), strict=True):
        changed = [name for name in fresh if not torch.equal(given[name], fresh[name])]
        assert not changed, f"a step changes its inputs {', '.join(changed)}"


def missing_input(subject: Subject) -> None:
    """A step without one of its inputs is refused, also when a step before it had them all."""
    with subject.session(subject.engine()) as session:
        for name in tokens()[0]:
            refused(partial(without, session, name), f"a step without {name}")


def without(session: Session, name: str) -> None:
    """Run a good step, and one that lacks an input."""
    feed = tokens()[0]
    run(session, [feed])
    session.start(2)
    step(session, {each: tensor for each, tensor in feed.items() if each != name})


def wrong_shape(subject: Subject) -> None:
    """Token ids and positions with a dimension too few or too many are refused."""
    with subject.session(subject.engine()) as session:
        for name, feed in wrong_feeds().items():
            refused(partial(run, session, [feed]), name)


def wrong_feeds() -> Mapping[str, Feed]:
    """Return steps that cannot be run, by what is wrong."""
    feed = tokens()[0]
    return {
        "a step with token ids of one dimension": {**feed, "input_ids": feed["input_ids"][0]},
        "a step with positions of three dimensions": {**feed, "position_ids": feed["position_ids"][None]},
    }


def works_after_a_refusal(subject: Subject) -> None:
    """A session that refused a step runs the next sequence as if nothing had been."""
    with subject.session(subject.engine()) as session:
        first = run(session, tokens())
        with suppress(Exception):
            run(session, [next(iter(wrong_feeds().values()))])
        assert same(first, run(session, tokens())), "a sequence differs after a step that failed"


def errors_in_one_line(subject: Subject) -> None:
    """What a refusal says is one line that is not empty: reports and headers show it as it is."""
    with subject.session(subject.engine()) as session:
        calls: list[Callable[[], object]] = [
            partial(without, session, "attention_mask"),
            *(partial(run, session, [feed]) for feed in wrong_feeds().values()),
            partial(open_damaged, subject),
            partial(check_unknown_option, subject),
        ]
        for call in calls:
            message = refusal(call)
            assert message is None or len(message.strip().splitlines()) == 1, (
                f"an error has several lines, or none: {message!r}"
            )


def refusal(call: Callable[[], object]) -> str | None:
    """Return the message of a :class:`DittoError`; None where another check reports what happens instead."""
    try:
        call()
    except DittoError as error:
        return str(error)
    except Exception:  # noqa: BLE001
        return None
    return None


def model_without_a_cache(subject: Subject) -> None:
    """A model that is not a decoder runs, with other numbers of rows than its example's, and all its taps."""
    taps = subject.every_tap(classifier)
    built = subject.engine(taps, classifier)
    for rows in (1, 2, 5):
        feed = {"input": torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(rows))}
        (expected,) = subject.reference(taps, [feed], classifier)
        with subject.session(built) as session:
            (actual,) = run(session, [feed])
        for tap in built.report.taps:
            subject.assert_near(actual.taps.get(tap.site), expected.taps[tap.site], f"{tap.site}, {rows} rows")
        for name, tensor in expected.outputs.items():
            subject.assert_near(actual.outputs.get(name), tensor, f"{name}, {rows} rows")


def memory(subject: Subject) -> None:
    """The process does not grow over 200 steps. They deliver every tap of 8 rows of 64 tokens."""
    feeds = tokens(8, 64, steps=0)
    grown_from = 0
    with subject.session(subject.engine(subject.every_tap())) as session:
        for number in range(MEMORY_STEPS):
            if number == SETTLED_AFTER:
                grown_from = resident()
            session.start(8)
            session.step(feeds[0], lambda site, tensor: None)
        growth = resident() - grown_from
    assert growth < MEMORY_BOUND, f"the process grew by {growth >> 20} MiB over {MEMORY_STEPS - SETTLED_AFTER} steps"


def cleanup(subject: Subject) -> None:
    """Sessions that were closed leave no open file and no child process."""
    run_and_close(subject)
    before = held()
    for _ in range(SESSIONS):
        run_and_close(subject)
    after = held()
    left = [f"{after[name] - before[name]} {name}" for name in before if after[name] >= before[name] + SESSIONS]
    assert not left, f"{SESSIONS} closed sessions leave {' and '.join(left)}"


def run_and_close(subject: Subject) -> None:
    """Open a session, run a sequence and close it."""
    with subject.session(subject.engine()) as session:
        run(session, tokens())


def resident() -> int:
    """Return the memory in bytes of the process and its children: what is resident on Linux, elsewhere the most that
    the process ever had."""
    if Path("/proc/self/statm").exists():
        statistics = [Path(f"/proc/{process}/statm").read_text() for process in ("self", *children())]
        return sum(int(text.split()[1]) for text in statistics) * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def held() -> Mapping[str, int]:
    """Return how many files are open and how many child processes run; nothing where ``/proc`` is missing."""
    own = Path("/proc/self")
    if not own.exists():
        return {}
    return {"open files": len(list((own / "fd").iterdir())), "child processes": len(children())}


def children() -> list[str]:
    """Return the ids of the child processes."""
    return [child for path in Path("/proc/self").glob("task/*/children") for child in path.read_text().split()]
