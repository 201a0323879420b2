"""A stand-in for TensorRT-LLM, which cannot be installed here. It is not TensorRT-LLM and contains none of its code.

Every callable is generated from the signatures of ``tests/data/trtllm_signatures.json``: it refuses what the recorded
version would refuse, and names that a version lacks are absent. Behind them:

- building goes through the real TensorRT-RTX network builder, so that marking, naming and copying are TensorRT's;
- *running* is an imitation: Hugging Face's model computes, and its tensors are laid out as the facts say that
  TensorRT-LLM lays them out (packed tokens, one projection for queries, keys and values, residual pairs).
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path

SIGNATURES = json.loads((Path(__file__).parents[1] / "data" / "trtllm_signatures.json").read_text())
KINDS = {str(kind.name): kind for kind in type(inspect.Parameter.KEYWORD_ONLY)}
BEHAVIOUR = ("engine", "llama", "runtime", "bindings", "torch_llm")
FILES = ("builder.py", "network.py", "module.py", "runtime/generation.py", "functional.py", "commands/build.py")
SEPARATE = ("_tensorrt_engine/__init__.py",)
"""From 1.0 on ``tensorrt_llm.LLM`` is the PyTorch backend, and that for engines has a package of its own."""
called: set[str] = set()
"""Dotted names that were called since the set was cleared."""


def write_package(directory: Path, version: str) -> Path:
    """Write an importable package ``tensorrt_llm`` of a recorded version into ``directory``."""
    names = {module_of(name) for name in SIGNATURES[version]}
    modules = {name for full in names for name in parents(full)}
    for name in modules:
        base = directory.joinpath(*name.split("."))
        package = any(other.startswith(f"{name}.") for other in modules)
        file = base / "__init__.py" if package else base.with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"import standin_trtllm\nstandin_trtllm.fill(globals(), {name!r}, {version!r})\n")
    root = directory / "tensorrt_llm"
    (root / "version.py").write_text(f'__version__ = "{version}"\n')
    for name in (*FILES, *(SEPARATE if version[:2] == "1." else ())):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def parents(name: str) -> list[str]:
    """Return a module's name and those of its packages."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def is_class(part: str) -> bool:
    return part.lstrip("_")[:1].isupper() and not part.isupper()


def module_of(name: str) -> str:
    """Return the module of a dotted name: what stands before its first class, or before its last part."""
    parts = name.split(".")
    cut = next((i for i, part in enumerate(parts) if is_class(part) or part == "LLM"), len(parts) - 1)
    return ".".join(parts[:cut])


def behaviour(name: str):
    """Return what stands behind a name: an entry of a behaviour module's ``NAMES``, or None."""
    for module in BEHAVIOUR:
        names = importlib.import_module(f"standin_trtllm.{module}").NAMES
        if name in names:
            return names[name]
    return None


def fill(namespace: dict, module: str, version: str) -> None:
    """Put the functions, classes and variables of one module into its namespace."""
    entries = {name: entry for name, entry in SIGNATURES[version].items() if module_of(name) == module}
    for name in entries:
        short = name[len(module) + 1 :].partition(".")[0]
        if short not in namespace:
            namespace[short] = build(f"{module}.{short}", entries)


def build(name: str, entries: dict):
    """Make one function, class or variable."""
    entry = entries.get(name)
    members = {other[len(name) + 1 :]: e for other, e in entries.items() if other.startswith(f"{name}.")}
    behind = behaviour(name)
    if members or (entry and entry["kind"].startswith(("class", "binding_class"))):
        return build_class(name, entry, members, behind)
    if entry["parameters"] is None:
        return behind
    return checked(name, signature(entry), behind)


def build_class(name: str, entry, members: dict, behind):
    """Make a class; its methods check their arguments and then do what the behaviour's methods do."""
    base = behind if isinstance(behind, type) else object
    if isinstance(behind, type) and issubclass(behind, PlainEnum):
        return behind
    body = {"__module__": "standin", "standin_name": name}
    if entry and entry["kind"].startswith("binding_class"):  # compiled: no signature, a property for each argument
        body |= dict.fromkeys(parameter for parameter, *_ in entry["parameters"] or ())
    if entry and entry["parameters"] and (base is object or "__init__" not in vars(base)):
        body["__init__"] = field_init(name, signature(entry))
        if not entry["kind"].startswith("binding_class"):
            body["__signature__"] = signature(entry)
    elif entry and entry["parameters"]:
        body["__init__"] = method(f"{name}.__init__", signature(entry), base.__init__)
    for short, member in members.items():
        known = getattr(base, short, None)
        if member["parameters"] is None or known is None:
            continue
        raw = inspect.getattr_static(base, short)
        if isinstance(raw, classmethod | staticmethod):
            body[short] = staticmethod(checked(f"{name}.{short}", signature(member), known))
        else:
            body[short] = method(f"{name}.{short}", signature(member), known)
    return type(name.rpartition(".")[2], (base,), body)


class PlainEnum:
    """Marks behaviours that are used as they are."""


def signature(entry) -> inspect.Signature:
    """Return the signature of an entry; a field is a keyword."""
    found = []
    for name, kind_name, default in entry["parameters"]:
        kind = KINDS["KEYWORD_ONLY" if kind_name == "FIELD" else kind_name]
        empty = default is None or kind.name.startswith("VAR_")
        found.append(inspect.Parameter(name, kind, default=inspect.Parameter.empty if empty else Default(default)))
    return inspect.Signature(sorted(found, key=lambda p: (p.kind, isinstance(p.default, Default) and p.kind < 2)))


class Default:
    """A default that is known by its source text."""

    def __init__(self, text: str) -> None:
        self.text = text

    @property
    def value(self):
        try:
            return json.loads(self.text.replace("'", '"').replace("True", "true").replace("False", "false"))
        except ValueError:
            return behaviour("PluginConfig")() if "PluginConfig" in self.text else None


def checked(name: str, sig: inspect.Signature, behind):
    """Return a function that binds its arguments to a signature first."""

    def call(*args, **kwargs):
        sig.bind(*args, **kwargs)
        called.add(name)
        return behind(*args, **kwargs) if behind is not None else None

    return call


def method(name: str, sig: inspect.Signature, behind):
    """Return a method that binds its arguments to a signature first."""

    def call(self, *args, **kwargs):
        sig.bind(*args, **kwargs)
        called.add(name)
        return behind(self, *args, **kwargs)

    return call


def field_init(name: str, sig: inspect.Signature):
    """Return an ``__init__`` that sets fields."""

    def init(self, *args, **kwargs):
        bound = sig.bind(*args, **kwargs)
        called.add(name)
        for parameter in sig.parameters.values():
            value = bound.arguments.get(parameter.name, parameter.default)
            if value is not inspect.Parameter.empty:
                setattr(self, parameter.name, value.value if isinstance(value, Default) else value)

    return init


def forget() -> None:
    """Take the package out of ``sys.modules``."""
    for name in [n for n in sys.modules if n.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]
    called.clear()
