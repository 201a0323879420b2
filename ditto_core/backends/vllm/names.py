"""Names: Hugging Face's sites in vLLM's modules. A site without a module of its name is refused, never guessed."""

from __future__ import annotations

from ditto_core.backends.served.capture import ATTENTION_PORTS, CONTEXT
from ditto_core.backends.served.place import Place
from ditto_core.backends.vllm.serving import ATTENTION, Modules
from ditto_core.sites import Tap

HEAD = "logits_processor"
INNER = "model"
OTHER = {
    "RotaryEmbedding": "it returns queries and keys, not cosines and sines: tap :q_rope of the attention",
    "AndMul": "it multiplies with up_proj as well",
}
"""Classes (part of their names) whose output is not that of Hugging Face's module of the same name."""


def place_of(tap: Tap, modules: Modules) -> Place | str:
    """Return where a tap's site is, or why it cannot be had."""
    path, _, port = tap.site.partition(":")
    path = own(path, modules)
    if port in ATTENTION_PORTS or port == CONTEXT:
        found = [p for p, kind in modules.classes.items() if kind == ATTENTION and p.rpartition(".")[0] == path]
        return Place(found[0], port) if len(found) == 1 else "vLLM has no attention module there"
    if port not in ("", "in"):
        return f"{port!r} is inside the attention kernel, which shows none of its tensors"
    if path in modules.shared:
        return "one module of vLLM serves several layers there"
    if path in modules.classes:
        return unlike(tap, modules.classes[path]) or Place(path, port)
    return joint(path, port, modules) or absent(path)


def own(path: str, modules: Modules) -> str:
    """Return a path as vLLM has it: a model of transformers that it runs itself is called ``model``."""
    head, _, rest = path.partition(".")
    return f"{INNER}.{rest}" if rest and not any(p.partition(".")[0] == head for p in modules.classes) else path


def unlike(tap: Tap, kind: str) -> str:
    """Say why a module's output is another than that of the model's module of its name; empty when it is the same."""
    if "ScaledWordEmbedding" in tap.module_class and not tap.site.endswith(":in"):
        return "vLLM scales the embedding behind the module: tap the first block's input"
    return next((reason for part, reason in OTHER.items() if part in kind and not tap.site.endswith(":in")), "")


def joint(path: str, port: str, modules: Modules) -> Place | None:
    """Return the piece of a joint module that is a module of the model, or its input, which all pieces share."""
    parent, _, leaf = path.rpartition(".")
    for name, leaves in modules.packed.items():
        whole = f"{parent}.{name}"
        if leaf in leaves and len(leaves) > 1 and whole in modules.classes:
            return Place(whole, port) if port else Place(whole, "", leaves.index(leaf), len(leaves))
    return None


def absent(path: str) -> str:
    """Say why no module of a path ran."""
    if path.rpartition(".")[2] == "lm_head":
        return "vLLM computes the last token's logits only, which are compared as logits"
    return "no module of that name runs in vLLM"
