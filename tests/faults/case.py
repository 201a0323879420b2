"""What a case of a fault is, and the sites and prompts that cases share."""

from dataclasses import dataclass

LAYER = "model.layers.1"
ATTENTION = f"{LAYER}.self_attn"
MLP = f"{LAYER}.mlp"
NORM = f"{LAYER}.input_layernorm"
PROBS, CONTEXT = f"{ATTENTION}:probs", f"{ATTENTION}:context"
Q_ROPE, K_ROPE, V_STATES = (f"{ATTENTION}:{port}" for port in ("q_rope", "k_rope", "v_states"))
MASK = "model.layers.0:in.attention_mask"
EMBED, TABLE = "model.embed_tokens", "model.rotary_emb"
GPT = "transformer.h.1"

ALONE = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
PADDED = [ALONE, [20, 21, 22, 23, 24, 25, 26]]
TWO = [ALONE, [20 + 7 * token for token in ALONE]]
LARGE = [5, 300, 6, 390, 310, 7]
NAN = float("nan")
SINE = (f"{TABLE}:out.1",)
LINEAR = tuple(f"self_attn.{name}_proj" for name in "qkvo")
LINEAR = (*LINEAR, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn:probs", "self_attn:context")
PRODUCTS = ("lm_head", *(f"model.layers.{i}.{name}" for i in range(2) for name in LINEAR))


@dataclass(frozen=True)
class Case:
    """``also``: other sites that the fault touches. ``step``: the first that shows it."""

    name: str
    fault: object
    site: str
    kind: str
    rule: str
    model: str = "llama"
    dtype: str = "float32"
    step: int = 0
    prompts: object = None
    also: tuple = ()
