"""What the tests against vLLM share: a tiny Llama that vLLM's kernels take, and a pair of it."""

from ditto_core.model.loading import tiny_decoder
from ditto_core.pair.pair import Pair, PairOptions
from ditto_core.spec import EngineSpec

PROFILE = {"batch": (1, 2, 4), "length": (1, 16, 300), "past": (0, 16, 400)}
SITES = ["model.layers.*", "model.layers.*.self_attn.?_proj", "model.layers.*.mlp.*_proj", "model.norm"]
PORTS = ["model.layers.*.self_attn:q_rope", "model.layers.*.self_attn:k_rope", "model.layers.*.self_attn:context"]
PROMPTS = [[3, 4, 5, 6, 7], [9, 8, 7]]


def saved_llama(folder):
    """Save a two-layer Llama with heads of 32: vLLM's attention on a CPU has no kernels for 16."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    sizes |= {"max_position_embeddings": 512}
    tiny_decoder("llama", architectures=["LlamaForCausalLM"], **sizes).save_pretrained(folder)
    return folder


def pair_of(workspace, model, outputs=(), *, dtype="float32", profile=PROFILE, tolerance=None, **options):
    """``options`` are the backend's, save ``backend`` itself and ``observer``."""
    backend, observer = options.pop("backend", "vllm"), options.pop("observer", False)
    spec = EngineSpec.of(str(model), backend=backend, dtype=dtype, outputs=outputs, profile=profile, options=options)
    return Pair(workspace, spec, PairOptions(observer=observer, tolerance=tolerance))
