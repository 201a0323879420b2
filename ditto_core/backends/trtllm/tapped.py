"""The model class that trtllm-build is given: the real one, observed. An official hook, so nothing is patched."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from ditto_core.backends.trtllm import calls
from ditto_core.backends.trtllm.artifacts import watch_build_engine
from ditto_core.backends.trtllm.plan import Plan
from ditto_core.backends.trtllm.taps import observe
from ditto_core.errors import BuildError, nearest

HOOK_FILE = Path(__file__).with_name("hook.py")
HOOK_CLASS = "TappedModel"


class TappedModel:
    """Makes the model that the checkpoint names (or the user's own class) and observes it.

    The plan comes from the environment, so that it reaches worker processes.
    """

    def __new__(cls, config: Any) -> Any:
        """Make the model with random weights, as ``trtllm-build --model_config`` does."""
        return observed(model_class(config)(config))

    @classmethod
    def from_checkpoint(cls, ckpt_dir: str, rank: int | None = None, config: Any = None, **kwargs: Any) -> Any:
        """Load the model with the weights of a checkpoint."""
        found = model_class(config)
        if kwargs:  # of a version later than those that are known
            return observed(found.from_checkpoint(ckpt_dir, rank=rank, config=config, **kwargs))
        return observed(calls.FROM_CHECKPOINT(found, ckpt_dir, rank=rank, config=config))


def observed(model: Any) -> Any:
    """Observe a model as the environment says."""
    plan = Plan.from_env(os.environ)
    if plan.artifacts:
        rank = getattr(getattr(getattr(model, "config", None), "mapping", None), "rank", 0) or 0
        watch_build_engine(Path(plan.artifacts) / (f"rank{rank}" if rank else ""))
    return observe(model, plan)


def model_class(config: Any) -> Any:
    """Return the class of a model: the user's, or what TensorRT-LLM has for the architecture."""
    file, name = Plan.from_env(os.environ).model_class
    if file:
        return load_class(Path(file), name)
    known = calls.attribute("tensorrt_llm.models.MODEL_MAP")
    if config.architecture not in known:
        raise BuildError(
            f"TensorRT-LLM has no model class for {config.architecture!r}{nearest(config.architecture, known)}"
        )
    return known[config.architecture]


def load_class(file: Path, name: str) -> Any:
    """Load a class from a Python file. Raises :class:`BuildError` when there is none."""
    spec = importlib.util.spec_from_file_location("ditto_user_model", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise BuildError(f"--model_cls_file {file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise BuildError(f"--model_cls_file {file} has no class {name!r}{nearest(name, vars(module))}")
    return getattr(module, name)
