"""A recorder hands tensors over, puts replacements in their place, and names calls."""

import copy
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from ditto_core import tap
from ditto_core.backends.eager import cheapest
from ditto_core.model import recorder
from ditto_core.model.containers import map_tensors
from ditto_core.model.recorder import Recorder
from ditto_core.sites import Tap, is_operator


class Twice(nn.Module):
    """Calls one module twice, once with a word."""

    def __init__(self):
        super().__init__()
        self.part = Part()

    def forward(self, x):
        return self.part(self.part(x, "first")["out"], scale=torch.tensor(3.0))["out"]


class Part(nn.Module):
    def forward(self, x, word="", scale=torch.tensor(1.0)):  # noqa: B008
        return {"out": tap("half", x / 2) * scale, "word": word}


class Windows(nn.Module):
    """Gives one name to a tensor of each window."""

    def __init__(self):
        super().__init__()
        self.part = Halves()

    def forward(self, x):
        return self.part(self.part(x))


class Halves(nn.Module):
    def forward(self, x):
        return torch.cat([tap("window", 2 * half) for half in x.chunk(2)])


def record(replace):
    seen = []

    def on_tensor(site, tensor, module):
        seen.append((site, float(tensor)))
        return replace.get(site)

    model = Twice()
    with Recorder(model, on_tensor).recording():
        result = float(model(torch.tensor(8.0)))
    return result, seen


def test_calls_are_named_by_their_text_argument_or_their_number():
    result, seen = record({})
    assert result == 6.0
    assert [site for site, _ in seen] == [
        "part@first:in",
        "part@first:half",
        "part@first",
        "part:in",
        "part:in.scale",
        "part:half",
        "part",
    ]


def test_inputs_named_tensors_and_outputs_are_replaced():
    assert record({"part:in": torch.tensor(20.0)})[0] == 30.0
    assert record({"part:in.scale": torch.tensor(1.0)})[0] == 2.0
    assert record({"part@first:half": torch.tensor(100.0)})[0] == 150.0
    assert record({"part": torch.tensor(-1.0)})[0] == -1.0


def test_mapping_changes_only_what_holds_a_replaced_tensor():
    old, new = torch.zeros(1), torch.ones(1)
    value = {"a": (old, 5), "b": [old]}
    assert map_tensors(value, lambda key, tensor: None) is value
    changed = map_tensors(value, lambda key, tensor: new if key == "a.0" else None)
    assert changed["a"] == (new, 5)
    assert changed["b"] is value["b"]


def test_what_a_hook_of_the_modules_own_makes_of_an_output_is_handed_over_and_the_module_is_left_as_it_was():
    model, seen = nn.Sequential(nn.Identity()), {}
    model[0].register_forward_hook(lambda module, args, output: output + 1)
    before = {**vars(model[0])}
    with Recorder(model, lambda site, tensor, _: seen.update({site: tensor.item()})).recording():
        assert model(torch.tensor(1.0)) == 2
    assert seen == {"0:in": 1, "0": 2}
    assert vars(model[0]) == before


def test_a_module_that_is_compiled_by_itself_is_listened_to_as_well():
    model, seen = nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity())), []
    model[1].compile(backend="eager")
    with Recorder(model, lambda site, tensor, _: seen.append(site)).recording():
        model(torch.tensor(1.0))
    assert seen == ["0:in", "0", "1:in", "1.0:in", "1.0", "1"]


class Copying(nn.Module):
    """Calls a copy of its part that has other weights."""

    def __init__(self):
        super().__init__()
        self.part = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        other = copy.deepcopy(self.part)
        other.weight.zero_()
        return self.part(x) + other(x)


def test_a_copy_of_a_module_that_is_listened_to_is_a_module_of_its_own():
    model, x = Copying(), torch.ones(1, 1)
    with torch.no_grad(), Recorder(model, lambda *seen: None).recording():
        assert model(x) == model.part.weight


def test_recorders_of_one_module_do_not_get_in_each_others_way():
    model, seen = nn.Sequential(nn.Identity()), []
    first, second = (
        Recorder(model, lambda site, tensor, _, name=name: seen.append((name, site)), ["0"]) for name in (1, 2)
    )
    with first.recording(), second.recording():
        model(torch.ones(1))
    assert seen == [(1, "0"), (2, "0")]
    seen.clear()
    with second.recording():
        model(torch.ones(1))
    assert seen == [(2, "0")]
    assert "_call_impl" not in vars(model[0])


class Threaded(nn.Module):
    """Calls its part in another thread."""

    def __init__(self):
        super().__init__()
        self.part = nn.Identity()

    def forward(self, x):
        with ThreadPoolExecutor() as pool:
            return pool.submit(self.part, x).result()


def test_a_module_that_another_thread_calls_is_heard():
    assert "part" in sites_of(nn.Sequential(Threaded()).get_submodule("0"), ["part"])


def test_the_modules_inside_of_torchs_fused_encoder_are_called():
    model, seen = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), []
    with torch.inference_mode(), Recorder(model, lambda site, *rest: seen.append(site), ["self_attn"]).recording():
        model(torch.ones(1, 3, 8))
    assert seen == ["self_attn", "self_attn:out.1"][: len(seen)]
    assert seen
    assert torch.backends.mha.get_fastpath_enabled()


class Sums(nn.Module):
    """Two modules whose own code adds; each also multiplies."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Sum(), Sum()

    def forward(self, x):
        return self.second(self.first(x) * 3)


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x):
        return (self.inner(x) + 1) * 2


def sites_of(model, wanted=None):
    seen = []
    with Recorder(model, lambda site, tensor, _: seen.append(site), wanted, operators=wanted is None).recording():
        model(torch.tensor(8.0))
    return seen


def test_only_the_operators_that_are_wanted_are_looked_at():
    model = Sums()
    wanted = next(site for site in sites_of(model) if site.startswith("second.") and site.endswith(" add"))
    assert [site for site in sites_of(model, [wanted]) if is_operator(site)] == [wanted]


def test_without_a_wanted_operator_torch_is_not_watched(monkeypatch):
    monkeypatch.setattr(recorder, "Operators", None)
    assert "first" in sites_of(Sums(), ["first"])


def test_a_tap_with_a_modules_name_is_not_read_by_its_operator():
    named, alone = (
        Tap("first", "x", aliases=("first.forward:9 mul",)),
        Tap("first.forward:9 add", "y", aliases=("first.forward:9 mul",)),
    )
    assert cheapest(named) == ["first"]
    assert cheapest(alone) == ("first.forward:9 mul", "first.forward:9 add")


def test_a_name_that_one_call_gives_again_is_numbered():
    seen, model = {}, Windows()
    with Recorder(model, lambda site, tensor, module: seen.update({site: tensor})).recording():
        model(torch.tensor([1.0, 3.0]))
    windows = {site: tensor.item() for site, tensor in seen.items() if ":window" in site}
    assert windows == {"part:window": 2, "part:window@1": 6, "part@1:window": 4, "part@1:window@1": 12}
