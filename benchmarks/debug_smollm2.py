"""`ditto debug reduce` and `polygraphy debug reduce` on SmolLM2 with one fault, as `smollm2_faults.py` has them.

    python benchmarks/debug_smollm2.py --model DIR --out benchmarks/debug_smollm2.json [--layers N] [--tools ...]

Ten faults at ten sites of the whole model, or of its first layers with their real weights. The input is a step of
three tokens after a cache of six. Both tools run `debug_check.py`; a part is bad when it is off by more than 1e-5.
Rows that the file holds already are not measured again.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from benchmarks import debug_cases as cases  # noqa: E402
from benchmarks import debug_reduce  # noqa: E402
from benchmarks.smollm2_faults import LAYERS, faults  # noqa: E402
from tests.faults import Edit  # noqa: E402

TOOLS = ("ditto", "ditto --check", "polygraphy bisect")
TOLERANCE = 1e-5
IDS = [504, 3575, 282, 4649, 314, 7042, 28, 284, 260]
PAST = 6


def export(model_dir, folder, layers):
    """Export the first layers of the model and return the path of the ONNX file."""
    from ditto_core.cache import Cache
    from ditto_core.engines.workspace import Workspace
    from ditto_core.model.loading import load_model
    from ditto_core.spec import EngineSpec, ModelSource

    module = load_model(ModelSource.of(model_dir)).module
    module.model.layers = module.model.layers[:layers]
    module.config.num_hidden_layers = layers
    if getattr(module.config, "layer_types", None):
        module.config.layer_types = module.config.layer_types[:layers]

    def first_layers():
        return module

    return Workspace(Cache(folder)).export(EngineSpec.of(first_layers)).onnx_path


def feed_of(good):
    """Return the inputs of a step of three tokens after a prefill of six, with the cache that the prefill leaves."""
    from ditto_core.debug.evaluate import PLAIN

    prefill = {**cases.decoder_feed(good), **tokens(IDS[:PAST], 0)}
    outputs = PLAIN.run(good, prefill)
    past = {n.replace("present.", "past_key_values."): v for n, v in outputs.items() if n.startswith("present.")}
    return {**past, **tokens(IDS[PAST:], PAST)}


def tokens(ids, past):
    end = past + len(ids)
    return {
        "input_ids": np.array([ids]),
        "attention_mask": np.ones((1, end), np.int64),
        "position_ids": np.arange(past, end)[None],
    }


def case_of(site, fault, path, good, feed):
    """Put one fault into the exported model; the faulty nodes are those that the good one has not."""
    edit = Edit(onnx.load(str(path), load_external_data=False), path.parent)
    fault(edit)
    onnx.load_external_data_for_model(edit.model, str(path.parent))
    known = {plain(node, good): node.name for node in good.graph.node}
    for node in edit.graph.node:
        node.name = node.name or node.output[0]
    faulty = tuple(node.name for node in edit.graph.node if plain(node, edit.model) not in known)
    shapes = [f"{name}:{list(array.shape)}".replace(" ", "") for name, array in feed.items()]
    return cases.Case(site, edit.model, good, feed, faulty, shapes=shapes)


def plain(node, model):
    """Return what tells a node from another: operator, inputs and outputs; a constant counts by its name."""
    return node.op_type, tuple(node.input), tuple(node.output)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True, help="Write the rows here as JSON.")
    parser.add_argument("--tools", nargs="+", default=TOOLS)
    parser.add_argument("--layers", type=int, default=LAYERS, help="How many of the model's layers (default: all).")
    parser.add_argument("--sites", nargs="+", help="Where the fault is (default: all).")
    arguments = parser.parse_args()
    debug_reduce.TOLERANCE = TOLERANCE
    with tempfile.TemporaryDirectory() as name:
        measure(arguments, Path(name))


def measure(arguments, scratch):
    """Run every tool on every case and write each row as it is done."""
    rows = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    done = {(row["layers"], row["case"], row["tool"]) for row in rows}
    path = export(arguments.model, scratch / "cache", arguments.layers)
    good = onnx.load(str(path))
    feed = feed_of(good)
    print(len(good.graph.node), "nodes,", good.ByteSize() >> 20, "MiB", flush=True)
    injected = faults(arguments.layers)
    for site in arguments.sites or injected:
        tools = [tool for tool in arguments.tools if (arguments.layers, site, tool) not in done]
        case = case_of(site, injected[site][0], path, good, feed) if tools else None
        for tool in tools:
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                row = debug_reduce.run(case, tool, Path(folder))
            rows.append({"layers": arguments.layers, **row, "faulty": case.faulty})
            print(json.dumps(rows[-1]), flush=True)
            arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
