"""The smallest proof of a fault: the operators of one site, the engine's own tensors around them, and a test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ditto_core.backends.base import Arrays, RunsOperators, StoresGraph
from ditto_core.backends.eager import HIGHER
from ditto_core.backends.registry import get_backend
from ditto_core.compare.metrics import measure
from ditto_core.compare.tolerance import EPSILON, FACTOR
from ditto_core.errors import BackendError, SelectorError, UsageError, nearest
from ditto_core.graphs.cut import extract
from ditto_core.graphs.graph import Graph
from ditto_core.repro.truth import Truth, array
from ditto_core.session import ShowsCache
from ditto_core.stepping.prompts import Sequencer, TokenBatch, valid_elements

if TYPE_CHECKING:
    import numpy.typing as npt

    from ditto_core.engines.engine import Engine
    from ditto_core.model.exported import Export
    from ditto_core.model.loading import LoadedModel
    from ditto_core.session import Session
    from ditto_core.sites import Tap

FACTS_FILE, MODEL_FILE, INPUTS_FILE, OUTPUT_FILE = (
    "repro.json",
    "model.onnx",
    "inputs.safetensors",
    "output.safetensors",
)
TEST_FILE = "test_repro.py"
PACKAGES = ("onnx", "onnxruntime", "numpy", "safetensors", "torch", "transformers")

Tensors = Mapping[str, torch.Tensor]
Fed = TokenBatch | Tensors
"""What a run was fed: prompts, or the inputs of a model that is not a decoder."""


@dataclass(frozen=True)
class Repro:
    """What was written. ``rel_l2``: the engine's output against the expected one, both from the same inputs.

    ``rerun``: the operators by themselves against the expected output; None where only the engine's own backend could
    run them. ``floor``: the error of the engine's dtype there, of which ``bound`` is a multiple. ``size``: bytes.
    """

    directory: Path
    site: str
    step: int
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    expected_from: str
    rel_l2: float
    rerun: float | None
    floor: float
    bound: float
    size: int

    @property
    def fails(self) -> bool:
        """Tell whether the engine's output is wrong for the engine's own inputs: else the error came from upstream."""
        return not self.rel_l2 <= self.bound


@dataclass(frozen=True)
class Moment:
    """One step of an engine: every tensor that is known there, by ONNX value, and the padding mask."""

    values: Tensors
    mask: torch.Tensor | None
    length: int


def save_repro(
    engine: Engine,
    session: Session,
    export: Export,
    model: LoadedModel,
    fed: Fed,
    *,
    site: str,
    directory: Path | str,
    step: int = 0,
    tokens: torch.Tensor | None = None,
) -> Repro:
    """Run ``session`` again up to ``step`` and write the site's operators, cut at the nearest captured tensors.

    ``fed`` is what the run was fed, ``tokens`` [rows, steps] the tokens that followed. The expected output comes from
    the eager module where the cut is the module's own input, else from the export's operators in ONNX's reference
    implementation, in higher precision. Raises :class:`UsageError` for a directory that holds something else, a step
    or a dtype that cannot be written, :class:`SelectorError` for a site that the engine does not show.
    """
    folder = checked_folder(Path(directory))
    tap = find_tap(engine, site)
    if engine.spec.dtype not in HIGHER or engine.spec.dtype == "bfloat16":
        raise UsageError(f"no repro in {engine.spec.dtype}: neither numpy nor onnxruntime computes in it")
    moment = observe(session, engine, fed, step, tokens)
    known = {name: array(tensor) for name, tensor in moment.values.items() if name != tap.value}
    actual = array(moment.values[tap.value])
    source = engine_graph(engine, export)
    graph = extract(source, tap.value, checked(source, tap, known), actual)
    inputs = {value.name: np.ascontiguousarray(known[value.name]) for value in graph.graph.input}
    truth = Truth(model, export, engine, tap, inputs, known)
    expected, origin = truth.expected(HIGHER[engine.spec.dtype])
    noisy, _ = truth.expected(engine.spec.dtype)
    valid = None if moment.mask is None else valid_elements(tap.axes, moment.mask, moment.length)
    floor = max(error(noisy, expected, valid), EPSILON[engine.spec.dtype] / 2)
    alone = run_alone(graph, inputs, engine)
    found = Repro(
        directory=folder,
        site=site,
        step=step,
        nodes=tuple(node.op_type for node in graph.graph.node),
        inputs=tuple(inputs),
        expected_from=origin,
        rel_l2=error(actual, expected, valid),
        rerun=None if alone is None else error(alone, expected, valid),
        floor=floor,
        bound=FACTOR * floor,
        size=0,
    )
    outputs = {"engine": actual, "expected": expected} | ({} if valid is None else {"valid": array(valid)})
    return write(found, engine, graph.SerializeToString(), inputs, outputs)


def checked_folder(folder: Path) -> Path:
    """Return the directory; it may be missing, empty, or hold an earlier repro."""
    if folder.exists() and any(folder.iterdir()) and not (folder / FACTS_FILE).exists():
        raise UsageError(f"{folder} is not empty, expected a new directory or that of an earlier repro")
    return folder


def find_tap(engine: Engine, site: str) -> Tap:
    """Return the engine's tap of a site, by its name or an alias."""
    for tap in engine.taps:
        if site in (tap.site, *tap.aliases):
            return tap
    names = [name for tap in engine.taps for name in (tap.site, *tap.aliases)]
    raise SelectorError(f"the engine has no tap {site!r}{nearest(site, names)}; it has {len(engine.taps)}")


