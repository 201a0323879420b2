"""Names of two dumps are aligned by rules that match whole names, never by position or by a part of a name."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ditto_core.compare.dumps import compare_dumps
from ditto_core.dumps import open_dump
from ditto_core.dumps.namemap import NameMap, Rule
from ditto_core.dumps.padding import Padding
from ditto_core.errors import TraceError, UsageError


def folder(path, *steps):
    path.mkdir()
    for i, tensors in enumerate(steps):
        save_file({name: torch.as_tensor(t).contiguous() for name, t in tensors.items()}, path / f"step{i}.safetensors")
    return path


def result(pairs):
    return {p.name: (p.actual.tolist(), p.expected.tolist()) for p in pairs.pairs()}


def test_equal_names_pair_and_the_rest_is_listed_on_its_side(tmp_path):
    a = folder(tmp_path / "a", {"x": [1.0], "layer.1": [2.0]}, {"x": [3.0]})
    b = folder(tmp_path / "b", {"x": [4.0], "layer.10": [5.0]}, {"x": [6.0], "late": [7.0]}, {"x": [8.0]})
    pairs = compare_dumps(a, b)
    assert [(p.step, p.name, p.actual.item(), p.expected.item(), p.problem) for p in pairs.pairs()] == [
        (0, "x", 1, 4, ""),
        (1, "x", 3, 6, ""),
    ]
    assert pairs.only_actual() == [(0, "layer.1")]
    assert pairs.only_expected() == [(0, "layer.10"), (1, "late")]
    assert pairs.steps == (2, 3)


def test_no_common_name_is_an_error_not_an_empty_success(tmp_path):
    a, b = folder(tmp_path / "a", {"q_proj": [1.0]}), folder(tmp_path / "b", {"mlp_out": [1.0]})
    with pytest.raises(TraceError, match=r"none of the 1 names of .*'q_proj' against 'mlp_out'.*give a name map"):
        compare_dumps(a, b)


def test_a_dump_without_steps_is_an_error(tmp_path):
    (tmp_path / "b.json").write_text('{"lst": [["r", []]], "polygraphy_class": "RunResults"}')
    with pytest.raises(TraceError, match=r"b.json holds no steps"):
        compare_dumps(folder(tmp_path / "a", {"x": [1.0]}), tmp_path / "b.json")


def test_renaming_with_captures_works_from_either_side(tmp_path):
    a = folder(tmp_path / "a", {"layers.3.mlp": [1.0], "layers.12.mlp": [2.0]})
    b = folder(tmp_path / "b", {"model.layers.3.mlp": [3.0], "model.layers.12.mlp": [4.0]})
    rules = {"layers.{i}.mlp": "model.layers.{i}.mlp"}
    expected = {"model.layers.3.mlp": ([1.0], [3.0]), "model.layers.12.mlp": ([2.0], [4.0])}
    assert result(compare_dumps(a, b, name_map=rules)) == expected
    swapped = {name: (theirs, ours) for name, (ours, theirs) in expected.items()}
    assert result(compare_dumps(b, a, name_map=rules)) == swapped


@pytest.mark.parametrize(
    ("source", "target", "name", "becomes"),
    [
        ("layers.{i}", "m.{i}", "layers.3", ["m.3"]),
        ("layers.{i}", "m.{i}", "layers.3.mlp", []),
        ("layers.{i}", "m.{i}", "model.layers.3", []),
        ("t.{rest:**}", "model.{rest}", "t.layers.3.mlp:in", ["model.layers.3.mlp:in"]),
        ("a.{i}.b.{i}", "{i}", "a.1.b.1", ["1"]),
        ("a.{i}.b.{i}", "{i}", "a.1.b.2", []),
        ("a.{i}.{j}", "{j}.{i}", "a.x.y", ["y.x"]),
        ("logits", "output:logits", "logits", ["output:logits"]),
        ("x.y", "z", "xay", []),
    ],
)
def test_a_pattern_matches_whole_names(source, target, name, becomes):
    assert Rule(source, (target,)).match(name) == becomes


def test_captures_may_be_numbered():
    assert Rule("h.{0}.attn.{1}", ("l.{1}.{0}",)).match("h.3.attn.q") == ["l.q.3"]


def test_the_first_rule_that_matches_counts():
    rules = NameMap.of([("layers.0.mlp", "special"), ("layers.{i}.mlp", "model.{i}")])
    assert list(rules.entries(["layers.0.mlp", "layers.1.mlp", "other"])) == ["special", "model.1", "other"]


def test_two_names_that_become_one_are_an_error():
    with pytest.raises(TraceError, match=r"'a.1.x' and 'b.1.x' both become 'm.1'"):
        NameMap.of({"a.{i}.x": "m.{i}", "b.{i}.x": "m.{i}"}).entries(["a.1.x", "b.1.x"])


def test_a_rule_about_nothing_is_an_error_with_the_nearest_name(tmp_path):
    a, b = folder(tmp_path / "a", {"layers.0.mlp": [1.0]}), folder(tmp_path / "b", {"layers.0.mlp": [1.0]})
    with pytest.raises(UsageError, match=r"'layer.{i}.mlp' matches none of 2 names on either side.*'layers.0.mlp'"):
        compare_dumps(a, b, name_map={"layer.{i}.mlp": "x.{i}"})


def test_a_rule_about_a_later_step_only_is_no_error(tmp_path):
    a = folder(tmp_path / "a", {"x": [1.0]}, {"y": [2.0]})
    b = folder(tmp_path / "b", {"x": [1.0]}, {"z": [3.0]})
    assert result(compare_dumps(a, b, name_map={"y": "z"}))["z"] == ([2.0], [3.0])


QKV = NameMap((Rule("layers.{i}.qkv", ("model.layers.{i}.q", "model.layers.{i}.k", "model.layers.{i}.v"), (4, 2, 2)),))


def test_fused_qkv_is_cut_by_head_counts(tmp_path):
    # 4 query heads and 2 key/value heads of size 3: widths 12, 6 and 6
    fused = torch.arange(2 * 24.0).reshape(2, 24)
    a = folder(tmp_path / "a", {"layers.7.qkv": fused})
    parts = {"q": fused[:, :12], "k": fused[:, 12:18], "v": fused[:, 18:]}
    b = folder(tmp_path / "b", {f"model.layers.7.{n}": t for n, t in parts.items()})
    pairs = compare_dumps(a, b, name_map=QKV)
    assert result(pairs) == {f"model.layers.7.{n}": (t.tolist(), t.tolist()) for n, t in parts.items()}
    assert pairs.only_actual() == pairs.only_expected() == []


def test_fused_gate_and_up_are_cut_in_half_along_any_axis(tmp_path):
    fused = torch.arange(12.0).reshape(4, 3)
    rule = Rule("{i}.gate_up", ("{i}.gate", "{i}.up"), (1, 1), axis=0)
    a = folder(tmp_path / "a", {"0.gate_up": fused})
    b = folder(tmp_path / "b", {"0.gate": fused[:2], "0.up": fused[2:]})
    assert all(torch.equal(p.actual, p.expected) for p in compare_dumps(a, b, name_map=NameMap((rule,))).pairs())


def test_an_axis_that_the_sizes_do_not_divide_is_an_error(tmp_path):
    a = folder(tmp_path / "a", {"layers.0.qkv": torch.zeros(2, 23)})
    b = folder(tmp_path / "b", {"model.layers.0.q": torch.zeros(2, 12)})
    with pytest.raises(TraceError, match=r"has shape \[2, 23\]: axis -1 cannot be cut in the ratio \(4, 2, 2\)"):
        list(compare_dumps(a, b, name_map=QKV).pairs())


def test_suffixes_match_only_when_asked(tmp_path):
    a = folder(tmp_path / "a", {"x": [0.0], "layers.1.mlp": [1.0], "o_proj": [2.0]})
    b = folder(
        tmp_path / "b", {"x": [0.0], "model.layers.1.mlp": [3.0], "model.layers.11.mlp": [4.0], "foo_proj": [5.0]}
    )
    assert set(result(compare_dumps(a, b))) == {"x"}
    pairs = compare_dumps(a, b, name_map=NameMap(suffix=True))
    assert result(pairs)["model.layers.1.mlp"] == ([1.0], [3.0])
    assert pairs.only_actual() == [(0, "o_proj")]
    assert pairs.only_expected() == [(0, "foo_proj"), (0, "model.layers.11.mlp")]


@pytest.mark.parametrize("swap", [False, True])
def test_a_suffix_that_fits_two_names_is_an_error(tmp_path, swap):
    dumps = [folder(tmp_path / "a", {"mlp": [1.0]}), folder(tmp_path / "b", {"l.0.mlp": [1.0], "l.1.mlp": [1.0]})]
    with pytest.raises(TraceError, match=r"by suffix.*: use a name map"):
        compare_dumps(*(reversed(dumps) if swap else dumps), name_map=NameMap(suffix=True))


def test_different_shapes_are_said_and_nothing_is_broadcast(tmp_path):
    a, b = folder(tmp_path / "a", {"x": torch.zeros(1, 3)}), folder(tmp_path / "b", {"x": torch.zeros(2, 3)})
    (pair,) = compare_dumps(a, b).pairs()
    assert pair.problem == "shape [1, 3] against [2, 3]"


HIDDEN = torch.arange(2 * 4 * 3.0).reshape(2, 4, 3)
LEFT_MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])


@pytest.mark.parametrize("leading", [False, True])
def test_packed_tokens_compare_with_a_left_padded_batch_through_its_mask(tmp_path, leading):
    tokens = torch.stack([HIDDEN[0, 2], HIDDEN[0, 3], *HIDDEN[1]])
    grown = torch.cat([LEFT_MASK, torch.ones(2, 1, dtype=torch.int64)], 1)
    a = folder(tmp_path / "a", {"h": tokens[None] if leading else tokens}, {"h": torch.zeros(2, 3)})
    b = folder(tmp_path / "b", {"h": HIDDEN, "input:mask": LEFT_MASK}, {"h": torch.zeros(2, 1, 3), "input:mask": grown})
    first, second = compare_dumps(a, b, name_map=NameMap(padding=Padding(mask="input:mask"))).pairs()
    assert first.problem == second.problem == ""
    assert first.actual.tolist() == first.expected.tolist() == tokens.tolist()
    assert second.expected.shape == (2, 3)


def test_a_later_step_of_several_tokens_has_its_own_padding(tmp_path):
    grown = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 1]])
    dump = open_dump(folder(tmp_path / "a", {"mask": LEFT_MASK}, {"mask": grown}))
    assert Padding(mask="mask").real((dump,), 1).tolist() == [[True, True], [False, True]]


def test_a_mask_that_is_no_matrix_is_an_error(tmp_path):
    dumps = [folder(tmp_path / side, {"h": HIDDEN, "mask": torch.ones(4)}) for side in "ab"]
    with pytest.raises(TraceError, match=r"mask 'mask' has shape \[4\], expected \[batch, length\]"):
        list(compare_dumps(*dumps, name_map=NameMap(padding=Padding(mask="mask"))).pairs())


def test_two_sides_that_were_padded_differently_are_refused(tmp_path):
    """The engine's mask hides its wrong token, which the reference's would show."""
    wrong, hidden = HIDDEN.clone(), LEFT_MASK.clone()
    wrong[1, 0], hidden[1, 0] = 9.0, 0
    sides = {"engine": (wrong, hidden), "right": (HIDDEN, LEFT_MASK), "alike": (HIDDEN, hidden.bool())}
    dumps = {name: folder(tmp_path / name, {"h": h, "mask": mask}) for name, (h, mask) in sides.items()}
    named = NameMap(padding=Padding(mask="mask"))
    with pytest.raises(TraceError, match="'mask' tells of other padding in the one dump than in the other, step 0"):
        list(compare_dumps(dumps["engine"], dumps["right"], name_map=named).pairs())
    actual, expected = result(compare_dumps(dumps["engine"], dumps["alike"], name_map=named))["h"]
    assert actual == expected  # of one mask, as bool and as int64


def test_packed_tokens_compare_with_a_right_padded_batch_through_lengths(tmp_path):
    tokens = torch.stack([*HIDDEN[0, :1], *HIDDEN[1]])
    a = folder(tmp_path / "a", {"h": tokens, "lengths": torch.tensor([1.0, 4.0])}, {"h": torch.zeros(2, 3)})
    b = folder(tmp_path / "b", {"h": HIDDEN}, {"h": torch.zeros(2, 1, 3)})
    for padding in (Padding(lengths=(1, 4)), Padding(lengths="lengths")):
        first, second = compare_dumps(a, b, name_map=NameMap(padding=padding)).pairs()
        assert first.actual.tolist() == first.expected.tolist() == tokens.tolist()
        assert second.problem == ""


def test_the_side_of_the_padding_decides(tmp_path):
    a = folder(tmp_path / "a", {"h": torch.stack([*HIDDEN[0, 3:], *HIDDEN[1]])})
    b = folder(tmp_path / "b", {"h": HIDDEN})
    (pair,) = compare_dumps(a, b, name_map=NameMap(padding=Padding(lengths=(1, 4), side="left"))).pairs()
    assert torch.equal(pair.actual, pair.expected)


def test_last_token_logits_compare_with_all_logits(tmp_path):
    a = folder(tmp_path / "a", {"logits": torch.stack([HIDDEN[0, 1], HIDDEN[1, 3]])}, {"logits": torch.ones(2, 3)})
    b = folder(tmp_path / "b", {"logits": HIDDEN}, {"logits": torch.ones(2, 1, 3)})
    padding = Padding(lengths=(2, 4), last_token=("logits",))
    for pair in compare_dumps(a, b, name_map=NameMap(padding=padding)).pairs():
        assert pair.actual.tolist() == pair.expected.tolist()
        assert pair.actual.shape == (2, 3)


def test_where_both_sides_hold_every_token_each_of_them_is_compared(tmp_path):
    wrong = HIDDEN.clone()
    wrong[1, 0] += 1
    a, b = folder(tmp_path / "a", {"logits": wrong}), folder(tmp_path / "b", {"logits": HIDDEN})
    padding = Padding(lengths=(2, 4), last_token=("logits",))
    (pair,) = compare_dumps(a, b, name_map=NameMap(padding=padding)).pairs()
    assert pair.actual.shape == (6, 3)
    assert not torch.equal(pair.actual, pair.expected)


def test_what_only_one_side_could_pack_stays_as_it_was_dumped(tmp_path):
    a, b = folder(tmp_path / "a", {"h": torch.zeros(7, 3)}), folder(tmp_path / "b", {"h": HIDDEN})
    (pair,) = compare_dumps(a, b, name_map=NameMap(padding=Padding(lengths=(1, 4)))).pairs()
    said = "shape [7, 3] against [2, 4, 3]: the name map's padding is of 5 tokens in 2 rows of 4"
    assert pair.problem == said


def test_a_mask_that_neither_dump_has_is_an_error(tmp_path):
    a, b = folder(tmp_path / "a", {"h": [0.0], "mask": [1.0]}), folder(tmp_path / "b", {"h": [0.0]})
    with pytest.raises(TraceError, match=r"neither dump has the tensor 'masks' in step 0; did you mean 'mask'"):
        list(compare_dumps(a, b, name_map=NameMap(padding=Padding(mask="masks"))).pairs())


TOML = """
suffix = true

