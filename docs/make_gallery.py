"""Make the pictures of docs/gallery.md: reports of real engines, healthy and faulty, and what a gate prints.

Tiny random models on ONNX Runtime; a fault is an edit of the built engine. Needs Chromium and Playwright:
``python docs/make_gallery.py [NAME …]`` from the repository's root makes all pictures, or those named.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from make_pictures import IMAGES, ROOT, report, terminal
from PIL import Image

sys.path.insert(0, str(ROOT))

from ditto_core.cache import Cache
from ditto_core.compare.comparison import Comparison
from ditto_core.localize import EVERYTHING
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.report.against import changes, markdown
from ditto_core.report.write import write_report
from ditto_core.spec import EngineSpec
from tests.faults import FaultyWorkspace, graph, rope, weights
from tests.gate_suites import tiny_suite, write_suite
from tests.models import llama
from tests.zoo import factory

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8]]
DECODER = "tests/test_llama.py::test_engine_matches_eager"


def detector() -> Any:
    """YOLOS with random weights: images of 64 x 96, ten boxes, seven classes."""
    from transformers import YolosConfig, YolosForObjectDetection

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = YolosConfig(num_hidden_layers=3, image_size=[64, 96], num_detection_tokens=10, num_labels=7, **sizes)
    return YolosForObjectDetection(config).eval()


def epsilon(edit: Any) -> None:
    """Every BatchNorm adds 1e-2 in place of 1e-5."""
    for node in edit.graph.node:
        if node.op_type == "BatchNormalization":
            next(a for a in node.attribute if a.name == "epsilon").f = 1e-2


def compared(model: Callable[[], Any], fault: Any, folder: Path, dtype: str = "float32") -> Comparison:
    """Build an engine, put a fault into it, run it beside eager with every site tapped, and localize."""
    spec = EngineSpec.of(model, dtype=dtype, outputs=EVERYTHING)
    pair = Pair(FaultyWorkspace(Cache(folder / "cache"), fault, folder), spec, PairOptions(dump=folder / "dump"))
    try:
        if pair.sessions.model.decoder:
            pair.generate(PROMPTS, max_new_tokens=6, localize=True)
        else:
            pair.run(localize=True)
        return pair.comparisons[-1]
    finally:
        pair.close()


def page(run: Comparison, folder: Path, name: str, title: str, history: Path | None = None, height: int = 1000) -> None:
    """Write the HTML report and take its first screen."""
    html = folder / f"{name}.html"
    write_report("html", {title: run}, html, history)
    html.write_text(html.read_text().replace(f"{folder}/", ""))
    picture = IMAGES / f"gallery-{name}.png"
    report(html, picture, height)
    with Image.open(picture) as shot:
        shot.convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(picture, optimize=True)


def healthy(folder: Path) -> None:
    """A float16 engine that is right."""
    page(compared(llama, graph.none, folder, "float16"), folder, "healthy", DECODER)


def decoder(folder: Path) -> None:
    """A decoder whose rotary frequencies are 1 % too large, and the comment on the pull request that did it."""
    before = compared(llama, graph.none, folder / "before")
    now = compared(llama, rope.frequencies(lambda f: f * 1.01), folder)
    history = folder / "history.jsonl"
    for i, run in enumerate([before, before, before, now]):
        receipt = replace(run.receipt, commit=f"{i}c0ffee{i}", created=run.receipt.created + i)
        write_report("history", {DECODER: replace(run, receipt=receipt)}, history)
    page(now, folder, "decoder", DECODER, history)
    print(markdown({DECODER: changes(before, now)}))


def trained_resnet() -> Any:
    """A ResNet whose BatchNorms have seen data: where all variances are 1, a factor does what an epsilon does."""
    model = factory("resnet")()
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.uniform_(0.1, 2)
    return model


def cnn(folder: Path) -> None:
    """A ResNet whose BatchNorms have another epsilon."""
    page(compared(trained_resnet, epsilon, folder), folder, "cnn", "tests/test_resnet.py::test_engine")


def detection(folder: Path) -> None:
    """A detector in which one layer's keys are made with the weight of the queries."""
    keys = "vit.encoder.layer.1.attention.attention.key"
    fault = weights.exchanged(keys, keys.replace("key", "query"))
    page(compared(detector, fault, folder), folder, "detection", "tests/test_yolos.py::test_engine")


def gate(folder: Path) -> None:
    """An accuracy gate of an int8 engine."""
    llama().save_pretrained(folder / "llama")
    write_suite(folder / "suite.jsonl", tiny_suite(24, 48, 8))
    words = "gate run --model llama --suite suite.jsonl --option quantize=int8 --reference onnxruntime"
    command = [sys.executable, "-m", "ditto_core", *words.split(), "--cache-dir", "cache"]
    environment = {"PYTHONPATH": str(ROOT), "COLUMNS": "150"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if not line.endswith(("…", " samples"))]
    output = "\n".join([*said, *done.stdout.splitlines()]).replace(f"{folder}/", "")
    terminal(f"$ ditto {words}\n{output}", IMAGES / "gallery-gate.svg", "ditto gate")


VIEWS = {view.__name__: view for view in (healthy, decoder, cnn, detection, gate)}


def main() -> None:
    """Make the pictures that are named, or all."""
    IMAGES.mkdir(exist_ok=True)
    for name in sys.argv[1:] or VIEWS:
        with tempfile.TemporaryDirectory() as folder:
            VIEWS[name](Path(folder))


if __name__ == "__main__":
    main()
