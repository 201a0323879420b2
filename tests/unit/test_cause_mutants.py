"""A recorded computation, run again and changed: what is named, what is not, and when nothing may be."""

import math

import pytest
import torch
from torch.nn import functional as F

from ditto_core.causes.confidence import SEVERAL, confidence
from ditto_core.causes.evidence import Seen
from ditto_core.causes.mutants import Model
from ditto_core.causes.search import explain, fit, said, search, shown
from ditto_core.causes.slices import Slice
from ditto_core.compare.formats import integers
from ditto_core.model.tape import Tape


class Weights(torch.nn.Module):
    """Two square weights and a vector, float64, random."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        for name, shape in (("first", (6, 6)), ("second", (6, 6)), ("gain", (6,))):
            value = torch.randn(shape, generator=draw, dtype=torch.float64)
            setattr(self, name, torch.nn.Parameter(value, requires_grad=False))


ROOT = Weights()
MODEL = Model.of(ROOT, "float32")


def numbers(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sliced(model, engine, x=None, step=0, bound=1e-6, root=ROOT):
    """The slice of a site ``y = model(x)`` of an engine that computes ``engine(x)``."""
    x = numbers(2, 5, 6, seed=step + 1) if x is None else x
    tape = Tape({p.data_ptr(): name for name, p in root.named_parameters()})
    with torch.inference_mode():
        with tape:
            with tape.paused():
                tape.force("x", tape.ref(x), x, x)
            y = model(x)
            tape.sites["y"] = tape.ref(y)
        assert torch.equal(y, model(x)) or torch.allclose(y, model(x), rtol=1e-12)
        return Slice(tape, Seen("y", step, engine(x), None, {}, {"x": x}, bound, bound / 6))


def cause_of(*slices):
    with torch.inference_mode():
        return explain(iter([slices]), MODEL, 20)[:2]


def block(x):
    """Attention-like: a scaled product, softmax, a product, a residual."""
    scores = x @ ROOT.first @ x.transpose(1, 2) * 0.25
    return F.softmax(scores, dim=-1) @ x * ROOT.gain + x


def written(x):
    """Code that writes into its tensors, and splits them."""
    y = x.clone()
    y[..., 0] = 1.5
    a, b = y.chunk(2, dim=-1)
    a = a * 2
    a += b
    return torch.cat([a, -b], -1)


@pytest.mark.parametrize("model", [block, written], ids=["block", "written"])
def test_a_slice_gives_what_the_model_gives(model):
    part = sliced(model, model)
    assert part.now < 1e-14
    assert not part.flagged
    assert all(node.source.startswith("test_cause_mutants.py:") for node in part.nodes if node.func)
    assert torch.equal(part.run({0: lambda s, values, i: s.base[i]}), part.expected)


@pytest.mark.parametrize(
    ("engine", "family", "said"),
    [
        (
            lambda x: F.softmax(x @ ROOT.first @ x.transpose(1, 2) * 0.5, -1) @ x * ROOT.gain + x,
            "constants",
            "the constant 0.25 of the multiplication",
        ),
        (lambda x: block(x) - x, "operations", "x takes no part"),
        (
            lambda x: F.softmax(x @ ROOT.second @ x.transpose(1, 2) * 0.25, -1) @ x * ROOT.gain + x,
            "tensors",
            "second is used in the place of first",
        ),
        (
            lambda x: F.softmax(x @ ROOT.first.T @ x.transpose(1, 2) * 0.25, -1) @ x * ROOT.gain + x,
            "layouts",
            "first is transposed",
        ),
        (lambda x: 1.0123 * (block(x) - x) + x, "fits", "multiplied by 1.0123"),
        (lambda x: ROOT.gain * ROOT.gain + x, "operations", "takes its second operand twice"),
    ],
    ids=["constant", "residual", "other weight", "transposed", "factor", "operand"],
)
def test_a_fault_is_named_in_the_models_words(engine, family, said):
    cause, note = cause_of(sliced(block, engine))
    assert note == ""
    assert cause.rule == f"mutants.{family}"
    assert said in cause.evidence[0]


def attention(x, window):
    """Rows of one head, [batch, 1, tokens, size], under a float64 mask with the lowest float64."""
    near = torch.ones(1, 1, x.shape[-2], x.shape[-2], dtype=torch.bool).tril().triu(1 - window)
    mask = torch.where(near, torch.tensor(0.0, dtype=x.dtype), torch.finfo(x.dtype).min)
    return F.softmax(x @ x.transpose(-1, -2) + mask, dim=-1) @ x


def test_a_window_is_named_where_the_mask_is_float64():
    x = numbers(1, 1, 7, 6)
    cause, note = cause_of(sliced(lambda x: attention(x, 7), lambda x: attention(x, 3), x))
    assert (cause.kind, note) == ("sliding window size", "")
    assert "has a window of 3" in cause.evidence[0]


def test_what_is_wrong_at_some_steps_only_is_named_with_them():
    healthy, wrong = sliced(block, block), sliced(block, lambda x: block(x) - x, step=1)
    cause, _ = cause_of(healthy, wrong)
    assert cause.evidence[0].endswith("in decode only")
    assert cause_of(healthy, wrong, sliced(block, lambda x: 2 * block(x), step=2)) == (None, "")


def test_a_mutant_that_fits_the_first_step_alone_is_no_cause():
    first = sliced(block, lambda x: block(x) - x)
    second = sliced(block, lambda x: block(x) + numbers(2, 5, 6, seed=9), step=1)
    assert cause_of(first, second)[0] is None


@pytest.mark.parametrize("number", [0.0, math.nan, math.inf], ids=str)
def test_numbers_that_fit_everything_name_nothing(number):
    assert cause_of(sliced(block, lambda x: torch.full_like(x, number))) == (None, "")


def test_random_noise_is_not_named():
    assert cause_of(sliced(block, lambda x: block(x) * (1 + 0.01 * numbers(2, 5, 6, seed=50))))[0] is None


def test_explanations_that_this_input_cannot_tell_apart_are_given_with_or():
    """Rows 0 and 2 are equal, and rows 1 and 3: rolled by 1, rolled by -1 and reversed are one, here."""
    cause, _ = cause_of(sliced(block, lambda x: block(x).roll(1, 0), numbers(2, 5, 6).repeat(2, 1, 1)))
    said = " ".join(cause.evidence)
    assert "rolled by 1 along axis -3" in said
    assert "or: " in said
    assert cause.confidence == confidence(SEVERAL)


def test_what_too_many_changes_explain_is_not_named():
    """On a chessboard of 1 and -1 every move by one in either direction is a change of sign."""
    sign = (-1.0) ** torch.arange(6, dtype=torch.float64)
    board = (sign[:, None] * sign).expand(2, 6, 6).clone()
    cause, note = cause_of(sliced(torch.tanh, lambda x: -torch.tanh(x), board))
    assert cause is None
    assert "y: the cause cannot be told on this input" in note


def test_one_explanation_in_several_places_is_one():
    """Negating x, the product or the output is the same, whatever x is."""
    cause, _ = cause_of(sliced(lambda x: x * ROOT.gain, lambda x: -x * ROOT.gain))
    assert cause.confidence == confidence(cause.rule)
    assert not any(line.startswith("or") for line in cause.evidence)


def test_a_search_ends_with_its_time():
    with torch.inference_mode():
        part = sliced(block, lambda x: block(x) * (1 + 0.01 * numbers(2, 5, 6, seed=60)))
        assert search([part], MODEL, 0.0)[2] is False
        cause, note, _ = explain(iter([[part]]), MODEL, 0.0)
    assert cause is None
    assert "no cause among" in note


def test_a_fitted_number_is_that_of_the_engine():
    with torch.inference_mode():
        part = sliced(lambda x: x.tanh(), lambda x: (x * 1.7).tanh())
        leaf = next(i for i, node in enumerate(part.nodes) if node.label == "x")
        error, number = fit(lambda a: {leaf: lambda s, v, i: s.base[i] * a}, 1.0, part)
    assert number == pytest.approx(1.7, rel=1e-6)
    assert error < 1e-6


@pytest.mark.parametrize(
    ("number", "doubt", "text"),
    [
        (9.4e-6, 8e-7, "1e-05"),
        (9.4e-6, 1e-7, "9.4e-06"),
        (0.99000001, 1e-7, "0.99"),
        (499999.94, 0.5, "500000"),
        (-1.0, 0.0, "-1"),
        (0.0, 0.0, "0"),
        (math.inf, 1.0, "inf"),
    ],
)
def test_a_number_is_written_with_the_digits_that_are_known(number, doubt, text):
    assert shown(number, doubt) == text


def test_what_is_known_of_a_number_is_how_far_it_is_from_the_models_own():
    """A hundred-thousandth above 1 is known to a tenth of that, not of 1."""
    assert said(1.00001, 1.0, 0.02) == "1.00001"
    assert said(0.2500003, 0.5, 1e-6) == "0.25 (half of that)"
    assert said(0.5, 1.0, 1e-6) == "0.5"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: integers(w, 8, per_tensor=True), "wide holds int8 weights, one scale"),
        (lambda w: w * 1.01, "wide is multiplied by 1.01"),
        (lambda w: w.roll(1, 0), "channels are in other places"),
    ],
    ids=["one scale", "factor", "order"],
)
def test_a_large_product_is_tried_on_some_of_its_channels_and_judged_on_all(change, said):
    """The scale of the whole weight hangs on its largest number, wherever that is."""
    root = torch.nn.Module()
    root.wide = torch.nn.Parameter(numbers(1056, 1024, seed=3), requires_grad=False)
    root.wide.data[1000, 5] = 9.0
    x = numbers(1, 4, 1024)
    part = sliced(lambda x: F.linear(x, root.wide), lambda x: F.linear(x, change(root.wide)), x, root=root)
    small = part.narrowed()
    assert 64 < small.seen.actual.shape[-1] <= 66
    leaf = next(i for i, node in enumerate(part.nodes) if node.label == "wide")
    assert part.costly([leaf])
    with torch.inference_mode():
        cause, note, _ = explain(iter([[part]]), Model.of(root, "float32"), 60)
    assert note == ""
    assert said in cause.evidence[0]


def test_a_large_square_weight_that_is_transposed_is_named():
    root = torch.nn.Module()
    root.wide = torch.nn.Parameter(numbers(1056, 1056, seed=3), requires_grad=False)
    x = numbers(1, 4, 1056)
    part = sliced(lambda x: F.linear(x, root.wide), lambda x: F.linear(x, root.wide.T), x, root=root)
    with torch.inference_mode():
        cause, note, _ = explain(iter([[part]]), Model.of(root, "float32"), 60)
    assert (cause.rule, note) == ("mutants.layouts", "")
    assert "wide is transposed" in cause.evidence[0]


def test_a_small_product_has_no_narrower_slice():
    assert sliced(block, block).narrowed() is None
