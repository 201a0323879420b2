import pytest

from ditto_core.errors import SelectorError
from ditto_core.sites import Provenance, Tap, matches


@pytest.fixture
def provenance():
    taps = (
        Tap("model.embed", "embed", aliases=("model.layers.0:in",)),
        Tap("model.layers.0.attn:q_rope", "q"),
        Tap("model.layers.0.attn.o_proj", "o", aliases=("model.layers.0.attn",)),
        Tap("model.layers.0", "l0"),
        Tap("model.layers.10", "l10"),
    )
    return Provenance(taps)


@pytest.mark.parametrize(
    ("selector", "site", "expected"),
    [
        ("model.layers.*", "model.layers.3", True),
        ("model.layers.*", "model.layers.3.mlp", False),
        ("model.layers.**", "model.layers.3.mlp.up_proj", True),
        ("**", "model.layers.3:in", False),
        ("**:in", "model.layers.3:in", True),
        ("**:*", "model.layers.3:in.attention_mask", False),
        ("**:**", "model.layers.3:in", True),
        ("model.layers.1", "model.layers.10", False),
        ("model.layers.?", "model.layers.7", True),
        ("model.layers.[03]", "model.layers.3", True),
        ("model.layers.[!03]", "model.layers.3", False),
        ("model.layers.3.self_attn:q_*", "model.layers.3.self_attn:q_rope", True),
        ("model+layers", "modelllayers", False),
        ("past[0].key", "past[0].key", True),
        ("a[]b", "a[]b", True),
    ],
)
def test_a_star_matches_one_component_and_two_stars_match_any(selector, site, expected):
    assert matches(selector, site) is expected


def test_selected_taps_come_in_topological_order(provenance):
    assert [t.site for t in provenance.select(["model.layers.*", "model.embed"])] == [
        "model.embed",
        "model.layers.0",
        "model.layers.10",
    ]


@pytest.mark.parametrize("selector", ["**:**", "**:** **"])
def test_all_ports_and_all_operators_of_a_model_without_any_are_none(selector):
    provenance = Provenance((Tap("layer", "layer"),))
    assert [t.site for t in provenance.select(["**", selector])] == ["layer"]


def test_a_tap_selected_by_its_alias_carries_the_alias(provenance):
    (tap,) = provenance.select(["model.layers.0.attn"])
    assert (tap.site, tap.value, tap.aliases) == ("model.layers.0.attn", "o", ("model.layers.0.attn.o_proj",))


def test_a_tap_selected_by_both_names_appears_once_under_its_own(provenance):
    assert [t.site for t in provenance.select(["model.layers.0.attn", "model.layers.*.attn.*"])] == [
        "model.layers.0.attn.o_proj"
    ]


def test_a_selector_that_matches_nothing_names_the_closest_sites(provenance):
    with pytest.raises(SelectorError, match=r"'model\.layers\.O' matches none of 7 sites; closest: model\.layers\.0"):
        provenance.select(["model.layers.O"])


def test_provenance_survives_json(provenance, tmp_path):
    provenance.save(tmp_path / "p.json")
    assert Provenance.load(tmp_path / "p.json") == provenance


@pytest.mark.parametrize("selector", ["a[]b", "a[z-a]"])
def test_a_malformed_set_is_one_line(selector):
    with pytest.raises(SelectorError, match="is malformed"):
        matches(selector, "model.layers")
