"""What taps owe: each one once, in order, with the shape, dtype and values that its site has in the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ditto_core.sites import Tap
from ditto_core.testing.subject import Step, Subject, run, tokens


def deliver(subject: Subject, taps: Sequence[Tap]) -> list[Step]:
    """Return what an engine with these taps delivers."""
    with subject.session(subject.engine(taps)) as session:
        return run(session, tokens())


def no_tap(subject: Subject) -> None:
    """An engine without taps delivers its outputs and nothing else."""
    for step in deliver(subject, ()):
        assert not step.delivered, f"{step.delivered[0][0]} is delivered, but no tap was asked for"
        assert step.outputs, "no output is returned"


def one_tap(subject: Subject) -> None:
    """An engine with one tap delivers that one."""
    tap = subject.every_tap()[-1]
    delivered(subject, [tap])


def output_as_tap(subject: Subject) -> None:
    """A tap whose value is a final output is delivered, and the output is returned as well."""
    tap = subject.output_tap()
    delivered(subject, [tap])
    (name,) = (name for name in subject.export().finals if name == tap.value)
    for step in deliver(subject, [tap]):
        assert name in step.outputs, f"{name} is delivered as a tap, but not returned"


def every_tap(subject: Subject) -> None:
    """An engine with all taps delivers each at each step, with the values that the eager model has there."""
    delivered(subject, subject.every_tap())


def delivered(subject: Subject, taps: Sequence[Tap]) -> None:
    """Compare every tap that the engine shows with the eager model's, at every step."""
    shown = subject.engine(taps).report.taps
    assert shown, "none of the taps is shown"
    for number, (ours, theirs) in enumerate(
        zip(deliver(subject, taps), subject.reference(taps, tokens()), strict=True)
    ):
        for tap in shown:
            subject.assert_near(ours.taps.get(tap.site), theirs.taps[tap.site], f"{tap.site}, step {number}")


def tap_order(subject: Subject) -> None:
    """Taps are delivered once each, in the order of ``session.taps``, which is that of the report."""
    taps = subject.every_tap()
    built = subject.engine(taps)
    expected = [tap.site for tap in built.report.taps]
    with subject.session(built) as session:
        assert [tap.site for tap in session.taps] == expected, "session.taps are not the taps of the report"
    for step in deliver(subject, taps):
        sites = [site for site, _ in step.delivered]
        assert sorted(sites) == sorted(expected), (
            f"{len(sites)} taps are delivered, expected {len(expected)}, once each"
        )
        assert sites == expected, "taps are delivered in another order than session.taps"


def dtypes(subject: Subject) -> None:
    """Each tap has the dtype that its :class:`~ditto_core.sites.Tap` states."""
    taps = subject.every_tap()
    stated = {tap.site: getattr(torch, tap.dtype) for tap in subject.engine(taps).report.taps if tap.dtype}
    for site, tensor in deliver(subject, taps)[0].delivered:
        assert tensor.dtype == stated.get(site, tensor.dtype), f"{site} is {tensor.dtype}, its tap says {stated[site]}"


def tensors_last(subject: Subject) -> None:
    """Delivered tensors keep their values until the session's next call."""
    kept: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    with subject.session(subject.engine(subject.every_tap())) as session:
        session.start(2)
        outputs = session.step(tokens()[0], lambda site, tensor: kept.append((site, tensor, tensor.clone())))
        assert outputs, "no output is returned"
        for site, tensor, copy in kept:
            assert torch.equal(tensor, copy), f"{site} is overwritten within the step that delivered it"
