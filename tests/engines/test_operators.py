"""Operators of the model's own code are sites by their line, between the modules and behind the last one."""

import pytest
import torch

from ditto_core.cache import Cache
from ditto_core.model.listing import list_sites
from ditto_core.pair.pair import Pair
from ditto_core.sites import OPERATORS, is_operator, matches
from ditto_core.spec import EngineSpec
from tests.code_models import unet, yolo
from tests.faults.graph import scaled
from tests.faults.inject import FaultyWorkspace
from tests.models import bert
from tests.module_models import faulty_detector
from tests.zoo import factory

resnet = factory("resnet")
UNET_NORM = "unet.mid_block.resnets.0.norm2"
RESNET_NORM = "resnet.embedder.embedder.normalization"
FINEST = ("**", OPERATORS)
SIZES = {yolo: (16, 32, 64), unet: (8, 16, 64)}


@pytest.fixture
def pair_of(workspace):
    pairs = []

    def make(source, workspace=workspace, outputs=FINEST):
        profile = dict.fromkeys(("height", "width"), SIZES[source]) if source in SIZES else None
        pairs.append(Pair(workspace, EngineSpec.of(source, outputs=outputs, profile=profile)))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


@pytest.fixture
def localized(pair_of, shared_cache_dir, tmp_path):
    def localize(source, fault, outputs=FINEST):
        return pair_of(source, FaultyWorkspace(Cache(shared_cache_dir), fault, tmp_path), outputs).run(localize=True)

    return localize


def test_an_operator_is_selected_by_selectors_with_a_space_alone():
    site = "decode_head.forward:42 interpolate"
    assert matches(OPERATORS, site)
    assert matches("decode_head.*:* interpolate", site)
    assert not matches("**:**", site)
    assert not matches("decode_head.*:*", site)
    assert not matches(OPERATORS, "decode_head:in")


@pytest.mark.parametrize("source", [yolo, unet, bert])
def test_every_operator_of_a_healthy_model_is_compared_and_none_is_blamed(pair_of, source):
    pair = pair_of(source)
    run = pair.run(localize=True)
    run.assert_close()
    assert not run.missing
    assert len([site for site in run.sites if is_operator(site)]) >= 8
    assert not run.localization.blamed


def test_boxes_indices_and_what_is_kept_are_judged_for_images_of_two_sizes(pair_of):
    pair = pair_of(yolo)
    for size in ((32, 32), (48, 24)):
        run = pair.run({"image": torch.rand(3, 3, *size)})
        run.assert_close()
        assert {"kinds", "index", "keep"} <= set(run.sites)
        assert {"boxes", "scores"} <= {tap.value for tap in run.taps if tap.site in run.sites}


def test_a_step_of_diffusion_is_right_for_images_of_three_sizes_and_any_text(pair_of):
    pair = pair_of(unet)
    for rows, height, width, words in ((1, 8, 8, 5), (3, 24, 16, 2), (2, 32, 48, 11)):
        given = {"sample": torch.randn(rows, 4, height, width), "timestep": torch.randint(20, 1000, (rows,))}
        pair.run({**given, "text": torch.randn(rows, words, 16)}).assert_close()


@pytest.mark.parametrize(
    ("source", "code"),
    [
        (yolo, "F.interpolate(coarse"),  # between two modules
        (yolo, "sizes = flat[..., 2:4].exp()"),  # behind the last one
        (unet, "F.interpolate(hidden_states, scale_factor=2.0"),
        (unet, "torch.cat([hidden_states, res_hidden_states]"),
        (unet, "clean = (sample - "),
    ],
)
def test_a_fault_in_the_models_own_code_is_named_at_its_line(pair_of, localized, source, code):
    values = {tap.value: tap for tap in pair_of(source).engine.taps if code in tap.source}
    value, tap = next((v, t) for v, t in reversed(values.items()) if is_operator(t.site) or is_operator(v))
    run = localized(source, scaled(value, 1.01))
    assert not run
    assert [blamed.site for blamed in run.localization.blamed] == [tap.site]
    assert code in run.localization.first.source
    assert run.localization.first.local == pytest.approx(0.01, rel=0.02)


def epsilon(site, value):
    """Let a BatchNormalization of an engine have another epsilon."""

    def fault(edit):
        node = edit.upstream(site, "BatchNormalization")
        next(attribute for attribute in node.attribute if attribute.name == "epsilon").f = value

    return fault


@pytest.mark.parametrize(
    ("source", "site", "fault"),
    [
        (yolo, "neck.join.1", epsilon("neck.join.1", 0.1)),
        (resnet, RESNET_NORM, scaled(RESNET_NORM, 1.01)),
        (unet, UNET_NORM, scaled(UNET_NORM, 1.01)),
    ],
    ids=["BatchNorm's epsilon", "BatchNorm of ResNet", "GroupNorm"],
)
def test_a_fault_of_a_norm_is_named_at_its_module(localized, source, site, fault):
    run = localized(source, fault, FINEST if source in (yolo, unet) else ("**",))
    assert not run
    assert [blamed.site for blamed in run.localization.blamed] == [site]


def test_an_operator_that_the_exported_model_alone_has_is_told_and_blamed(pair_of):
    run = pair_of(faulty_detector).run(localize=True)
    assert not run
    assert run.first_bad.site == "boxes"
    (blamed,) = run.localization.blamed
    assert blamed.site.endswith(" flip")
    assert "boxes.flip(-1)" in blamed.source
    assert any("flip is computed in the exported model alone" in note for note in run.notes)


def test_sites_lists_operators_on_request(workspace):
    model = workspace.model(EngineSpec.of(yolo).model)
    assert [site.site for site in list_sites(model, ["neck.*:* interpolate"])] == ["neck.forward:23 interpolate"]
    assert not any(is_operator(name) for site in list_sites(model, ["**"]) for name in (site.site, *site.aliases))
