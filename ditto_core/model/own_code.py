"""Which class makes a checkpoint's model: one of transformers, or its own code (``auto_map``) where that is trusted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditto_core.errors import ModelError, nearest
from ditto_core.system.files import parse_json, read_text

if TYPE_CHECKING:
    from ditto_core.spec import ModelSource

AUTO = "AutoModelForCausalLM"


def names_code(directory: Path) -> bool:
    """Tell whether a checkpoint's configuration names code of its own: what it computes depends on trust."""
    file = directory / "config.json"
    return file.is_file() and b'"auto_map"' in file.read_bytes()


def untrusted(source: ModelSource) -> str:
    """Return what is to be done about a model whose own code is not trusted."""
    how = f"ModelSource({source.location!r}, trust_remote_code=True), or --trust-remote-code"
    return f"it brings code of its own; read it, then give {how}"


def refuse_code_elsewhere(source: ModelSource, directory: Path) -> None:
    """Raise :class:`ModelError` for trusted code in another repository (``owner/repo--file.Class``): it is downloaded
    as it is that day, and no key sees it."""
    found = [*code_elsewhere(directory)] if source.trust_remote_code else []
    if found:
        raise ModelError(
            f"model {source.location!r} has code in another repository ({found[0]}), expected it beside the weights: "
            f"copy its files there and name {found[0].partition('--')[2]} in auto_map"
        )


def code_elsewhere(directory: Path) -> Iterator[str]:
    """Yield what the configurations of a checkpoint, its tokenizer's too, name of other repositories' code."""
    for file in sorted(directory.glob("*config.json")):
        with suppress(OSError, ValueError, AttributeError):  # who reads it says what is wrong with it
            yield from re.findall(
                r'"([^"]+--[^"]+)"', json.dumps(parse_json(read_text(file), last=True).get("auto_map"))
            )


def model_class(source: ModelSource, config: Any) -> Any:
    """Return what has the ``from_pretrained`` that makes the model of a configuration.

    Untrusted, a checkpoint with code of its own is made by transformers' class of that name, as transformers does it.
    Raises :class:`ModelError` where there is none: another class would load the same weights and compute otherwise.
    """
    import transformers

    name = (getattr(config, "architectures", None) or [""])[0]
    own = own_kinds(config, name)
    if own and source.trust_remote_code:
        return getattr(transformers, own[0])
    if hasattr(transformers, name or AUTO):
        return getattr(transformers, name or AUTO)
    if made_by(AUTO, config).lower() == name.lower():  # MPTForCausalLM is MptForCausalLM; or one that was registered
        return getattr(transformers, AUTO)
    known = nearest(name, (known for known in dir(transformers) if "For" in known or known.endswith("Model")))
    raise ModelError(untrusted(source) if own else f"transformers has no class {name!r}{known}")


def own_kinds(config: Any, name: str) -> list[str]:
    """Return the Auto classes for which a checkpoint has code of its own, that of its architecture first.

    None where all of them make something else than an architecture that transformers has: a classifier beside it.
    """
    import transformers

    code = getattr(config, "auto_map", None) or {}
    kinds = [kind for kind in code if kind.startswith("AutoModel") and hasattr(transformers, kind)]
    same = [kind for kind in kinds if name and name in (code[kind].rpartition(".")[2], made_by(kind, config))]
    return same or ([] if hasattr(transformers, name) else sorted(kinds, key=AUTO.__ne__))


def made_by(kind: str, config: Any) -> str:
    """Return the name of the class that an Auto class makes of a configuration without code of its own."""
    import transformers

    found = getattr(transformers, kind)._model_mapping.get(type(config), None)  # no public name for it
    return getattr(found, "__name__", "")
