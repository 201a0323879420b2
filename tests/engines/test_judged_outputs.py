"""What a run may conclude where the reference is no measure, and that every output of the deployed engine is judged.

Engines are real: a wrong one is exported from a model that computes something else while it is exported, or its session
is wrapped and hands over changed tensors.
"""

import math

import pytest
import torch
from torch import nn

from ditto_core import EngineSpec, Pair
from ditto_core.compare.text import failure_message
from ditto_core.compare.tolerance import Tolerance
from ditto_core.compare.verdict import DIVERGED, INCONCLUSIVE, WITHIN
from ditto_core.pair.pair_options import PairOptions
from tests.models import far_apart, llama

IDS = [5, 9, 33, 7, 100, 8, 2, 44]


class Changed:
    """A real session whose taps and outputs are changed on the way by ``change(name, tensor)``; None drops one."""

    def __init__(self, session, change):
        self._session, self._change = session, change

    def __getattr__(self, name):
        return getattr(self._session, name)

    def step(self, inputs, sink):
        outputs = self._session.step(inputs, lambda site, tensor: sink(site, self._change(site, tensor)))
        changed = {name: self._change(name, tensor) for name, tensor in outputs.items()}
        return {name: tensor for name, tensor in changed.items() if tensor is not None}


def pair_of(workspace, factory, change=None, side="engine", **fields):
    options = {name: fields.pop(name) for name in ("observer", "tolerance") if name in fields}
    pair = Pair(workspace, EngineSpec.of(factory, **fields), PairOptions(**{"observer": False, **options}))
    if change is not None:
        setattr(pair.sessions, side, Changed(getattr(pair.sessions, side), change))
    return pair


def exporting():
    return torch.compiler.is_exporting()


class HandNorm(nn.Module):
    """A norm written by hand in the model's dtype: squares of numbers above 256 exceed float16."""

    def __init__(self, sign):
        super().__init__()
        self.up, self.head, self.sign = nn.Linear(8, 16), nn.Linear(16, 4), sign

    def forward(self, x):
        h = self.up(x) * 400
        y = self.head(h / (h * h).mean(-1, keepdim=True).sqrt())
        return y * self.sign if exporting() else y


def made(model, **inputs):
    torch.manual_seed(0)
    return model(), inputs or {"x": torch.randn(5, 8)}


def healthy_norm():
    return made(lambda: HandNorm(1))


def negated_norm():
    return made(lambda: HandNorm(-1))


def zero_norm():
    return made(lambda: HandNorm(0))


def test_an_engine_that_keeps_float32_inside_passes_where_eager_overflows(workspace):
    run = pair_of(workspace, healthy_norm, dtype="float16", outputs="**").run()
    run.assert_close()
    head = next(r for r in run if r.site == "head")
    assert (head.verdict.status, head.verdict.bound) == (WITHIN, 1e-2)
    assert head.verdict.rule.endswith("first at head")


@pytest.mark.parametrize(("factory", "error"), [(negated_norm, 2.0), (zero_norm, 1.0)])
def test_a_wrong_output_that_the_overflowing_reference_cannot_judge_fails_unless_a_rule_judges_it(
    workspace, factory, error
):
    spec = {"dtype": "float16", "outputs": "**"}
    run = pair_of(workspace, factory, **spec).run()
    assert not run
    (output,) = run.unjudged_outputs
    assert (output.site, output.verdict.status) == ("output", INCONCLUSIVE)
    assert output.verdict.value == pytest.approx(error, rel=1e-2)
    with pytest.raises(AssertionError, match="output output, step 0, could not be judged"):
        run.assert_close()
    assert run.to_json()["inconclusive"] == 1
    assert not pair_of(workspace, factory, tolerance={"output": 0.1}, **spec).run().unjudged_outputs
    assert pair_of(workspace, factory, tolerance={"output": 3.0}, **spec).run()


def random_of(site, tensor):
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor.dtype)


@pytest.mark.parametrize("sites", ["**", "model.layers.*"])
@pytest.mark.parametrize("change", [lambda site, t: torch.zeros_like(t), random_of])
def test_where_attention_overflows_nothing_heals_and_no_flip_is_excused(workspace, sites, change):
    run = pair_of(workspace, far_apart, change, dtype="float16", outputs=sites).generate(IDS, max_new_tokens=2)
    assert not run
    assert run.unjudged_outputs
    assert not [r for r in run.healed if r.site in {u.site for u in run.inconclusive}]
    assert all(row.near_ties == () for row in run.tokens)
    assert all("overflows, first at model.layers.1" in r.verdict.rule for r in run.inconclusive)


