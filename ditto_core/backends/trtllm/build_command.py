"""``python -m ditto_core.trtllm_build``: trtllm-build with extra outputs and readable by-products.

Every flag of trtllm-build is passed on as it is, and ``--use_fused_mlp disable`` is made to work where upstream takes
the word for true (0.13 to 0.17). These are added:

``--add-output NAME[=ALIAS]``  a module (``transformer.layers.3.mlp``), a site (``model.layers.*.mlp``), a registered
                               output, or a layer of the network; repeatable. ``TRTLLM_ADD_OUTPUT`` (JSON, name ->
                               alias) is read too.
``--artifacts-dir DIR``        write ``trt_network_def.py``, ``plugins/*.json`` and ``builder_config.json`` there (or
                               set ``DEBUG_ARTIFACTS_DIR``).

The model class is handed to trtllm-build through its own ``--model_cls_file``. ``parallel_build`` is wrapped for the
one call: nothing else of trtllm-build sees its build configuration before the MLPs are fused.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from ditto_core.backends.trtllm import calls, detect
from ditto_core.backends.trtllm.artifacts import builder_kept
from ditto_core.backends.trtllm.build import REPORT_FOLDER
from ditto_core.backends.trtllm.plan import ADD_OUTPUT_VARIABLE, Plan, parse_add_output
from ditto_core.backends.trtllm.tapped import HOOK_CLASS, HOOK_FILE
from ditto_core.errors import BackendError, DittoError, UsageError
from ditto_core.system.environment import environment

PARALLEL_BUILD = "tensorrt_llm.commands.build.parallel_build"
ARTIFACTS_VARIABLE = "DEBUG_ARTIFACTS_DIR"


def parse(arguments: Sequence[str]) -> tuple[Plan, list[str]]:
    """Split a command line into our plan and trtllm-build's own arguments, which name our model class.

    Raises :class:`UsageError` for an alias that is given twice.
    """
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--add-output", action="append", default=[])
    own.add_argument("--artifacts-dir", default=os.environ.get(ARTIFACTS_VARIABLE, ""))
    own.add_argument("--model_cls_file", default="")
    own.add_argument("--model_cls_name", default="")
    known, rest = own.parse_known_args(list(arguments))
    if bool(known.model_cls_file) != bool(known.model_cls_name):
        raise UsageError("--model_cls_file and --model_cls_name go together")
    outputs = parse_add_output(os.environ.get(ADD_OUTPUT_VARIABLE, "")) | dict(map(split_alias, known.add_output))
    output_dir = option(rest, "--output_dir") or "engine_outputs"
    plan = Plan(
        outputs=outputs,
        report=str(Path(output_dir).resolve() / REPORT_FOLDER),
        artifacts=str(Path(known.artifacts_dir).resolve()) if known.artifacts_dir else "",
        model_class=(str(Path(known.model_cls_file).resolve()) if known.model_cls_file else "", known.model_cls_name),
        registered="--enable_debug_output" in rest,
    )
    return plan, [*rest, "--model_cls_file", str(HOOK_FILE), "--model_cls_name", HOOK_CLASS]


def split_alias(text: str) -> tuple[str, str]:
    """Split ``NAME=ALIAS``; without an alias the output keeps its own name."""
    name, _, alias = text.partition("=")
    return name, alias


def option(arguments: Sequence[str], name: str) -> str:
    """Return the value of an option of trtllm-build, or an empty string."""
    for i, word in enumerate(arguments):
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
        if word == name and i + 1 < len(arguments):
            return arguments[i + 1]
    return ""


def run(arguments: Sequence[str]) -> None:
    """Run trtllm-build. Raises :class:`BackendError` where there is none."""
    found = detect.require()
    if not found.engines:
        raise BackendError(f"{detect.PACKAGE} {found.version} has no trtllm-build (removed after 1.3.0rc20)")
    plan, rest = parse(arguments)
    before = sys.argv
    sys.argv = ["trtllm-build", *rest]
    try:
        with environment(plan.to_env()), builder_kept(), fused_mlp(option(rest, "--use_fused_mlp")):
            calls.TRTLLM_BUILD_MAIN()
    finally:
        sys.argv = before


def fused_mlp(word: str) -> AbstractContextManager[None]:
    """Make ``--use_fused_mlp disable`` effective in the build configuration that trtllm-build hands on."""
    return calls.restored(PARALLEL_BUILD, unfused) if word == "disable" else nullcontext()


def unfused(original: Callable[..., None]) -> Callable[..., None]:
    """Return ``parallel_build`` with the fusing of MLPs off, wherever a version keeps the field."""

    @functools.wraps(original)
    def parallel_build(model_config: Any, ckpt_dir: Any, build_config: Any, *args: Any, **kwargs: Any) -> None:
        for target in (build_config, build_config.plugin_config):
            if hasattr(target, "use_fused_mlp"):
                target.use_fused_mlp = False
        kwargs |= {"use_fused_mlp": False} if "use_fused_mlp" in kwargs else {}
        original(model_config, ckpt_dir, build_config, *args, **kwargs)

    return parallel_build


def main() -> None:
    """Run the command line. An error of ours is one line on stderr and exit code 2."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
    try:
        run(sys.argv[1:])
    except DittoError as error:
        print(f"trtllm_build: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
