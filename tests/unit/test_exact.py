"""A reference in float32 is one, whatever the process allows torch: on GPUs convolutions are TF32 by default."""

import pytest
import torch

from ditto_core.backends.eager import EagerSession
from ditto_core.localize.replay import Replay
from ditto_core.model.loading import load_model
from ditto_core.sites import Tap
from ditto_core.spec import ModelSource
from ditto_core.system.ieee import exact_float32, settings
from ditto_core.system.receipt import make_receipt
from tests.models import conv_net, tapped_net

TAP = Tap("mlp.up", "up")


@pytest.fixture
def allowed():
    """What a program that wants speed says."""
    before = precisions()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    yield precisions()
    for setting, precision in zip(settings(), before, strict=True):
        setting.fp32_precision = precision


def precisions() -> list[str]:
    return [setting.fp32_precision for setting in settings()]


def test_the_eager_reference_and_the_replay_compute_in_float32(allowed):
    model = load_model(ModelSource.of(tapped_net))
    seen = []
    EagerSession(model, (TAP,)).step(model.examples, lambda site, tensor: seen.append(precisions()))
    replay = Replay(model, (TAP,), engine_dtype="float32", dtype="float32")
    replay.step(model.examples, {"mlp.up": torch.zeros(3, 16)}, lambda tap, tensor: seen.append(precisions()))
    assert seen == [["ieee"] * len(allowed)] * 2
    assert precisions() == allowed
    assert len(allowed) >= 6


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_torch_can_read_its_older_switches_in_a_reference_and_finds_them_as_they_were(precision):
    """Torch looks at them in kernels, and fails where they are not what the newer ones say."""

    def older():
        backends = torch.backends
        return backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()

    old, newer = torch.get_float32_matmul_precision(), precisions()
    torch.set_float32_matmul_precision(precision)
    before, model = older(), load_model(ModelSource.of(conv_net))
    try:
        with exact_float32():
            assert older() == (False, False, "highest")
        EagerSession(model, ()).step(model.examples, lambda site, tensor: None)
        assert older() == before == (precision != "highest", True, precision)
    finally:
        torch.set_float32_matmul_precision(old)
        for setting, value in zip(settings(), newer, strict=True):
            setting.fp32_precision = value


def test_what_was_allowed_is_allowed_again_after_an_error(allowed):
    with pytest.raises(ZeroDivisionError), exact_float32():
        _ = 1 / 0
    assert precisions() == allowed


def test_a_receipt_tells_tf32_however_torch_was_told_of_it(allowed):
    """Torch refuses to say ``allow_tf32`` once a program has used its newer settings."""
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        _ = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    told = make_receipt().settings
    assert (told["tf32_matmul"], told["tf32_cudnn"]) == ("true", "false")