def test_nan_of_the_engine_alone_fails_where_the_floor_is_infinite(workspace):
    def late(site, tensor):
        return torch.full_like(tensor, math.nan) if site in ("lm_head", "logits") else tensor

    run = pair_of(workspace, far_apart, late, dtype="float16", outputs="**").generate(IDS, max_new_tokens=1)
    assert {"lm_head", "logits"} <= {r.site for r in run if r.verdict.status == DIVERGED}


class Cancelling(nn.Module):
    """``split`` [x, x + 1e-4 x] is rounded, and ``join`` takes the difference: a ten-thousandth of its terms."""

    def __init__(self):
        super().__init__()
        self.split, self.join, self.last = nn.Linear(8, 16), nn.Linear(16, 8, bias=False), nn.Linear(8, 4)
        with torch.no_grad():
            self.split.weight[8:] = self.split.weight[:8]
            self.split.bias[8:] = 1.0001 * self.split.bias[:8] + 1e-4
            self.join.weight.copy_(torch.cat([torch.eye(8), -torch.eye(8)], 1))

    def forward(self, x):
        return self.last(self.join(self.split(x)))


def cancelling():
    return made(Cancelling)


def test_what_cannot_be_judged_says_how_much_its_sums_cancel(workspace):
    def wrong(site, tensor):
        return -tensor if site in ("join", "last", "output") else tensor

    run = pair_of(workspace, cancelling, wrong, dtype="float16", outputs="**").run()
    model, inputs = cancelling()
    h = model.split(next(iter(inputs.values()))).detach().double()
    expected = float((h[:, :8].abs() + h[:, 8:].abs()).norm() / (h[:, :8] - h[:, 8:]).norm())
    (join,) = [r for r in run.inconclusive if r.site == "join"]
    assert join.conditioning == pytest.approx(expected, rel=0.2)
    assert expected > 1000
    assert f"sum of |terms| here is {join.conditioning:.2g} x |sum|" in join.verdict.rule
    assert [r.conditioning for r in run.results if r.site == "split"] == [None]
    assert type(run).from_json(run.to_json()).results == run.results


class Sampler(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x):
        mean = self.enc(x)
        return self.dec(mean + torch.randn_like(mean)) * (0 if exporting() else 1)


def sampler():
    return made(Sampler)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_reference_that_draws_random_numbers_is_named_and_judges_nothing_behind_them(workspace, dtype):
    for _ in range(2):  # measured, then from the cache
        run = pair_of(workspace, sampler, dtype=dtype, outputs="**").run()
        assert not run
        assert {r.site for r in run.inconclusive} == {"dec", "output"}
        assert run.inconclusive[0].verdict.rule == "the reference does not repeat itself, first at dec"
        assert "fixed seed" in failure_message(run).splitlines()[-1]


class Remembers(nn.Module):
    """Counts its calls where no step gives them back: in its class."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.dec = nn.Linear(8, 6)

    def forward(self, x):
        type(self).calls += 1
        return self.dec(x) * type(self).calls


def remembers():
    return made(Remembers)


def test_a_reference_that_remembers_in_its_class_is_told_and_not_judged(workspace):
    run = pair_of(workspace, remembers, outputs="**").run()
    assert [r.site for r in run.inconclusive] == ["output"]
    assert "nothing kept in a class" in failure_message(run).splitlines()[-1]


@pytest.mark.parametrize("wrong", [math.nan, 0.0])
def test_the_engine_without_taps_is_judged_because_it_is_deployed(workspace, wrong):
    pair = pair_of(
        workspace, llama, lambda site, t: torch.full_like(t, wrong), "untapped", outputs="model.norm", observer=True
    )
    run = pair.generate(IDS, max_new_tokens=2)
    assert [(r.site, r.step) for r in run.failures] == [("logits:untapped", 0), ("logits:untapped", 1)]
    assert pair_of(workspace, llama, outputs="model.norm", observer=True).generate(IDS, max_new_tokens=2)


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        hidden = torch.relu(self.a(x))
        return {"hidden": hidden, "pooler": self.b(hidden)}


def two_outputs():
    return made(TwoOutputs)


def test_an_output_that_the_engine_omits_fails(workspace):
    def dropped(site, tensor):
        return None if site == "pooler" else tensor

    run = pair_of(workspace, two_outputs, dropped, outputs="a").run()
    assert not run
    assert list(run.missing) == ["pooler"]


class Capped(nn.Module):
    """The cap behind the head is lost in the export: the tapped head is the graph's output, and right."""

    def __init__(self):
        super().__init__()
        self.lm_head = nn.Linear(8, 50)

    def forward(self, x):
        scores = self.lm_head(x)
        return {"scores": scores if exporting() else torch.tanh(scores)}


def capped():
    return made(Capped)


def test_an_output_is_judged_itself_though_a_tap_has_its_name_in_the_graph(workspace):
    run = pair_of(workspace, capped, outputs="lm_head").run()
    assert {r.site: r.ok for r in run} == {"lm_head": True, "scores": False}


