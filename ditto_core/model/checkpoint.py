"""A model's files: where a source has them (Hub id, directory, GGUF file), and what they tell without their weights."""

from __future__ import annotations

import glob
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ditto_core.errors import ModelError, first_line, nearest

if TYPE_CHECKING:
    import torch

    from ditto_core.spec import ModelSource

WEIGHT_FILES = ("*.safetensors", "*.gguf", "*.bin")
IDENTITY_FILES = tuple(f"**/{name}" for name in (*WEIGHT_FILES, "*config.json", "*.index.json", "*.py"))
"""What decides what a checkpoint computes: weights, configurations (an adapter's too) and code, in subfolders too."""
CHOOSING_FILE = "generation_config.json"
"""How tokens are chosen of what was computed: no graph depends on it."""


def locate(source: ModelSource) -> Path:
    """Return the local directory of a source, or its GGUF file; a Hub id is looked up in the local Hub cache, then
    downloaded.

    A directory with one GGUF file and no safetensors is that file. Raises :class:`ModelError` for one with several, and
    for a revision of what lies here.
    """
    path = Path(source.location).expanduser()
    if source.revision and path.exists():
        raise ModelError(
            f"model {source.location!r} lies on this disk and has no revision {source.revision!r}: leave the revision "
            "out, or run where nothing has the Hub id's name"
        )
    if is_gguf(path):
        return path
    if path.is_dir():
        if not any(list(path.glob(pattern)) for pattern in WEIGHT_FILES):
            raise ModelError(f"model directory {source.location!r} holds no weights ({', '.join(WEIGHT_FILES)})")
        return gguf_in(path) or path
    if path.exists():
        raise ModelError(f"model {source.location!r} is a file, expected a directory, a GGUF file or a Hub id")
    if path.is_absolute() or source.location.startswith(("./", "../", "~")) or source.location.count("/") > 1:
        raise ModelError(f"model {source.location!r} is not there{near_path(path)}")
    return download(source)


def identity_of(source: ModelSource) -> tuple[Path, tuple[str, ...]]:
    """Return a directory, and the globs of the files in it that decide what a source computes."""
    path = locate(source)
    return (path.parent, (glob.escape(path.name),)) if is_gguf(path) else (path, IDENTITY_FILES)


def download(source: ModelSource) -> Path:
    """Return the snapshot directory of a Hub id."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.safetensors", "*.json", "*.model", "*.txt", "*.py", "*.jinja"]
    options: dict[str, Any] = {"revision": source.revision or None, "allow_patterns": patterns}
    try:
        return Path(snapshot_download(source.location, local_files_only=True, **options))
    except (LocalEntryNotFoundError, HFValidationError):
        pass
    try:
        return Path(snapshot_download(source.location, **options))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"model {source.location!r} is neither a local directory nor a Hub id that can be reached "
            f"({type(error).__name__}){as_function(source.location) or near_path(Path(source.location))}"
        ) from error


def as_function(location: str) -> str:
    """Say how a function is given that a command would take as ``FILE.py:NAME``."""
    name = location.partition(".py:")[2]
    return f"; a test takes the function itself: model={name}" if name.isidentifier() else ""


def near_path(path: Path) -> str:
    """Suggest a sibling for the first part of a path that does not exist."""
    missing = next((p for p in (*reversed(path.parents), path) if not p.exists()), path)
    names = [sibling.name for sibling in missing.parent.iterdir()] if missing.parent.is_dir() else []
    return nearest(missing.name, names)


def refuse_missing(location: str, missing: Collection[str]) -> None:
    """Raise :class:`ModelError` for a checkpoint that lacks tensors: transformers makes random ones in their place."""
    if missing:
        shown = ", ".join(sorted(missing)[:3]) + (" …" if len(missing) > 3 else "")
        raise ModelError(f"model {location!r} lacks {len(missing)} of its model's tensors: {shown}")


def has_adapter(directory: Path) -> bool:
    """Tell whether peft puts an adapter on a checkpoint's weights."""
    return (directory / "adapter_config.json").is_file()


