"""A tapped and compared decoding step beside the forwards that it cannot do without.

Run ``python benchmarks/step.py [LAYERS [WIDTH [OUT.json]]]``, 32 and 4096 by default: the shape of an 8 B Llama with
random weights, on the GPU where there is one. The engine is the eager model in bfloat16, the reference the
same in float32, each tapped at every block, its attention, its MLP and its two norms. No noise floor is measured, as
from the second run on. The ways to step take turns, so that what else the machine does meets all of them. Medians of
decoding steps, in milliseconds, at 1 and at 64 rows; the ratio is the median of each turn's own.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ditto_core.backends.eager import EagerSession
from ditto_core.compare.tolerance import Tolerance
from ditto_core.model.loading import LoadedModel
from ditto_core.session import Session
from ditto_core.sites import Tap
from ditto_core.stepping.lockstep import run_step
from ditto_core.stepping.measured import Measured
from ditto_core.stepping.prompts import Sequencer, TokenBatch
from ditto_core.stepping.sides import Sides

STEPS, PROMPT, VOCABULARY = 32, 64, 128256
PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp", "")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def model_of(layers: int, width: int) -> torch.nn.Module:
    """Return a Llama with random weights in float32, on the device."""
    heads = max(1, width // 128)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=7 * width // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        attn_implementation="eager",
    )
    with torch.device(DEVICE):
        return LlamaForCausalLM(config).eval().requires_grad_(False)  # type: ignore[no-any-return]


def taps_of(layers: int) -> tuple[Tap, ...]:
    """Return the taps of every block, the last norm and the logits."""
    paths = [".".join(filter(None, ("model.layers", str(i), part))) for i in range(layers) for part in PARTS]
    inner = [Tap(path, path, axes=("batch", "length", "")) for path in (*paths, "model.norm")]
    return (*inner, Tap("lm_head", "logits", axes=("batch", "length", "")))


def session_of(model: torch.nn.Module, dtype: str, taps: tuple[Tap, ...]) -> Session:
    """Return an eager session of a model that is on the device in this dtype: it is not copied."""
    return EagerSession(LoadedModel(model, True, "made", {}), taps, dtype=dtype, device=DEVICE)


class Stepped:
    """One way to step: its own tokens, and the milliseconds of each step."""

    def __init__(self, step: Callable[[int, dict[str, torch.Tensor]], object], rows: int) -> None:
        ids = torch.randint(VOCABULARY, (rows, PROMPT), generator=torch.Generator().manual_seed(0))
        self._side = Sequencer(TokenBatch(ids, torch.ones_like(ids)))
        self._step = step
        self._rows = rows
        self.times: list[float] = []

    def step(self, number: int) -> None:
        """Run and time the next step."""
        inputs = self._side.inputs()
        wait()
        begin = time.perf_counter()
        self._step(number, inputs)
        wait()
        self.times.append(1e3 * (time.perf_counter() - begin))
        self._side.advance(torch.full((self._rows,), number))


def wait() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def ignore(site: str, tensor: torch.Tensor) -> None:
    """Let go of a tap."""


def case(rows: int, engine: torch.nn.Module, reference: torch.nn.Module, taps: tuple[Tap, ...]) -> dict[str, Any]:
    """Time the steps of so many rows, by turns: each side alone, plain and tapped, and both compared."""
    ways: dict[str, Stepped] = {}
    for name, model, dtype in (("engine", engine, "bfloat16"), ("reference", reference, "float32")):
        for kind, wanted in (("plain", ()), ("tapped", taps)):
            session = session_of(model, dtype, wanted)
            session.start(rows)
            ways[f"{name}_{kind}"] = Stepped(partial(stepped, session), rows)
    sides = Sides(session_of(engine, "bfloat16", taps), session_of(reference, "float32", taps))
    measured, tolerance, scores = Measured(), Tolerance(), (last, last)
    sides.start(rows)
    ways["compared"] = Stepped(
        lambda number, inputs: run_step(sides, number, inputs, inputs, measured, tolerance, scores), rows
    )
    for number in range(STEPS):
        for way in ways.values():
            way.step(number)
    times = {name: way.times[2:] for name, way in ways.items()}
    both, *plain = (times[name] for name in ("compared", "engine_plain", "reference_plain"))
    ratios = [ours / (one + other) for ours, one, other in zip(both, *plain, strict=True)]
    found = {"rows": rows, "taps": len(taps), "comparisons": len(measured.results)}
    found |= {f"{name}_ms": statistics.median(each) for name, each in times.items()}
    found |= {"ratio": statistics.median(ratios), "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2]}
    print(json.dumps(found), flush=True)
    return found


def stepped(session: Session, number: int, inputs: dict[str, torch.Tensor]) -> object:
    """Run one step of a session."""
    return session.step(inputs, ignore)


def last(logits: torch.Tensor) -> torch.Tensor:
    """Return the last token's logits."""
    return logits[:, -1]


def main(layers: int = 32, width: int = 4096, out: str = "") -> None:
    """Print the figures and write them."""
    torch.manual_seed(0)
    reference = model_of(layers, width)
    engine = copy.deepcopy(reference).to(torch.bfloat16)
    cases = [case(rows, engine, reference, taps_of(layers)) for rows in (1, 64)]
    if out:
        Path(out).write_text(json.dumps({"layers": layers, "width": width, "torch": torch.__version__, "cases": cases}))


if __name__ == "__main__":
    main(*(int(n) for n in sys.argv[1:3]), *sys.argv[3:4])
