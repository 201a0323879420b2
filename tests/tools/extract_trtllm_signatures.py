"""Write ``tests/data/trtllm_signatures.json``: what the adapter uses of TensorRT-LLM, by version. Facts only.

    python tests/tools/extract_trtllm_signatures.py FACTS.json [--tree VERSION=DIRECTORY ...]

FACTS.json holds signatures by version and dotted name. Names that it lacks are looked up in source trees with ``ast``
(nothing is imported); what is in neither is left out, and the contract tests fail on it.
"""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path

from ditto_core.backends.trtllm.calls import ATTRIBUTES, CALLS

OUTPUT = Path(__file__).parents[1] / "data" / "trtllm_signatures.json"
ALSO = (  # the stand-in is made of these besides
    "tensorrt_llm.module.Module.register_network_output",
    "tensorrt_llm.network.Network._mark_output",
    "tensorrt_llm.builder.Builder.build_engine",
    "tensorrt_llm.runtime.generation.GenerationSession.dump_debug_buffers",
)


def wanted():
    """Return every dotted name that is needed."""
    fields = {name for call in CALLS for name in call.fields}
    return sorted({call.name for call in CALLS} | fields | set(ATTRIBUTES) | set(ALSO))


def from_facts(facts, name):
    """Return an entry of the facts file, or what its owner's entry says about a method, property or export."""
    if name in facts:
        return compact(facts[name])
    if any(known.startswith(f"{name}.") for known in facts):
        return {"kind": "class", "parameters": None}
    owner, _, last = name.rpartition(".")
    entry = facts.get(owner)
    if entry is not None:
        for kind in ("methods", "properties", "exports"):
            if last in entry.get(kind, ()):
                return {"kind": kind.rstrip("s"), "parameters": None}
    return None


def compact(entry):
    """Keep kind and parameters (name, kind, default or None) of an entry."""
    if entry["kind"] == "property":
        return {"kind": "property", "parameters": None}
    parameters = [[p["name"], p["kind"], p.get("default")] for p in entry["parameters"]]
    return {"kind": entry["kind"], "parameters": parameters}


def from_tree(root, name):
    """Find a function, method, class or variable in a source tree by its dotted name."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        base = root.joinpath(*parts[:cut])
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return find(ast.parse(file.read_text()).body, parts[cut:])
    return None


def find(body, path):
    """Find a path of names in the body of a module or class."""
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == path[0] and len(path) > 1:
            return find(node.body, path[1:]) or member(node, path[1])
        if isinstance(node, ast.FunctionDef) and node.name == path[0] and len(path) == 1:
            if any(getattr(d, "id", "") == "property" for d in node.decorator_list):
                return {"kind": "property (source)", "parameters": None}
            return {"kind": "function (source)", "parameters": parameters(node.args)}
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if len(path) == 1 and any(getattr(t, "id", "") == path[0] for t in targets if t is not None):
            return {"kind": "attribute (source)", "parameters": None}
    return None


def member(node, name):
    """Find an attribute that a class's methods set on ``self``."""
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and each.attr == name and isinstance(each.ctx, ast.Store):
            return {"kind": "attribute (source)", "parameters": None}
    return None


def parameters(args):
    """Return the parameters of a function, without self and cls."""
    plain = args.posonlyargs + args.args
    defaults = [None] * (len(plain) - len(args.defaults)) + [ast.unparse(d) for d in args.defaults]
    found = [[a.arg, "POSITIONAL_OR_KEYWORD", d] for a, d in zip(plain, defaults, strict=True)]
    found += [[args.vararg.arg, "VAR_POSITIONAL", None]] if args.vararg else []
    keywords = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    found += [[a.arg, "KEYWORD_ONLY", None if d is None else ast.unparse(d)] for a, d in keywords]
    found += [[args.kwarg.arg, "VAR_KEYWORD", None]] if args.kwarg else []
    return [p for p in found if p[0] not in ("self", "cls")]


def from_text(root, name):
    """Tell whether upstream's own Python uses a name of its bindings, and where."""
    short = ".".join(name.split(".")[-2:])
    for file in sorted((root / "tensorrt_llm" / "runtime").rglob("*.py")):
        if short in file.read_text():
            return {"kind": f"attribute (used in {file.relative_to(root).as_posix()})", "parameters": None}
    return None


def main():
    """Read the facts and the trees, write what is needed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("facts", type=Path)
    parser.add_argument("--tree", action="append", default=[])
    arguments = parser.parse_args()
    trees = dict(text.split("=", 1) for text in arguments.tree)
    facts = json.loads(arguments.facts.read_text())
    versions = {}
    for version, entries in facts.items():
        if version.startswith("v") and len(entries) > 50:  # the others are single files
            found = {name: from_facts(entries, name) for name in wanted()}
            root = Path(trees[version]) if version in trees else None
            for name in [n for n in found if found[n] is None and root is not None]:
                found[name] = from_tree(root, name) or from_text(root, name)
            versions[version.removeprefix("v")] = {n: e for n, e in found.items() if e is not None}
    lines = ",\n".join(
        f' "{v}": {{\n' + ",\n".join(f'  "{n}": {json.dumps(e)}' for n, e in sorted(names.items())) + "\n }"
        for v, names in versions.items()
    )
    OUTPUT.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
