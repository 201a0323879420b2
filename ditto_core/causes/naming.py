"""What a change of the model's code is called: a kind from the site's role, the family and the operation."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ditto_core.causes.kinds import Kind
from ditto_core.causes.mutants.base import Edits, Model, Mutant

if TYPE_CHECKING:
    from torch import nn

    from ditto_core.causes.slices import Slice

PORTS = {"probs": "scores", "context": "heads", "q_rope": "rotated", "k_rope": "rotated", "v_states": "cached"}
"""What a port of an attention module is."""

ADDITIONS = frozenset(("add", "__add__", "__radd__", "add_", "__iadd__"))

SPECIFIC: tuple[tuple[str, str, str, str, Kind], ...] = (
    ("*norm", "tensors", "*", "operation missing", "norm missing"),
    ("*norm", "*", "add one", "*", "norm weight offset"),
    ("*norm", "fits", "*", "constant factor", "weight scaled"),
    ("*norm", "fits", "parameter", "other constant", "norm weight offset"),
    ("*norm", "operations", "mul parameter", "operation missing", "norm weight ignored"),
    ("*norm", "operations", "mul tensor", "operation missing", "norm missing"),
    ("norm", "operations", "sub tensor", "operation missing", "norm kind"),
    ("norm", "operations", "engine", "operation differs", "norm kind"),
    ("*norm", "operations", "add number", "operation missing", "norm epsilon"),
    ("*norm", "*", "add number", "other constant", "norm epsilon"),
    ("*norm", "fits", "*sqrt", "other constant", "norm epsilon"),
    ("scores", "fits", "*", "softcap differs", "softcap differs"),
    ("scores", "*", "mul number", "*", "attention scale"),
    ("scores", "fits", "matmul", "constant factor", "attention scale"),
    ("scores", "constants", "div number", "other constant", "softcap differs"),
    ("scores", "operations", "tanh", "operation missing", "softcap missing"),
    ("scores", "*", "sum", "*", "softmax not normalized"),
    ("scores", "*", "div*", "constant factor", "softmax not normalized"),
    ("scores", "*", "div*", "sign", "softmax not normalized"),
    ("scores", "layouts", "*", "other layout", "head grouping"),
    ("heads", "layouts", "repeat_interleave*", "other layout", "head grouping"),
    ("heads", "layouts", "expand*", "other layout", "head grouping"),
    ("rotated", "operations", "engine", "sign", "RoPE direction"),
    ("rotated", "operations", "neg", "*", "RoPE direction"),
    ("rotated", "tensors", "exchanged", "other tensor", "RoPE direction"),
    ("rotated", "tensors", "*", "operation missing", "RoPE missing"),
    ("rotated", "operations", "add tensor", "operation missing", "RoPE half"),
    ("rotated", "layouts", "* -3", "other layout", "head order"),
    ("rotated", "layouts", "* -1", "other layout", "RoPE interleaved"),
    ("product", "fits", "bias", "constant factor", "bias scaled"),
    ("product", "operations", "add parameter", "operation differs", "bias scaled"),
    ("product", "fits", "*", "constant factor", "weight scaled"),
    ("product", "layouts", "parameter transposed", "other layout", "weight transposed"),
    ("embedding", "operations", "mul *", "operation missing", "embedding scale missing"),
    ("embedding", "fits", "*", "constant factor", "weight scaled"),
    ("cached", "fits", "*", "constant factor", "KV cache scale"),
    ("*", "fits", "term", "constant factor", "residual scaled"),
    ("*", "layouts", "[!p]* rolled -2", "other layout", "positions displaced"),
    ("*", "layouts", "[!p]* rolled -3", "other layout", "rows displaced"),
    ("", "operations", "mul tensor", "operation missing", "operand ignored"),
    ("table", "operations", "cos", "operation differs", "RoPE direction"),
    ("table", "operations", "sin", "operation differs", "RoPE direction"),
    ("table", "*", "mul number", "other constant", "RoPE amplitude"),
    ("table", "fits", "parameter", "constant factor", "RoPE scaling factor"),
    ("table", "formats", "parameter", "weights quantized", "narrow cast"),
    ("table", "*", "*", "constant factor", "RoPE amplitude"),
)
"""Role, family, operation (as globs) and the change's own kind; the kind. The first that fits counts."""


def kind_of(mutant: Mutant, edits: Edits, part: Slice, model: Model) -> Kind:
    """Return the kind of what a mutant explains at a site."""
    role = role_of(part.seen.site, model.root)
    several = mutant.family == "tensors" and len(edits) > 1
    operation = "exchanged" if several else operation_at(part, min(edits), model)
    words = re.findall(" rolled|" * (part.expected.ndim == 3) + r" transposed| along axis -\d+", mutant.text)
    operation += "".join(words).replace("along axis ", "")
    for where, family, name, own, kind in SPECIFIC:
        asked = (role, where), (mutant.family, family), (operation, name), (mutant.kind, own)
        if all(fnmatchcase(value, pattern) for value, pattern in asked):
            return kind
    return mutant.kind


def role_of(site: str, root: nn.Module) -> str:
    """Return what a site is: a ``norm``, a ``batch norm``, which has no form without its mean, a rotary ``table``,
    ``scores``, ``heads``, ``rotated`` states; or empty."""
    path, _, port = site.partition(":")
    if port in PORTS:
        return PORTS[port]
    modules: dict[str, Any] = dict(root.named_modules())
    module = modules.get(path.partition("@")[0])
    if hasattr(module, "inv_freq") or any("inv_freq" in name for name, _ in getattr(module, "named_buffers", list)()):
        return "table"
    if port or "Norm" in type(module).__name__:
        return "" if port else "batch norm" if hasattr(module, "running_mean") else "norm"
    matrix = getattr(getattr(module, "weight", None), "ndim", 0) == 2
    return "" if not matrix else "embedding" if "Embedding" in type(module).__name__ else "product"


def operation_at(part: Slice, i: int, model: Model) -> str:
    """Return a node's operation and what it takes besides its first operand: ``mul parameter``, ``add number``.

    A leaf is a ``parameter`` or ``bias``, a ``term`` of the site's own addition, or the ``engine``'s tensor.
    """
    node = part.nodes[i]
    if node.func is None and node.label in model.tensors:
        return "bias" if node.label.endswith("bias") else "parameter"
    if node.func is None:
        readers = [n for n in part.nodes if any(ref.node == i for ref in n.refs)]
        terms = all(n.name in ADDITIONS and len(n.refs) == 2 for n in readers) and len(readers) == 1
        return "term" if terms and part.root.node == len(part.nodes) - 1 == part.nodes.index(readers[0]) else "engine"
    name = node.name.strip("_")
    name = name if name in ("relu", "round", "rsqrt", "repeat_interleave") else name.removeprefix("r").removeprefix("i")
    name = {"truediv": "div", "eciprocal": "reciprocal"}.get(name, name)
    if name not in ("add", "sub", "mul", "div"):
        return name
    numbers = [arg for arg in node.args if type(arg) in (int, float)]
    if numbers:
        return f"{name} one" if name == "add" and numbers[0] == 1 else f"{name} number"
    labels = {part.nodes[ref.node].label for ref in node.refs}
    return f"{name} parameter" if labels & model.tensors.keys() else f"{name} tensor"
