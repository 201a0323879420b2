"""What a change of the model's code is called: a kind from the site's role, the family and the operation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ditto_core.causes.kinds import Kind
from ditto_core.causes.mutants.base import Edits, Model, Mutant

if TYPE_CHECKING:
    from torch import nn

    from ditto_core.causes.slices import Slice

PORTS: Mapping[str, str] = {"probs": "scores", "context": "heads", "q_rope": "rotated", "k_rope": "rotated"}
"""What a port of an attention module is."""

SPECIFIC: tuple[tuple[str, str, str, str, Kind], ...] = (
    ("norm", "tensors", "*", "operation missing", "norm missing"),
    ("norm", "operations", "add one", "*", "norm weight offset"),
    ("norm", "constants", "add one", "*", "norm weight offset"),
    ("norm", "fits", "*", "constant factor", "weight scaled"),
    ("norm", "fits", "parameter", "other constant", "norm weight offset"),
    ("norm", "operations", "mul parameter", "operation missing", "norm weight ignored"),
    ("norm", "operations", "mul tensor", "operation missing", "norm missing"),
    ("norm", "operations", "sub tensor", "operation missing", "norm kind"),
    ("norm", "operations", "engine", "operation differs", "norm kind"),
    ("norm", "operations", "add number", "operation missing", "norm epsilon"),
    ("norm", "*", "add number", "other constant", "norm epsilon"),
    ("norm", "fits", "*sqrt", "other constant", "norm epsilon"),
    ("scores", "*", "mul number", "operation missing", "attention scale"),
    ("scores", "*", "mul number", "other constant", "attention scale"),
    ("scores", "fits", "mul number", "constant factor", "attention scale"),
    ("scores", "fits", "matmul", "constant factor", "attention scale"),
    ("scores", "constants", "div number", "other constant", "softcap differs"),
    ("scores", "operations", "tanh", "operation missing", "softcap missing"),
    ("scores", "fits", "*", "softcap differs", "softcap differs"),
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
    ("rotated", "layouts", "* along -3", "other layout", "head order"),
    ("rotated", "layouts", "* along -1", "other layout", "RoPE interleaved"),
    ("", "operations", "mul tensor", "operation missing", "operand ignored"),
    ("table", "operations", "cos", "operation differs", "RoPE direction"),
    ("table", "operations", "sin", "operation differs", "RoPE direction"),
    ("table", "*", "mul number", "other constant", "RoPE amplitude"),
    ("table", "*", "*", "constant factor", "RoPE amplitude"),
)
"""Role, family, operation (as globs) and the change's own kind; the kind. The first that fits counts."""

FIELDS: tuple[tuple[str, Kind], ...] = (
    ("*rope*theta*", "RoPE base"),
    ("*rope_type*", "RoPE scaling ignored"),
    ("*rope*factor*", "RoPE scaling factor"),
    ("*sliding_window is None*", "sliding window ignored"),
    ("*sliding_window*", "sliding window size"),
    ("*attn_logit_softcapping is None*", "softcap missing"),
    ("*attn_logit_softcapping*", "softcap differs"),
    ("*query_pre_attn_scalar*", "attention scale"),
    ("*eps*", "norm epsilon"),
    ("*act*", "activation kind"),
)
"""What a field of the configuration decides, by globs on the sentence that says its values."""


def kind_of(mutant: Mutant, edits: Edits, part: Slice, model: Model) -> Kind:
    """Return the kind of what a mutant explains at a site."""
    role = role_of(part.seen.site, model.root)
    operation = operation_at(part, min(edits), model)
    if mutant.family == "tensors" and len(edits) > 1:
        operation = "exchanged"
    operation += "".join(re.findall(r" along (?:axis )?-\d+", mutant.text)).replace("axis ", "")
    for where, family, name, own, kind in SPECIFIC:
        asked = (role, where), (mutant.family, family), (operation, name), (mutant.kind, own)
        if all(fnmatchcase(value, pattern) for value, pattern in asked):
            return kind
    return mutant.kind


def kind_of_field(text: str) -> Kind:
    """Return the kind of another value of a field of the configuration."""
    return next((kind for pattern, kind in FIELDS if fnmatchcase(text, pattern)), "setting differs")


def role_of(site: str, root: nn.Module) -> str:
    """Return what a site is: a ``norm``, a rotary ``table``, ``scores``, ``heads``, ``rotated`` states; or empty."""
    path, _, port = site.partition(":")
    if port in PORTS:
        return PORTS[port]
    modules: dict[str, Any] = dict(root.named_modules())
    module = modules.get(path.partition("@")[0])
    if hasattr(module, "inv_freq") or any("inv_freq" in name for name, _ in getattr(module, "named_buffers", list)()):
        return "table"
    return "norm" if "Norm" in type(module).__name__ and not port else ""


def operation_at(part: Slice, i: int, model: Model) -> str:
    """Return a node's operation and what it takes besides its first operand: ``mul parameter``, ``add number``.

    A leaf is a ``parameter``, or the ``engine``'s tensor.
    """
    node = part.nodes[i]
    if node.func is None:
        return "parameter" if node.label in model.tensors else "engine"
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
