"""Results beside a model: what the model does not read may lie in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

from ditto_core.model.checkpoint import IDENTITY_FILES
from ditto_core.system.files import check_kept

TOKENIZERS = (
    *("tokenizer*", "*vocab*", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.spm", "*.codes", "chat_template*"),
    *("added_tokens.json", "special_tokens_map.json", "tekken.json", "normalizer.json", "emoji.json"),
)
"""Files that transformers makes tokens by; no key of a folder has them, for a tokenizer is compared by what it does."""
OTHERS = ("*.pt", "*.pth", "*.h5", "*.msgpack", "params.json", "modules.json")
"""Weights in other formats, and what other tools say of a checkpoint."""
READ = (*(pattern.removeprefix("**/") for pattern in IDENTITY_FILES), *TOKENIZERS, *OTHERS)


def check_model_kept(results: Mapping[str, Path | None], models: Mapping[str, Path | None]) -> None:
    """Raise :class:`UsageError` where a result would be written over a file of a model's, or become one.

    Any other file may lie in a model's folder: the suite, settings and baseline of its gate often do. Not for folders
    of tensors, which are weights to whoever looks for them: those are checked by
    :func:`~ditto_core.system.files.check_kept`.
    """
    for name, path in models.items():
        check_kept({option: output for option, output in results.items() if in_the_way(output, path)}, {name: path})


def in_the_way(output: Path | None, model: Path | None) -> bool:
    """Tell whether a result may be, or become, part of a model."""
    if output is None or model is None or not model.is_dir() or output.resolve() == model.resolve():
        return True
    return any(fnmatch(path.name.lower(), pattern) for path in (output, output.resolve()) for pattern in READ)