def test_the_output_changed_behind_a_right_tap_fails(workspace):
    def rolled(site, tensor):
        return tensor.roll(1, -1) if site == "logits" else tensor

    run = pair_of(workspace, llama, rolled, outputs="lm_head").generate(IDS, max_new_tokens=1)
    assert [r.site for r in run.failures] == ["logits"]


def test_a_tap_that_is_the_output_is_measured_once(workspace):
    run = pair_of(workspace, llama, outputs=["model.norm", "lm_head"]).generate(IDS, max_new_tokens=2)
    assert run.sites == ("model.norm", "lm_head")
    assert {(r.site, r.step) for r in run if r.final} == {("lm_head", 0), ("lm_head", 1)}


class Translator(nn.Module):
    """Encoder and decoder: the mask is the encoder's, and the output called logits the decoder's."""

    def __init__(self, wrong):
        super().__init__()
        self.embed, self.head, self.wrong = nn.Embedding(50, 8), nn.Linear(8, 50), wrong

    def forward(self, input_ids, attention_mask, decoder_input_ids):
        context = (self.embed(input_ids) * attention_mask[..., None].to(torch.float32)).sum(1, keepdim=True)
        scores = self.head(self.embed(decoder_input_ids) + context)
        if self.wrong and exporting():
            scores = torch.cat([scores[:, :-2], scores[:, -2:] * 3], 1)
        return {"logits": scores + 0.5}


def translator(length, wrong):
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[:, 5:] = 0
    ids = torch.arange(14).reshape(2, 7)
    decoded = torch.arange(2 * length).reshape(2, length) + 20
    return made(lambda: Translator(wrong), input_ids=ids, attention_mask=mask, decoder_input_ids=decoded)


def shorter():
    return translator(4, False)


def wrong_end():
    return translator(7, True)


@pytest.mark.parametrize(("factory", "ok"), [(shorter, True), (wrong_end, False)])
def test_the_mask_of_an_encoder_is_not_laid_over_a_decoders_logits(workspace, factory, ok):
    run = pair_of(workspace, factory, outputs="head").run()
    assert bool(run) is ok
    assert not run.missing


class ClassMap(nn.Module):
    def __init__(self, every):
        super().__init__()
        self.conv, self.every = nn.Conv2d(3, 80, 1), every

    def forward(self, images):
        classes = self.conv(images).argmax(1)
        if exporting() and self.every:
            hit = torch.zeros(32, 32, dtype=torch.int64)
            hit[:: self.every, :: self.every] = 1
            classes = (classes + hit) % 80
        return {"classes": classes, "first": classes > 40}


def class_map(every):
    return made(lambda: ClassMap(every), images=torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(1)))


def right_map():
    return class_map(0)


def wrong_map():
    return class_map(7)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_25_wrong_classes_of_1024_fail_and_those_that_nearly_tie_pass(workspace, dtype):
    right, wrong = (pair_of(workspace, f, dtype=dtype, outputs="conv").run() for f in (right_map, wrong_map))
    assert right
    found = next(r for r in wrong if r.site == "classes")
    assert found.metrics.mismatched >= 24
    assert (found.verdict.metric, found.verdict.status) == ("mismatched", DIVERGED)


class Encoder(nn.Module):
    """An integer site beside float outputs."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return {"hidden": self.b(torch.relu(self.a(x))), "ids": (x > 0).long()}


def encoder():
    return made(Encoder, x=torch.randn(4, 64, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("tolerance", [None, {"a": 1e9}])
def test_one_integer_output_or_one_rule_does_not_judge_a_quantized_engine(workspace, tolerance):
    def garbage(site, tensor):
        return tensor + 1e6 if tensor.is_floating_point() else tensor

    fields = {"outputs": ["a", "b"], "options": {"quantize": "int8"}}
    run = pair_of(workspace, encoder, garbage, tolerance=tolerance, **fields).run()
    assert not run
    assert list(run.missing) == ["logits"]
    judged = Tolerance.of({"a": 0.5, "b": 0.5, "hidden": 0.5})
    assert pair_of(workspace, encoder, tolerance=judged, **fields).run()


def test_a_quantized_decoder_is_judged_by_the_logits_of_every_real_token(workspace):
    prompts = [IDS, IDS[:3]]
    fields = {"outputs": "model.norm", "options": {"quantize": "int8"}}
    good = pair_of(workspace, llama, **fields).generate(prompts, max_new_tokens=2)
    assert [m.positions for m in good.logits] == [len(IDS) + 3, 2]

    def only_the_last_is_right(site, tensor):
        return torch.cat([-tensor[:, :-1], tensor[:, -1:]], 1) if site == "logits" else tensor

    bad = pair_of(workspace, llama, only_the_last_is_right, **fields).generate(prompts, max_new_tokens=1)
    assert not bad.logits_ok
