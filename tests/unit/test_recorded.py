"""A recorded trace stands in for the session that it was recorded from, on the same inputs only."""

from dataclasses import replace

import pytest
import torch

from ditto_core.backends.recorded import RecordedSession
from ditto_core.errors import RunError
from ditto_core.session import Session, SessionInfo
from ditto_core.sites import Tap
from ditto_core.trace import Trace, TraceWriter

INFO = SessionInfo(label="eager float32", backend="eager", dtype="float32")
TAPS = (Tap("a", value="a"), Tap("b", value="b"))
STEPS = (
    {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 10]]), "scale": torch.tensor([1.0, float("nan")])},
    {"input_ids": torch.tensor([[11], [12]]), "scale": torch.tensor([1.0, 2.0])},
)


@pytest.fixture
def session(tmp_path):
    with TraceWriter(tmp_path / "t", INFO, TAPS) as writer:
        for i, inputs in enumerate(STEPS):
            taps = {tap.site: torch.full((2, 3), 10.0 * i) for tap in TAPS}
            writer.write_step(inputs, {"logits": torch.full((2, 4), float(i))}, taps)
    return RecordedSession(Trace.open(tmp_path / "t"))


def play(session: Session, steps=STEPS):
    """Collect what a session delivers, through nothing but the protocol."""
    session.start(2)
    taps, outputs = [], []
    for inputs in steps:
        outputs.append(session.step(inputs, lambda site, tensor: taps.append((site, tensor.unique().tolist()))))
    return taps, outputs


def test_it_replays_taps_in_order_and_outputs_step_by_step(session):
    taps, outputs = play(session)
    assert taps == [("a", [0.0]), ("b", [0.0]), ("a", [10.0]), ("b", [10.0])]
    assert [o["logits"].unique().tolist() for o in outputs] == [[0.0], [1.0]]
    assert (session.info, session.taps) == (replace(INFO, recorded=True), TAPS)
    session.close()


def test_start_rewinds(session):
    assert play(session)[0] == play(session)[0]


def test_past_the_end_says_how_many_steps_there_are(session):
    play(session)
    with pytest.raises(RunError, match=r"ends after 2 steps, step 2 was asked for"):
        session.step(STEPS[1], print)


def test_another_batch_size_is_refused_at_the_start(session):
    with pytest.raises(RunError, match=r"was recorded with 2 rows, this run has 3"):
        session.start(3)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({**STEPS[0], "input_ids": torch.tensor([[5, 6, 7], [8, 99, 10]])}, r"input_ids\[1, 1\] is 99, recorded was 9"),
        (
            {**STEPS[0], "input_ids": torch.tensor([[5, 6], [8, 9]])},
            r"input_ids has shape \[2, 2\], recorded was \[2, 3\]",
        ),
        ({**STEPS[0], "scale": torch.tensor([1.0, 2.0])}, r"scale\[1\] is 2.0, recorded was nan"),
        (
            {**STEPS[0], "scale": STEPS[0]["scale"].double()},
            r"scale has dtype torch.float64, recorded was torch.float32",
        ),
        ({"input_ids": STEPS[0]["input_ids"]}, r"input 'scale' was recorded but not given"),
        ({**STEPS[0], "extra": torch.zeros(1)}, r"input 'extra' was given but not recorded"),
    ],
)
def test_other_inputs_are_refused_with_step_and_first_difference(session, inputs, message):
    with pytest.raises(RunError, match=rf"was recorded on other inputs: step 0, {message}") as caught:
        play(session, [inputs])
    assert "\n" not in str(caught.value)


def test_a_refused_step_can_be_tried_again(session):
    session.start(2)
    with pytest.raises(RunError, match="step 0"):
        session.step(STEPS[1], print)
    assert session.step(STEPS[0], lambda *_: None)["logits"].shape == (2, 4)
