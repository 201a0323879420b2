"""The search of `polygraphy debug precision` beside ditto's, over a stand-in for TensorRT's builder: builds needed.

    python benchmarks/debug_precision.py --model DIR --out benchmarks/debug_precision.json

The tool needs TensorRT 10's layer precisions and a GPU. Its command line, iterations, check command, markers and rules
for excluded layers run here as they are; what loads the network, builds the engine and saves it is a stand-in. A layer
of the network is a node of the ONNX model. The fault is one that a higher precision heals: a layer that the search
marks is taken from the good model, any other from the faulty one. An "engine" is how far the outputs of that mixture
are off. Mixtures that come out as the same model are run once. Also the float16 network with one norm that overflows,
where marked operators are in float32 and the rest is rounded as a strongly typed engine does.
"""

import argparse
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import onnx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from benchmarks import debug_smollm2 as smollm2  # noqa: E402
from benchmarks.smollm2_faults import LAYERS, faults  # noqa: E402
from ditto_core.debug.evaluate import PLAIN, capture  # noqa: E402
from ditto_core.debug.oracle import Reference, distance, local_errors  # noqa: E402
from ditto_core.debug.precision import PrecisionSearch  # noqa: E402
from ditto_core.debug.trials import PrecisionOptions  # noqa: E402
from ditto_core.errors import UsageError  # noqa: E402
from ditto_core.graphs.constants import constants_as_initializers  # noqa: E402
from ditto_core.graphs.graph import Graph  # noqa: E402

Judge = Callable[[frozenset[int]], float]
"""Marked layers -> rel-L2 of the worst output."""
OVERFLOW = "float16, one norm overflows"
SEARCHES = [(mode, direction) for mode in ("bisect", "linear") for direction in ("forward", "reverse")]
DTYPES = {onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.FLOAT16: "float16", onnx.TensorProto.INT8: "int8"}


class StandInLayer:
    """Stands in for a TensorRT layer: what the tool asks of one."""

    def __init__(self, kind: str, dtypes: Sequence[str]) -> None:
        self.type, self.num_outputs, self.precision = kind, len(dtypes), ""
        self._outputs = [SimpleNamespace(is_execution_tensor=True, dtype=dtype) for dtype in dtypes]

    @property
    def precision_is_set(self) -> bool:
        return bool(self.precision)

    def get_output(self, index: int) -> Any:
        return self._outputs[index]

    def reset_precision(self) -> None:
        self.precision = ""


class StandInNetwork(list[StandInLayer]):
    """Stands in for a TensorRT network, one layer a node."""

    @classmethod
    def of(cls, graph: Graph) -> "StandInNetwork":
        kinds = {name: value.type.tensor_type.elem_type for name, value in graph.types.items()}
        dtypes = [[DTYPES.get(kinds.get(name, 0), "other") for name in node.output if name] for node in graph.nodes]
        return cls(StandInLayer(node.op_type, found) for node, found in zip(graph.nodes, dtypes, strict=True))

    def get_layer(self, index: int) -> StandInLayer:
        return self[index]

    @property
    def marked(self) -> frozenset[int]:
        return frozenset(i for i, layer in enumerate(self) if layer.precision_is_set)


def stand_in_tensorrt() -> ModuleType:
    """Return a stand-in for the names that the tool reads from TensorRT."""
    module = ModuleType("tensorrt")
    names = {name: name for name in ("float32", "float16", "int8")}
    module.__dict__.update(names, __version__="10.0", LayerType=SimpleNamespace(CONSTANT="Constant"))
    return module