def refuse_adapter(location: str, directory: Path) -> None:
    """Raise :class:`ModelError` for an adapter that would be left out, or whose base lies where no key sees it."""
    from transformers.utils import is_peft_available

    if not has_adapter(directory):
        return
    if not (directory / "config.json").is_file():
        raise ModelError(f"model {location!r} is an adapter, expected it beside its base model, or merged into that")
    if not is_peft_available():
        raise ModelError(f"model {location!r} has an adapter (adapter_config.json), which needs peft: pip install peft")


def weights_size(directory: Path) -> int:
    """Return the bytes of a directory's safetensors."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def stored_dtype(directory: Path) -> torch.dtype | None:
    """Return the one floating dtype of a checkpoint's safetensors, or None where they have several or none."""
    import torch
    from safetensors import safe_open

    found: set[str] = set()
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - it is no dict
    names = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return names.get(found.pop()) if len(found) == 1 else None


def is_gguf(location: Path) -> bool:
    """Tell whether a path is that of a GGUF file."""
    return location.suffix == ".gguf" and location.is_file()


def gguf_in(directory: Path) -> Path | None:
    """Return the GGUF file of a directory that has no safetensors. Raises :class:`ModelError` for several."""
    found = sorted(directory.glob("*.gguf"))
    if not found or any(directory.glob("*.safetensors")):
        return None
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:4]) + (" …" if len(found) > 4 else "")
        raise ModelError(f"model directory {str(directory)!r} holds {len(found)} GGUF files ({names}): give one")
    return found[0]


@contextmanager
def readable(location: Path | str) -> Iterator[dict[str, Any]]:
    """Yield the arguments with which ``from_pretrained`` reads a location and nothing else.

    A GGUF file is linked into a folder of its own: a tokenizer beside it, of whatever model, would be read in the
    place of its own.
    """
    path = Path(location)
    if not is_gguf(path):
        yield {"pretrained_model_name_or_path": location}
        return
    with TemporaryDirectory() as folder:
        alone = Path(folder, path.name)
        try:
            alone.symlink_to(path.resolve())
        except OSError:  # a file system without links
            shutil.copyfile(path, alone)
        yield {"pretrained_model_name_or_path": folder, "gguf_file": path.name}


@dataclass(frozen=True)
class Language:
    """What makes text a model's tokens: its tokenizer (None: it has none), and the vocabulary's size (0: not known)."""

    tokenizer: Any
    vocab_size: int


def load_language(directory: Path, trust_remote_code: bool = False) -> Language:
    """Read tokenizer and configuration and no weights. Raises :class:`ModelError` when there is no configuration."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{directory} has no configuration that transformers reads: {error}") from error
    return Language(load_tokenizer(directory, trust_remote_code), vocab_size(config))


def load_tokenizer(location: Path | str, trust_remote_code: bool = False, revision: str = "") -> Any:
    """Return the tokenizer in a directory or a GGUF file, or of a Hub id, or None when there is none.

    One that brings code of its own and is not trusted counts as none: asked nothing, transformers would ask on stdin.
    One that is damaged or whose package is missing counts as none, too, with a warning: token ids need none.
    """
    from transformers import AutoTokenizer

    try:
        with readable(location) as where:
            how = {"trust_remote_code": trust_remote_code, "revision": revision or "main"}
            tokenizer = AutoTokenizer.from_pretrained(**where, **how)
    except (OSError, ValueError, KeyError):
        return None
    except Exception as error:  # noqa: BLE001 - tokenizers raises Exception itself for a damaged file
        warnings.warn(f"{location}: its tokenizer is left out: {first_line(error)}", stacklevel=2)
        return None
    return tokenizer if knows_words(tokenizer) else None


def knows_words(tokenizer: Any) -> bool:
    """Tell a tokenizer from the empty one that transformers makes of a configuration with no tokenizer beside it."""
    return len(tokenizer) > len(tokenizer.all_special_tokens)


def chat_ids(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int] | None:
    """Return the ids of a conversation up to the answer; None without a tokenizer, or a template that takes it."""
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    try:
        ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
    except Exception:  # noqa: BLE001 - a template is a program that raises what it likes
        return None
    return [int(token) for token in ids]


def vocab_size(config: Any) -> int:
    """Return the vocabulary's size of a model's configuration, 0 where it has none."""
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    return int(getattr(config, "vocab_size", 0))
