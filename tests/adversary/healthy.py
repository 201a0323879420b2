"""Healthy engines of many kinds, drawn by a seed, and the inputs that they are run on: each run must pass."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ditto_core.compare.comparison import Comparison
from ditto_core.engines.workspace import Workspace
from ditto_core.model.states import has_fixed_states
from ditto_core.model.tiny import FAMILIES, tiny_decoder
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec
from tests import zoo

LONGEST = 48
ZOO = (
    *(
        "qwen2",
        "gemma",
        "gemma2",
        "phi",
        "phi3",
        "gpt_neo",
        "gpt_neox",
        "gptj",
        "gpt_bigcode",
        "opt",
        "bloom",
        "falcon",
    ),
    *("mpt", "starcoder2", "stablelm", "olmo2", "cohere", "granite", "smollm3", "mixtral", "mamba2"),
    *("bert", "roberta", "distilbert", "t5", "bart", "whisper", "vit", "convnext", "resnet", "wav2vec2"),
)
"""Families of ``tests/zoo.py``, beside those of ``FAMILIES``."""
DTYPES = ("float32", "float16")
SITES = ("model.layers.*", "model.layers.*.self_attn", "model.layers.*.mlp")
SITES_OF_GPT2 = ("transformer.h.*", "transformer.h.*.attn", "transformer.h.*.mlp")


class Classes(nn.Module):
    """A class map [batch, y, x] beside the scores that it is taken from, which are whole numbers and so often tie."""

    def __init__(self, classes: int, rounded: bool) -> None:
        super().__init__()
        torch.manual_seed(classes)
        self.conv = nn.Conv2d(3, classes, 3, padding=1)
        self.rounded = rounded

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.conv(image)
        scores = scores.round() if self.rounded else scores
        return {"scores": scores, "classes": scores.argmax(1)}


@dataclass(frozen=True)
class Module:
    """A model that is not a decoder: how it is made, and how its inputs are drawn, so many rows of them."""

    make: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator, int], Mapping[str, torch.Tensor]]

    def __call__(self) -> Any:
        return self.make().eval(), dict(self.inputs(torch.Generator().manual_seed(0), 2))


def image(generator: torch.Generator, rows: int) -> Mapping[str, torch.Tensor]:
    return {"image": torch.randn(rows, 3, 12, 12, generator=generator)}


def features(generator: torch.Generator, rows: int) -> Mapping[str, torch.Tensor]:
    return {"input": torch.randn(rows, 24, generator=generator)}


def stacked(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return what makes the layers with the same weights each time."""

    def make() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(*(layer() for layer in layers))

    return make


MODULES: Mapping[str, Module] = {
    "class map": Module(lambda: Classes(5, rounded=False), image),
    "class map with ties": Module(lambda: Classes(5, rounded=True), image),
    "one class": Module(stacked(lambda: nn.Linear(24, 16), nn.Tanh, lambda: nn.Linear(16, 1)), features),
    "one class of softmax": Module(stacked(lambda: nn.Linear(24, 1), lambda: nn.Softmax(-1)), features),
    "zeros of a ReLU": Module(stacked(lambda: nn.Linear(24, 64), nn.ReLU, lambda: nn.Linear(64, 8), nn.ReLU), features),
    "norms": Module(stacked(lambda: nn.Linear(24, 32), lambda: nn.LayerNorm(32), nn.GELU), features),
}


@dataclass(frozen=True)
class Healthy:
    """An engine: a decoder of a family, a family of the zoo, or one of ``MODULES``."""

    name: str
    dtype: str
    config: Mapping[str, Any]
    seed: int
    backend: str = "onnxruntime"

    def factory(self) -> Any:
        """Make the model."""
        if self.name in ZOO:
            return zoo.FAMILIES[self.name]()
        return MODULES[self.name]() if self.name in MODULES else tiny_decoder(self.name, **self.config)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {self.backend} {dict(self.config)} seed {self.seed}"

    def open(self, workspace: Workspace) -> Pair:
        """Build the engine; its untapped twin is judged with it."""
        sites = SITES_OF_GPT2 if self.name == "gpt2" else SITES if self.name in FAMILIES else ("**",)
        spec = EngineSpec.of(self.factory, dtype=self.dtype, backend=self.backend, outputs=list(sites))
        return Pair(workspace, spec, PairOptions(localize_failed=0))

    def runs(self, pair: Pair, count: int) -> Iterator[tuple[str, Comparison]]:
        """Run so many times, each time on other inputs; yield what was run and what was found."""
        draw = random.Random(self.seed)
        for number in range(count):
            if pair.engine.decoder:
                yield self._generate(pair, draw)
                continue
            generator = torch.Generator().manual_seed(draw.randrange(2**31))
            if self.name in MODULES:
                inputs = MODULES[self.name].inputs(generator, 2)
            else:
                inputs = {name: fresh(name, t, generator) for name, t in pair.sessions.model.examples.items()}
            yield f"inputs {number}", pair.run(inputs)

    def _generate(self, pair: Pair, draw: random.Random) -> tuple[str, Comparison]:
        """Run one batch of prompts; where states cannot be padded they are of one length."""
        lengths = [
            draw.choice([1, draw.randrange(2, 16), draw.randrange(16, LONGEST)])
            for _ in range(draw.choice([1, 1, 1, 2, 3]))
        ]
        if has_fixed_states(pair.sessions.model.module):
            lengths = [lengths[0]] * len(lengths)
        vocabulary = zoo.VOCABULARY if self.name in ZOO else 256
        prompts = [[draw.randrange(vocabulary) for _ in range(length)] for length in lengths]
        steps = draw.choice([1, 2, 4])
        return f"prompts of {lengths} tokens, {steps} steps", pair.generate(prompts, max_new_tokens=steps)


def fresh(name: str, example: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return other numbers of an input's shape: token ids, pixels, samples of a waveform; masks stay."""
    if example.is_floating_point():
        return torch.randn(example.shape, generator=generator).to(example.dtype)
    if name.endswith("input_ids"):
        return torch.randint(3, zoo.VOCABULARY, example.shape, generator=generator).to(example.dtype)
    return example


def engines(
    count: int, seed: int, *, dtypes: tuple[str, ...] = DTYPES, backend: str = "onnxruntime"
) -> Iterator[Healthy]:
    """Draw engines; families and modules take turns, and so do the dtypes."""
    draw = random.Random(seed)
    names = [*sorted(FAMILIES), *ZOO, *MODULES]
    for number in range(count):
        name = names[number % len(names)]
        config: dict[str, Any] = {}
        if name in FAMILIES:
            config = {"seed": draw.randrange(1000), "layers": draw.choice([1, 2])}
        dtype = dtypes[(number + number // len(names)) % len(dtypes)]
        yield Healthy(name, dtype, config, draw.randrange(2**31), backend)
