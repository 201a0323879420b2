"""``python -m ditto_core.trtllm_build``: trtllm-build with extra outputs and readable by-products.

Every flag of trtllm-build is passed on as it is; these are added:

``--add-output NAME[=ALIAS]``  a module (``transformer.layers.3.mlp``), a site (``model.layers.*.mlp``), a registered
                               output, or a layer of the network; repeatable. ``TRTLLM_ADD_OUTPUT`` (JSON, name ->
                               alias) is read too.
``--artifacts-dir DIR``        write ``trt_network_def.py``, ``plugins/*.json`` and ``builder_config.json`` there (or
                               set ``DEBUG_ARTIFACTS_DIR``).

The model class is handed to trtllm-build through its own ``--model_cls_file``; nothing of it is replaced.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ditto_core.backends.trtllm import calls, detect
from ditto_core.backends.trtllm.build import REPORT_FOLDER, environment
from ditto_core.backends.trtllm.tapped import HOOK_CLASS, HOOK_FILE
from ditto_core.backends.trtllm.taps import ADD_OUTPUT_VARIABLE, Plan, parse_add_output
from ditto_core.errors import BackendError, DittoError, UsageError

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
    )
    rest += ["--model_cls_file", str(HOOK_FILE), "--model_cls_name", HOOK_CLASS]
    return plan, rest if "--enable_debug_output" in rest else [*rest, "--enable_debug_output"]


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
        with environment(plan.to_env()):
            calls.TRTLLM_BUILD_MAIN()
    finally:
        sys.argv = before


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
