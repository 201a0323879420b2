"""`ditto debug reduce` and `polygraphy debug reduce` on the same failing models: checks, seconds, nodes that remain.

    python benchmarks/debug_reduce.py --out benchmarks/debug.json    # about 15 minutes, of which linear mode takes most
    python benchmarks/debug_reduce.py --quick                        # the small cases

Both tools run the same check command (`debug_check.py`), which counts how often it was run, and both have the real
inputs: Polygraphy freezes values from them where it cuts a branch off. Needs `polygraphy`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from benchmarks import debug_cases as cases  # noqa: E402
from ditto_core.debug.oracle import tensor  # noqa: E402
from ditto_core.dumps.polygraphy import save_inputs  # noqa: E402

TOOLS = ("ditto", "ditto --check", "ditto --check, no ranking", "polygraphy bisect", "polygraphy linear")

TOLERANCE = 1e-3
FEW = 10


def run(case, tool, folder):
    """Run one tool on one case in an empty folder and return what it cost and left."""
    onnx.save(case.bad, folder / "bad.onnx")
    onnx.save(case.good, folder / "good.onnx")
    np.savez(folder / "inputs.npz", **case.feed)
    save_inputs(folder / "inputs.json", [{name: tensor(array) for name, array in case.feed.items()}])
    np.savez(folder / "captured.npz", **captured(case))
    (folder / "checks.log").write_text("")
    settings = {"together": case.faulty if case.together else [], "tolerance": TOLERANCE}
    (folder / "check.json").write_text(json.dumps(settings))
    start = time.perf_counter()
    done = subprocess.run(
        command(case, tool), cwd=folder, capture_output=True, text=True, env=environment(), check=False
    )
    seconds = time.perf_counter() - start
    nodes = left(folder / "reduced.onnx")
    checks = len((folder / "checks.log").read_text().splitlines())
    if tool == "ditto" and done.returncode == 0:
        checks = json.loads((folder / "result.json").read_text())["judged"]
    return {
        "case": case.name,
        "tool": tool,
        "checks": checks,
        "seconds": round(seconds, 1),
        "nodes": len(nodes),
        "left": nodes[:FEW],
        "contains_fault": set(case.faulty) <= set(nodes),
        "error": done.stderr[-300:] if done.returncode else "",
    }


def left(path):
    """Return the names of the nodes of the reduced model; constants are not counted."""
    nodes = onnx.load(path).graph.node if path.exists() else []
    return [node.name for node in nodes if node.op_type != "Constant"]


def captured(case):
    """Return every value of the failing model, so that the check has real data at every cut for either tool."""
    from ditto_core.debug.evaluate import capture
    from ditto_core.graphs.constants import constants_as_initializers
    from ditto_core.graphs.graph import Graph

    return capture(Graph(constants_as_initializers(case.bad)), case.feed)


def command(case, tool):
    check = [sys.executable, str(ROOT / "benchmarks" / "debug_check.py")]
    files = ["bad.onnx", "-o", "reduced.onnx"]
    if tool.startswith("polygraphy"):
        real = ["--load-inputs", "inputs.json"]
        shapes = ["--model-input-shapes", *case.shapes] if case.shapes else []
        base = [sys.executable, str(Path(sys.executable).parent / "polygraphy"), "debug", "reduce", *files]
        return [*base, "--mode", tool.split()[1], *real, *shapes, "--check", *check]
    base = [sys.executable, "-m", "ditto_core", "debug", "reduce", *files, "--json", "result.json"]
    real = ["--inputs", "inputs.npz", "--reference", "good.onnx"]
    if tool == "ditto":
        return [*base, *real, "--tolerance", str(TOLERANCE)]
    return [*base, *([] if "no ranking" in tool else real), "--check", *check]


def environment():
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def applicable(case, tool):
    """Nodes that fail by being there together are there in the good model too: only a check alone can tell."""
    return not case.together or tool not in ("ditto", "ditto --check")


def all_cases(quick, model):
    sizes = (8,) if quick else (8, 16, 32, 64)
    yield cases.branch()
    yield cases.pair()
    yield from (cases.chain(count, place) for count in sizes for place in ("first", "middle", "last"))
    if model is not None:
        yield cases.llama(model)


def export_llama(folder):
    from ditto_core.cache import Cache
    from ditto_core.engines.workspace import Workspace
    from ditto_core.spec import EngineSpec
    from tests.models import llama

    return Workspace(Cache(folder)).export(EngineSpec.of(llama)).onnx_path


def table(rows):
    lines = ["| case | " + " | ".join(TOOLS) + " |", "| --- |" + " --- |" * len(TOOLS)]
    for name in dict.fromkeys(row["case"] for row in rows):
        cells = {row["tool"]: cell(row) for row in rows if row["case"] == name}
        lines.append(f"| {name} | " + " | ".join(cells.get(tool, "not applicable") for tool in TOOLS) + " |")
    return "\n".join(lines)


def cell(row):
    if row["error"]:
        return "fails"
    text = f"{row['checks']} checks, {row['seconds']:.1f} s, {row['nodes']} left"
    return text if row["contains_fault"] else f"{text} (without the fault)"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, help="Write the rows here as JSON.")
    parser.add_argument("--table", type=Path, help="Only print the table of rows that were written before.")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.table.read_text())))
        return
    rows = []
    with tempfile.TemporaryDirectory() as name:
        model = None if arguments.quick else export_llama(Path(name) / "cache")
        for case in all_cases(arguments.quick, model):
            for tool in (tool for tool in TOOLS if applicable(case, tool)):
                with tempfile.TemporaryDirectory(dir=name) as folder:
                    rows.append(run(case, tool, Path(folder)))
                print(json.dumps(rows[-1]), flush=True)
                if arguments.out:
                    arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
