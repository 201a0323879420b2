"""Build an engine with taps, in three ways: in memory, from a checkpoint, and by the upstream compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ditto_core.backends.trtllm import calls, detect
from ditto_core.backends.trtllm.artifacts import builder_kept, watch_build_engine
from ditto_core.backends.trtllm.plan import Plan, Report
from ditto_core.backends.trtllm.tapped import TappedModel
from ditto_core.backends.trtllm.taps import observe
from ditto_core.errors import BackendError, BuildError
from ditto_core.system.environment import environment

TIMING_CACHE = "model.cache"
REPORT_FOLDER = "ditto"


@dataclass(frozen=True)
class Sizes:
    """Largest batch, prompt and whole sequence that an engine serves."""

    batch: int
    prompt: int
    sequence: int


@dataclass(frozen=True)
class Order:
    """A build, in JSON-ready values: it is sent to a child process.

    ``model`` is a Hugging Face directory; ``outputs`` are as in :class:`~ditto_core.backends.trtllm.plan.Plan`.
    ``build`` and ``plugin`` set fields of ``BuildConfig`` and of its plugin configuration.
    """

    builder: str
    model: str
    checkpoint: str
    dtype: str
    directory: str
    sizes: Mapping[str, int]
    outputs: Mapping[str, str]
    artifacts: str = ""
    workers: int = 1
    build: Mapping[str, Any] = field(default_factory=dict)
    plugin: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        """The taps of this build."""
        return Plan(
            self.outputs,
            strict=False,
            report=str(Path(self.directory) / REPORT_FOLDER),
            artifacts=self.artifacts,
            registered=bool(self.build.get("enable_debug_output")),
        )


def build_engine(**order: Any) -> dict[str, Any]:
    """Build what an :class:`Order`'s fields say and return the report of rank 0 as JSON.

    Raises :class:`BuildError` when upstream's builder fails without saying why.
    """
    request = Order(**order)
    BUILDERS[request.builder](request)
    return asdict(Report.load(Path(request.plan.report)))


def build_in_memory(order: Order) -> None:
    """Load a Hugging Face directory into TensorRT-LLM's model, observe it, build."""
    model = calls.FROM_HUGGING_FACE(hf_model_or_dir=order.model, dtype=order.dtype)
    with builder_kept():
        if order.artifacts:
            watch_build_engine(Path(order.artifacts))
        engine = calls.BUILD(observe(model, order.plan), build_config(order))
    if engine is None:
        raise BuildError("TensorRT-LLM returned no engine, see its log above")
    calls.SAVE(engine, order.directory)


def build_from_checkpoint(order: Order) -> None:
    """Follow trtllm-build's own chain of calls, with our model class in the place that it offers."""
    config = calls.CHECKPOINT_CONFIG(str(Path(order.checkpoint) / "config.json"))
    with environment(order.plan.to_env()), builder_kept():
        calls.PARALLEL_BUILD(
            model_config=config,
            ckpt_dir=order.checkpoint,
            build_config=build_config(order),
            output_dir=order.directory,
            workers=order.workers,
            log_level="info",
            model_cls=TappedModel,
        )


def build_by_compiler(order: Order) -> None:
    """Run the upstream compiler's ``ditto build`` with ``--add-output``: outputs are nodes of its own FX graph."""
    if not detect.upstream_compiler():
        raise BackendError("builder='ditto' needs the compiler `ditto`, which is not installed: use builder='memory'")
    report = Report(0, {n: {"source": n, "dtype": "", "shape": [], "requests": [n]} for n in order.outputs})
    command = compiler_command(order)
    environ = {**os.environ, **({"DEBUG_ARTIFACTS_DIR": order.artifacts} if order.artifacts else {})}
    done = subprocess.run(command, env=environ, check=False)
    if done.returncode:
        raise BuildError(f"the compiler `ditto` failed with code {done.returncode}: {' '.join(command[1:])}")
    report.save(Path(order.plan.report))


def compiler_command(order: Order) -> list[str]:
    """Return the command line of the upstream compiler."""
    sizes = Sizes(**order.sizes)
    outputs = [word for name in order.outputs for word in ("--add-output", name)]
    limits = ["--max-batch-size", str(sizes.batch), "--max-seq-len", str(sizes.sequence)]
    return [
        *(sys.executable, "-m", "ditto", "build", order.model, "--output-dir", order.directory),
        *("--dtype", order.dtype, "--gather-all-logits", *limits, *outputs),
    ]


def build_config(order: Order) -> Any:
    """Make the build configuration: everything observable, nothing fused that hides a tensor.

    Logits of all prompt tokens, a continuous cache (the Python runtime's paged one is experimental), gate and up
    projections apart. What a model registered itself is not marked by upstream's debug switch: encoder-decoders would
    get outputs that nobody asked for.
    """
    sizes = Sizes(**order.sizes)
    version = detect.require().version
    known = calls.BUILD_CONFIG.available(
        version,
        max_batch_size=sizes.batch,
        max_input_len=sizes.prompt,
        max_seq_len=sizes.sequence,
        max_num_tokens=sizes.batch * sizes.prompt,
        gather_context_logits=True,
        strongly_typed=True,
        profiling_verbosity="detailed",
        output_timing_cache=str(Path(order.directory) / TIMING_CACHE),
        use_fused_mlp=False,
    )
    config = calls.BUILD_CONFIG(**known)
    set_fields(config, order.build)
    wanted = {"paged_kv_cache": False, "use_fused_mlp": False, **order.plugin}
    optional = {name: value for name, value in wanted.items() if hasattr(config.plugin_config, name)}
    set_fields(config.plugin_config, {**optional, **order.plugin})
    return config


def set_fields(target: Any, values: Mapping[str, Any]) -> None:
    """Set fields by name. Raises :class:`BuildError` for one that this version does not have."""
    for name, value in values.items():
        if not hasattr(target, name):
            raise BuildError(f"{type(target).__name__} of this TensorRT-LLM has no field {name!r}")
        setattr(target, name, value)


def engine_config(directory: Path) -> dict[str, Any]:
    """Read an engine's ``config.json``. Raises :class:`BuildError` when it is not one of TensorRT-LLM's."""
    try:
        data: dict[str, Any] = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise BuildError(f"{directory} holds no TensorRT-LLM engine: expected config.json and rank0.engine") from error
    if "pretrained_config" not in data:
        raise BuildError(f"{directory}/config.json has no pretrained_config, expected an engine of 0.8 or later")
    return data


def interleaved(config: Mapping[str, Any]) -> bool:
    """Tell from a ``pretrained_config`` whether the joint projection holds its parts head by head.

    So it does in the attention layer of 1.3.0rc3 when queries and keys are normalized and of equal number.
    """
    heads = config.get("num_attention_heads")
    return bool(config.get("qk_layernorm")) and (config.get("num_key_value_heads") or heads) == heads


def ranks(directory: Path) -> Sequence[Path]:
    """Return the engine files of a directory, by rank."""
    return sorted(directory.glob("rank*.engine"), key=lambda p: int(p.stem.removeprefix("rank")))


BUILDERS = {"memory": build_in_memory, "checkpoint": build_from_checkpoint, "ditto": build_by_compiler}
