"""What a forward writes into a module is given back after each step, together."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ditto_core.backends.eager import EagerSession
from ditto_core.model.loading import LoadedModel
from ditto_core.stepping.prompts import Sequencer, TokenBatch


def test_a_dynamic_rope_beyond_its_limit_repeats_itself():
    """It replaces its frequencies, a buffer, and remembers in a number for which length."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=16, rope_parameters=rope)
    config._attn_implementation = "eager"
    module = LlamaForCausalLM(config).eval().requires_grad_(False)
    ids = torch.randint(64, (1, 24))
    session = EagerSession(LoadedModel(module, True, "made", {}), (), dtype="float32", device="cpu")

    def run():
        session.start(1)
        inputs = Sequencer(TokenBatch(ids, torch.ones_like(ids))).inputs()
        return session.step(inputs, lambda site, tensor: None)["logits"].clone()

    first, second = run(), run()
    assert torch.equal(first, second)
    assert torch.equal(first, module(ids).logits)