def polygraphy(network: StandInNetwork, judge: Judge, tolerance: float, mode: str, direction: str) -> dict[str, Any]:
    """Run the tool in an empty folder; return its builds, and how many layers at which end it asks to raise."""
    builds: list[frozenset[int]] = []

    def build(_: Any, __: Any) -> io.BytesIO:
        builds.append(network.marked)
        return io.BytesIO(b"%r" % judge(network.marked))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, tensorrt=stand_in_tensorrt()))
        from polygraphy.logger import G_LOGGER
        from polygraphy.tools.args import TrtLoadEngineBytesArgs, TrtLoadNetworkArgs, TrtSaveEngineBytesArgs
        from polygraphy.tools.debug.subtool import precision

        G_LOGGER.module_severity = G_LOGGER.CRITICAL
        for owner, name, value in (
            (TrtLoadNetworkArgs, "load_network", lambda _: (None, network, None)),
            (TrtLoadEngineBytesArgs, "load_engine_bytes", build),
            (TrtSaveEngineBytesArgs, "save_engine_bytes", lambda _, engine, path: write(path, engine)),
            (precision, "trt_util", SimpleNamespace(str_from_layer=lambda *_: "")),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        tool = precision.Precision()
        check = ["awk", f"{{exit !($1 <= {tolerance})}}", "polygraphy_debug.engine"]
        words = ["bad.onnx", "--fp16", "--save-debug-replay", "", "--mode", mode, "--dir", direction, "--check", *check]
        arguments = tool.setup_parser().parse_args(words)
        tool.parse(arguments)
        G_LOGGER.module_severity = G_LOGGER.CRITICAL
        tool.run(arguments)
    good = tool.layer_marker.good
    found = good <= len(network)
    which = range(good) if direction == "forward" else range(len(network) - good, len(network))
    return {"builds": len(builds), "raised": good if found else None, "layers": list(which) if found else []}


def write(path: str, engine: io.BytesIO) -> None:
    Path(path).write_bytes(engine.getvalue())


class SearchOverStandIn(PrecisionSearch):
    """ditto's own search and guesses, over the stand-in in place of a float16 graph; what touches floats is kept."""

    def __init__(self, graph: Graph, errors: dict[int, float], judge: Judge, tolerance: float) -> None:
        self.graph, self.errors, self.elsewhere, self.left = graph, errors, None, -1
        kinds = {name: value.type.tensor_type.elem_type for name, value in graph.types.items()}
        kinds |= {name: tensor.data_type for name, tensor in graph.weights.items()}
        floats = {name for name, kind in kinds.items() if kind in DTYPES}
        chosen = [i for i, node in enumerate(graph.nodes) if floats & {*node.input, *node.output}]
        self.order = sorted(chosen, key=lambda i: (-errors.get(i, 0.0), i))
        self.builds: list[frozenset[int]] = []
        self.reasons: dict[frozenset[int], str] = {}
        self.options: Any = SimpleNamespace(keep="float32")
        self._holds = lambda kept: judge(kept) <= tolerance

    def meets(self, iterations: Any, kept: frozenset[int]) -> bool:
        self.builds.append(kept)
        self.reasons[kept] = "off"
        return bool(self._holds(kept))


def healing(case: Any, good: Graph) -> tuple[Judge, frozenset[int]]:
    """Return the builder for one case, and the layers whose nodes are not those of the faulty model."""
    bad = {name: node for node in case.bad.graph.node for name in node.output}
    faulty = frozenset(i for i, node in enumerate(good.nodes) if smollm2.plain(node, None) != plain_of(bad, node))
    expected, seen = PLAIN.run(good.model, case.feed), {}

    def judge(marked: frozenset[int]) -> float:
        healed = marked & faulty
        if healed not in seen:
            values = PLAIN.run(mixture(case.bad, [good.nodes[i] for i in healed], good), case.feed)
            seen[healed] = max(distance(values[name], array) for name, array in expected.items())
        return seen[healed]

    return judge, faulty


def plain_of(bad: dict[str, Any], node: Any) -> Any:
    return smollm2.plain(bad[node.output[0]], None) if node.output[0] in bad else None


def mixture(bad: onnx.ModelProto, healed: Collection[Any], good: Graph) -> onnx.ModelProto:
    """Return the faulty model with some nodes of the good one, each in the place of what computes its output."""
    model = onnx.ModelProto()
    model.CopyFrom(bad)
    new = {node.output[0]: node for node in healed}
    nodes = [next((new[name] for name in node.output if name in new), node) for node in bad.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    held = {tensor.name for tensor in model.graph.initializer}
    read = {name for node in healed for name in node.input} & set(good.weights)
    model.graph.initializer.extend(good.weights[name] for name in sorted(read - held))
    return model


def ranking(case: Any, good: Graph) -> dict[int, float]:
    """Return local errors by the good model's nodes, from one run of each model."""
    bad = Graph(constants_as_initializers(case.bad))
    errors = local_errors(bad, capture(bad, case.feed), good)
    return {good.producer[n]: e for i, e in errors.items() for n in bad.nodes[i].output if n in good.producer}


def rows_of(name: str, graph: Graph, judge: Judge, tolerance: float, errors: Any, faulty: Any) -> list[dict[str, Any]]:
    """Run every search on one case."""
    ditto = SearchOverStandIn(graph, errors, judge, tolerance)
    try:
        kept: list[int] = ditto.search(None)  # type: ignore[arg-type]
    except UsageError:  # even with all operators raised it fails
        kept = []
    row = {"builds": len(ditto.builds), "raised": len(kept) or None, "contains_fault": faulty <= {*kept}}
    rows: list[dict[str, Any]] = [{"search": "ditto", **row}]
    for mode, direction in SEARCHES:
        network = StandInNetwork.of(graph)
        found = polygraphy(network, judge, tolerance, mode, direction)
        layers = set(found.pop("layers"))
        rows.append({"search": f"{mode} {direction}", **found, "contains_fault": bool(layers) and faulty <= layers})
    places = [[i, graph.nodes[i].op_type] for i in sorted(faulty)]
    return [{"case": name, "nodes": len(graph.nodes), "faulty": places, **row} for row in rows]


def smollm2_rows(arguments: Any, scratch: Path, done: Collection[str]) -> Iterator[list[dict[str, Any]]]:
    path = smollm2.export(arguments.model, scratch / "cache", arguments.layers)
    model = onnx.load(str(path))
    feed = smollm2.feed_of(model)
    good = Graph(constants_as_initializers(model))
    for site, (fault, _, _) in faults(arguments.layers).items():
        if site not in done:
            case = smollm2.case_of(site, fault, path, model, feed)
            judge, faulty = healing(case, good)
            yield rows_of(site, good, judge, smollm2.TOLERANCE, ranking(case, good), faulty)


def overflow_rows(scratch: Path, done: Collection[str]) -> Iterator[list[dict[str, Any]]]:
    """The float16 network of `tests/engines/test_debug_precision.py`, where ditto's command needs 7 builds."""
    if OVERFLOW in done:
        return
    from ditto_core.cache import Cache
    from ditto_core.debug.iterations import IterationOptions
    from ditto_core.engines.workspace import Workspace
    from ditto_core.spec import EngineSpec
    from tests.engines.overflow import one_hot_norm

    path = Workspace(Cache(scratch / "small")).export(EngineSpec.of(one_hot_norm, dtype="float16")).onnx_path
    feed = {"x": one_hot_norm()[1]["x"].numpy()}
    options = PrecisionOptions(path, feed, Reference(precision="float32"))
    search = PrecisionSearch(Graph.load(path), options, IterationOptions())
    judge = search.verdict

    def worst(marked: frozenset[int]) -> float:
        kept = marked & set(search.mixer.candidates())
        values = judge._run(search.mixer.mixed(kept))
        return max(distance(values[name], array) for name, array in judge.expected.items())

    lost = frozenset(i for i, error in search.errors.items() if not error < 1)
    yield rows_of(OVERFLOW, search.graph, worst, judge.tolerance, search.errors, lost)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True, help="Rows as JSON; cases that it holds are not run again.")
    parser.add_argument("--layers", type=int, default=LAYERS)
    arguments = parser.parse_args()
    out, arguments.model = arguments.out.resolve(), os.path.realpath(arguments.model)
    rows = json.loads(out.read_text()) if out.exists() else []
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        done = {row["case"] for row in rows}
        for found in chain(overflow_rows(Path(name), done), smollm2_rows(arguments, Path(name), done)):
            rows += found
            out.write_text(json.dumps(rows, indent=1) + "\n")
            print("\n".join(map(json.dumps, found)), flush=True)


if __name__ == "__main__":
    main()
