"""torchvision's own ResNet-50: ``make engines`` puts torchvision into a folder of its own, else skipped."""

import pytest
import torch

pytest.importorskip("tests.cuda_torchvision", reason="torchvision: make engines")

from ditto_core.cache import Cache
from ditto_core.pair.pair import Pair
from ditto_core.sites import OPERATORS
from ditto_core.spec import EngineSpec
from tests.code_models import lively
from tests.cuda_torchvision import torchvision
from tests.faults.graph import scaled
from tests.faults.inject import FaultyWorkspace

SIZES = {"height": (32, 64, 128), "width": (32, 64, 128)}


def resnet50():
    torch.manual_seed(0)
    return lively(torchvision.models.resnet50(weights=None)), {"x": torch.randn(2, 3, 64, 64)}


@pytest.fixture
def pair_of(workspace):
    pairs = []

    def make(workspace=workspace, **fields):
        pairs.append(Pair(workspace, EngineSpec.of(resnet50, profile=SIZES, **{"outputs": "**", **fields})))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


@pytest.fixture
def localized(pair_of, shared_cache_dir, tmp_path):
    def localize(fault, **fields):
        run = pair_of(FaultyWorkspace(Cache(shared_cache_dir), fault, tmp_path), **fields).run(localize=True)
        assert not run
        return run.localization

    return localize


def test_every_module_agrees_for_images_of_three_sizes(pair_of):
    pair = pair_of()
    run = pair.run(localize=True)
    run.assert_close()
    assert not run.missing
    assert {"relu", "layer1.0.bn3", "layer3.5.relu@2", "layer4.2.relu@2", "fc"} <= set(run.sites)
    assert not run.localization.blamed
    for size in ((1, 3, 64, 32), (3, 3, 96, 128)):
        pair.run({"x": torch.randn(size)}).assert_close()


def test_half_precision_agrees(pair_of):
    pair_of(dtype="float16").run().assert_close()


@pytest.mark.parametrize("site", ["bn1", "layer3.2.bn2", "layer4.0.downsample.1"])
def test_a_fault_at_a_batch_norm_is_named_there(localized, site):
    found = localized(scaled(site, 1.01))
    assert [blamed.site for blamed in found.blamed] == [site]
    assert found.first.local == pytest.approx(0.01, rel=0.02)


def test_a_fault_of_a_sum_between_two_modules_is_named_at_its_line(pair_of, localized):
    finest = {"outputs": ("**", OPERATORS)}
    tap = next(t for t in pair_of(**finest).engine.taps if t.site.startswith("layer2.1.") and "out += " in t.source)
    found = localized(scaled(tap.value, 1.01), **finest)
    assert [blamed.site for blamed in found.blamed] == [tap.site]
    assert "out += identity" in found.first.source
