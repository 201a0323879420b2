"""Measure what each backend does, write ``ditto_core/backends/measured.json`` and the table of the pages.

    python benchmarks/backends.py [VARIANT ...]      such as: onnxruntime "executorch xnnpack"

Each variant is measured in a child process and its record replaced; without arguments, all are. ExecuTorch and inductor
take minutes each. ``--table`` only writes the table anew; ``--own-file`` before variants measures that column alone.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ditto_core.backends.matrix import MEASURED_FILE, markdown
from ditto_core.backends.registry import get_backend
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import DittoError, first_line
from ditto_core.model.loading import tiny_decoder
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec
from ditto_core.system.isolate import run_isolated
from ditto_core.testing import backend_checks
from ditto_core.testing.suite import failure

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "onnxruntime": ("onnxruntime", {}),
    "openvino": ("openvino", {}),
    "executorch portable": ("executorch", {"kernels": "portable"}),
    "executorch xnnpack": ("executorch", {"kernels": "xnnpack"}),
    "inductor aot_eager": ("inductor", {"compiler": "aot_eager"}),
    "inductor": ("inductor", {"compiler": "inductor"}),
    "inductor aot_inductor": ("inductor", {"compiler": "aot_inductor"}),
    "tensorrt": ("tensorrt", {}),
}


def converted(folder: Path) -> Path:
    """Return OpenVINO's IR of an ONNX file."""
    import openvino

    path = folder / "own.xml"
    openvino.save_model(openvino.convert_model(folder / "engine.onnx"), path, compress_to_fp16=False)
    return path


OWN_FILES: dict[str, Callable[[Path], Path]] = {
    "onnxruntime": lambda folder: folder / "engine.onnx",
    "executorch": lambda folder: folder / "model.pte",
    "openvino": converted,
}
"""The file that ``engine=`` takes, made from what is in an engine's folder."""
PAGES = [Path(__file__).parents[1] / name for name in ("README.md", "docs/backends.md")]
BEGIN, END = "<!-- measured: benchmarks/backends.py -->\n", "<!-- end -->"
PROFILE = {"batch": (1, 2, 4), "length": (1, 5, 16), "past": (0, 8, 32)}
PROMPTS = [[3, 1, 4, 1, 5], [2, 7]]
SITE = "model.layers.0.mlp"


def small() -> Any:
    """Return a Llama of one layer."""
    return tiny_decoder("llama", layers=1)


def measure(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run the conformance checks of a backend, and what they do not cover."""
    backend, workspace = get_backend(name), Workspace()
    start = time.perf_counter()
    promises = {}
    for check in backend_checks(backend, options=options, workspace=workspace, isolation="none"):
        promises[check.name] = failure(check).strip()
        print(f"{time.perf_counter() - start:6.0f} s  {check.name}: {promises[check.name] or 'kept'}", flush=True)
    first, *others = backend.dtypes
    right = [first] if not promises["outputs"] and not promises["decoding"] else []
    right += [dtype for dtype in others if decodes(name, dtype, options, workspace)]
    return {
        "versions": backend.versions(),
        "options": options,
        "dtypes": right,
        "promises": promises,
        "abilities": abilities(name, options, workspace),
        "seconds": round(time.perf_counter() - start),
    }


def decodes(name: str, dtype: str, options: dict[str, Any], workspace: Workspace) -> bool:
    """Tell whether prefill and decoding are right in a dtype."""
    checks = backend_checks(name, dtype=dtype, options=options, workspace=workspace, isolation="none")
    found = [failure(check) for check in checks if check.name in ("outputs", "decoding")]
    print(f"{dtype}: {found}", flush=True)
    return not any(found)


def abilities(name: str, options: dict[str, Any], workspace: Workspace) -> dict[str, bool]:
    """Compare a small decoder with everything on, save a repro, and quantize."""
    spec = EngineSpec.of(small, backend=name, options=options, profile=PROFILE)
    pair = Pair(workspace, spec, PairOptions(localize=True, isolation="none"))
    found = pair.generate(PROMPTS, max_new_tokens=2)
    with tempfile.TemporaryDirectory() as folder:
        repro = works(lambda: pair.save_repro(SITE, Path(folder) / "repro", step=0))
    pair.close()
    quantized = EngineSpec.of(small, backend=name, options={**options, "quantize": "int8"}, outputs=(), profile=PROFILE)
    return {
        "localize": bool(found) and found.localization is not None,
        "observer": found.observer is not None,
        "repro": repro,
        "int8": works(lambda: Pair(workspace, quantized).generate(PROMPTS, max_new_tokens=2)),
        "own file": own_file(name, options, workspace),
    }


def own_file(name: str, options: dict[str, Any], workspace: Workspace | None = None) -> bool:
    """Tell whether the file of an engine is right as the engine of a test."""
    workspace = workspace or Workspace()
    built = workspace.build(EngineSpec.of(small, backend=name, options=options, outputs=(), profile=PROFILE))
    with tempfile.TemporaryDirectory() as folder:
        copied = shutil.copytree(built.directory, Path(folder) / "engine")
        if name not in OWN_FILES:
            return False
        file = OWN_FILES[name](copied)
        found = []

        def run() -> None:
            pair = Pair(workspace, EngineSpec.of(small, engine=file, profile=PROFILE), PairOptions(isolation="none"))
            found.append(pair.generate(PROMPTS, max_new_tokens=2))

        return works(run) and bool(found[0])


def works(call: Any) -> bool:
    """Tell whether a call raises no error of ditto's."""
    try:
        call()
    except DittoError as error:
        print(first_line(error), flush=True)
        return False
    return True


def write_table() -> None:
    """Replace the table on the pages."""
    for page in PAGES:
        before, rest = page.read_text().split(BEGIN)
        _, after = rest.split(END)
        page.write_text(f"{before}{BEGIN}{markdown()}\n{END}{after}")


def main(names: list[str], target: str = "measure") -> None:
    """Measure, one variant after the other; each record is written as soon as there is one."""
    for variant in names:
        name, options = VARIANTS[variant]
        log = Path(tempfile.gettempdir()) / f"ditto-{variant.replace(' ', '-')}.log"
        print(f"{variant}: {log}", flush=True)
        try:
            record = run_isolated(f"backends:{target}", {"name": name, "options": options}, log=log)
        except DittoError as error:
            print(f"{variant}: not measured: {error}")
            continue
        records = json.loads(MEASURED_FILE.read_text()) if MEASURED_FILE.exists() else {}
        if target == "own_file":
            records[variant]["abilities"]["own file"] = record
        else:
            records[variant] = record
        MEASURED_FILE.write_text(json.dumps(dict(sorted(records.items())), indent=1) + "\n")
        write_table()


if __name__ == "__main__":
    if sys.argv[1:] == ["--table"]:
        write_table()
    elif sys.argv[1:2] == ["--own-file"]:
        main(sys.argv[2:] or list(VARIANTS), "own_file")
    else:
        main(sys.argv[1:] or list(VARIANTS))