[names]
"layers.{i}" = "model.layers.{i}"

[[split]]
from = "layers.{i}.qkv"
to = ["model.layers.{i}.q", "model.layers.{i}.k", "model.layers.{i}.v"]
sizes = [4, 2, 2]

[padding]
lengths = [5, 3]
side = "left"
last_token = ["logits"]
"""
JSON = """{"suffix": true, "names": {"layers.{i}": "model.layers.{i}"},
 "split": [{"from": "layers.{i}.qkv", "to": ["model.layers.{i}.q", "model.layers.{i}.k", "model.layers.{i}.v"],
            "sizes": [4, 2, 2]}],
 "padding": {"lengths": [5, 3], "side": "left", "last_token": ["logits"]}}"""


@pytest.mark.parametrize(("name", "text"), [("map.toml", TOML), ("map.json", JSON)])
def test_a_file_says_the_same_as_the_objects(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    rename = Rule("layers.{i}", ("model.layers.{i}",))
    expected = NameMap((*QKV.rules, rename), suffix=True, padding=Padding("", (5, 3), "left", ("logits",)))
    assert NameMap.of(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[names]\n'a' = ", "map.toml cannot be read"),
        ("nmaes = 1", "unknown key 'nmaes'; did you mean 'names'"),
        ("[[split]]\nfrom = 'a'\nto = ['b', 'c']\nsizes = [1]", "'a' is cut into 2 names by sizes"),
        ("[[split]]\nfrom = 'a'\nto = ['b', 'c']", "no key 'sizes'"),
        ("[names]\n'layers.*' = 'x'", r"'layers.\*' has a \*, expected a capture"),
        ("[names]\n'layers.{i}' = 'x.{j}'", r"uses {j}, which 'layers.{i}' does not capture"),
        ("[padding]\nside = 'left'", "needs either mask or lengths"),
        ("[padding]\nmask = 'm'\nsides = 'left'", "unknown key 'sides' in padding; did you mean 'side'"),
        ("[padding]\nlengths = [1]\nside = 'lift'", "padding side 'lift', expected left or right; did you mean 'left'"),
    ],
)
def test_a_map_that_is_wrong_says_where(tmp_path, text, message):
    (tmp_path / "map.toml").write_text(text)
    with pytest.raises((TraceError, UsageError), match=message) as caught:
        NameMap.of(tmp_path / "map.toml")
    assert "\n" not in str(caught.value)


def test_a_map_that_is_not_there_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"nowhere.toml is missing"):
        NameMap.of(tmp_path / "nowhere.toml")


def test_tensors_are_read_one_pair_at_a_time(tmp_path):
    a = folder(tmp_path / "a", {"x": np.float32(1), "y": np.float32(2)})
    (tmp_path / "b").mkdir()
    np.save(tmp_path / "b/x.npy", np.float32(1))
    (tmp_path / "b/y.npy").write_bytes(b"\x93NUMPY broken")
    pairs = compare_dumps(a, tmp_path / "b").pairs()
    assert next(pairs).name == "x"
    with pytest.raises(TraceError, match=r"y.npy"):
        next(pairs)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1], "the file is [1], expected a table"),
        ({"names": ["a"]}, "names is ['a'], expected a table"),
        ({"names": {"a": 5}}, "'a' is 5, expected a name"),
        ({"split": {"from": "a"}}, "split is {'from': 'a'}, expected a list"),
        ({"split": ["x"]}, "an entry of split is 'x', expected a table"),
        ({"split": [{"from": "a"}]}, "an entry of split has no key 'to', expected from, to and sizes"),
        ({"split": [{"from": "a", "to": "qk", "sizes": [1, 1]}]}, "split's to is 'qk', expected a list"),
        (
            {"split": [{"from": "a", "to": ["b", "c"], "sizes": [2.5, 1]}]},
            "split's sizes is [2.5, 1], expected a list of whole numbers",
        ),
        ({"padding": {"lengths": 3}}, "padding's lengths is 3, expected a list of whole numbers"),
        ({"padding": {"lengths": [3, "x"]}}, "padding's lengths is [3, 'x'], expected a list of whole numbers"),
        ({"padding": "x"}, "padding is 'x', expected a table"),
        (
            {"padding": {"lengths": [3], "last_token": "logits"}},
            "padding's last_token is 'logits', expected a list of names",
        ),
        ({"suffix": "no"}, "suffix is 'no', expected true or false"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(data, message):
    with pytest.raises(UsageError) as error:
        NameMap.from_json(data)
    assert str(error.value) == f"name map: {message}"