def observe(session: Session, engine: Engine, fed: Fed, step: int, tokens: torch.Tensor | None) -> Moment:
    """Run to a step and return every tensor that is known there."""
    seen: dict[str, torch.Tensor] = {}
    value_of = {tap.site: tap.value for tap in engine.taps}
    if not isinstance(fed, TokenBatch):
        if step:
            raise UsageError(f"step {step} was asked for, this model has repros of step 0 alone")
        session.start(next((t.shape[0] for t in fed.values() if t.ndim), 1))
        outputs = session.step(fed, lambda s, t: seen.__setitem__(value_of[s], t.clone()))
        return Moment({**fed, **outputs, **seen}, None, 0)
    if step < 0 or (step and (tokens is None or tokens.shape[1] < step)):
        raise UsageError(f"step {step} was asked for, the run has {0 if tokens is None else tokens.shape[1]} steps")
    sequencer = Sequencer(fed)
    session.start(fed.rows)
    for i in range(step):
        session.step(sequencer.inputs(), lambda site, tensor: None)
        assert tokens is not None
        sequencer.advance(tokens[:, i])
    inputs = sequencer.inputs()
    cache = session.past if isinstance(session, ShowsCache) else {}
    past = {name: tensor.clone() for name, tensor in cache.items()}
    outputs = session.step(inputs, lambda s, t: seen.__setitem__(value_of[s], t.clone()))
    return Moment({**inputs, **past, **outputs, **seen}, inputs["attention_mask"], inputs["input_ids"].shape[1])


def checked(source: Path, tap: Tap, known: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``known``, unless the cut needs something else: the cache of a backend that does not show it."""
    whole = Graph.read(source)
    needs, _ = whole.boundary(whole.upstream([tap.value], known))
    lacking = [name for name in needs if name not in known]
    if lacking:
        raise BackendError(
            f"{tap.site} is computed from {lacking[0]}, which this engine does not show: tap what lies between"
        )
    return known


def engine_graph(engine: Engine, export: Export) -> Path:
    """Return the ONNX file that the engine computes: its own where it is one, else the export's."""
    backend = get_backend(engine.spec.backend)
    return backend.graph_file(engine.directory) if isinstance(backend, StoresGraph) else export.graph_path()


def run_alone(graph: Any, inputs: Arrays, engine: Engine) -> npt.NDArray[Any] | None:
    """Run the operators by themselves as the written test does; None where the backend cannot."""
    backend = get_backend(engine.spec.backend)
    if not isinstance(backend, RunsOperators):
        return None
    return backend.run_operators(engine.spec, graph.SerializeToString(), inputs)


def operators_test(engine: Engine) -> str:
    """Return the test that runs the operators by themselves; empty where the backend cannot."""
    backend = get_backend(engine.spec.backend)
    return backend.operators_test(engine.spec) if isinstance(backend, RunsOperators) else ""


def error(actual: npt.NDArray[Any], expected: npt.NDArray[Any], valid: torch.Tensor | None) -> float:
    """Return the rel-L2 error outside of padding."""
    return measure(torch.from_numpy(actual), torch.from_numpy(expected), valid=valid).rel_l2


def write(
    found: Repro,
    engine: Engine,
    graph: bytes,
    inputs: Mapping[str, npt.NDArray[Any]],
    outputs: Mapping[str, npt.NDArray[Any]],
) -> Repro:
    """Write all files and return the repro with its size."""
    from safetensors.numpy import save_file

    folder = found.directory
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MODEL_FILE).write_bytes(graph)
    save_file(dict(inputs), folder / INPUTS_FILE)
    save_file(dict(outputs), folder / OUTPUT_FILE)
    facts = asdict(found) | {
        "directory": None,
        "size": None,
        "rule": f"{FACTOR:g} x noise floor {found.floor:.1e}",
        "model": engine.spec.model.label,
        "engine": f"{engine.spec.backend} {engine.spec.dtype}",
        "versions": {**versions(), **engine.versions},
    }
    facts = {name: value for name, value in facts.items() if value is not None}
    (folder / FACTS_FILE).write_text(json.dumps(facts, indent=1, default=str) + "\n")
    text = (files("ditto_core.repro") / "test.py.txt").read_text().format(**facts)
    (folder / TEST_FILE).write_text(text + operators_test(engine))
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return Repro(**{**found.__dict__, "size": size})


def versions() -> dict[str, str]:
    """Return the versions of what took part."""
    found = {}
    for name in PACKAGES:
        with suppress(Exception):
            found[name] = version(name)
    return found
