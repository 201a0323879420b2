"""Fields of a model's configuration as causes: the model with another value gives every site of the engine."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from ditto_core.causes.confidence import confidence
from ditto_core.causes.evidence import left, rel_l2
from ditto_core.compare.blame import Cause
from ditto_core.localize.local import Localizer, Valid, rel_error
from ditto_core.localize.replay import Replay

if TYPE_CHECKING:
    from torch import nn

    from ditto_core.causes.kinds import Kind
    from ditto_core.compare.blame import LocalResult
    from ditto_core.sites import Tap

ROOM = 1.5
"""A site may differ by so many bounds: the bound is of the right model's rounding, not of this one's."""

SAME = 1e-12
"""rel-L2 up to which a site is what it was."""

LEFT_OUT = (
    "vocab_size", "hidden_size", "num_hidden_layers", "dtype", "architectures", "model_type", "transformers_version",
    "use_cache", "output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id", "is_decoder",
    "is_encoder_decoder", "problem_type", "max_position_embeddings", "token_id", "dropout", "attn_implementation",
    "initializer_range", "chunk_size",
)  # fmt: skip
"""Parts of names of fields that do not change what is computed, or change the shape of weights."""

FIELDS: tuple[tuple[str, Kind], ...] = (
    ("*rope*theta*", "RoPE base"),
    ("*rope_type*", "RoPE scaling ignored"),
    ("*rope*'factor'? is 1.0 in*", "RoPE scaling ignored"),
    ("*rope*factor*", "RoPE scaling factor"),
    ("*sliding_window is None*", "sliding window ignored"),
    ("*sliding_window*", "sliding window size"),
    ("*attn_logit_softcapping is None*", "softcap missing"),
    ("*attn_logit_softcapping*", "softcap differs"),
    ("*query_pre_attn_scalar*", "attention scale"),
    ("*eps*", "norm epsilon"),
    ("*act*", "activation kind"),
)
"""What a field of the configuration decides, by globs on the sentence that says its values."""

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "silu", "relu", "quick_gelu", "relu2")
COUNTS = ("sliding_window", "num_experts_per_tok", "query_pre_attn_scalar")


def setting(
    localizer: Localizer, results: Mapping[tuple[int, str], LocalResult], code: str, seconds: float
) -> Cause | None:
    """Return the field whose other value explains every site of the kept steps; None if none does, or time is up.

    Fields that are named in ``code``, the lines that compute the first wrong site, are tried first.
    """
    own = configured(localizer.truth.module)
    if own is None:
        return None
    end = time.thread_time() + seconds
    fields = sorted(choices(own.config), key=lambda c: c[0] not in code)
    if right_elsewhere(results) and uniform(own.config):
        fields = [field for field in fields if isinstance(field[1], list)]
    idle: set[tuple[str, ...]] = set()
    for tried, (name, value, other) in enumerate(fields):
        if time.thread_time() > end:
            return None
        if (part := part_of(name, value, other)) in idle:
            continue
        with suppress(Exception):  # many values fit no model
            whole = rebuilt(localizer.truth.module, own, name, other)
            try:
                if whole is not None and explains(localizer, whole, results):
                    return named(results, difference(name, value, other), tried)
            except Unmoved:
                idle |= {part} if isinstance(value, (float, str, dict)) else set()
    return None


def part_of(name: str, value: Any, other: Any) -> tuple[str, ...]:
    """Return the field that another value changes: of a table the name of the entry, too."""
    if not (isinstance(value, dict) and isinstance(other, dict)):
        return (name,)
    return (name, *(key for key in value if value[key] != other.get(key)))


def right_elsewhere(results: Mapping[tuple[int, str], LocalResult]) -> bool:
    """Tell whether a wrong site is right in another layer: a field that holds for all layers is not the cause."""
    kinds: dict[bool, set[tuple[int, str]]] = {True: set(), False: set()}
    for (step, site), result in results.items():
        kinds[result.flagged].add((step, re.sub(r"\d+", "*", site)))
    return bool(kinds[True] & kinds[False])


def uniform(config: Any) -> bool:
    """Tell whether all layers are alike: no list of the configuration says one thing of one and another of others."""
    lists = (value for value in config.to_dict().values() if isinstance(value, list))
    return all(len({str(item) for item in value}) < 2 for value in lists)


def configured(root: nn.Module) -> Any:
    """Return the model of transformers in a module, None where there is none."""
    from transformers import PreTrainedModel

    return next((m for m in root.modules() if isinstance(m, PreTrainedModel)), None)


def choices(config: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield field, value and another value: the class's default, and neighbours by type."""
    default = {}
    with suppress(Exception):  # some configurations need arguments
        default = type(config)().to_dict()
    for name, value in config.to_dict().items():
        if name.startswith("_") or any(part in name for part in LEFT_OUT):
            continue
        seen: list[Any] = [value]
        for other in (*neighbours(name, value), *([default[name]] if name in default else [])):
            if other not in seen:
                seen.append(other)
                yield name, value, other


def neighbours(name: str, value: Any) -> list[Any]:
    """Return other values of a field, by type. Only a base of rotary frequencies gets a large one: memory may grow."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float):
        return [1.0, None, value * 2, value / 2, *((1e-5, 1e-6, 1e-12, 1e-3) if "eps" in name else ())]
    if isinstance(value, int):
        return [None, 1, value * 2] if name in COUNTS else []
    if isinstance(value, str):
        return list(ACTIVATIONS) if "act" in name else []
    if isinstance(value, list) and value:
        return of_list(value)
    return of_table(value) if isinstance(value, dict) else []


def of_list(value: list[Any]) -> list[Any]:
    """Return a list in reverse, and with one of its items, or 1 or 0, throughout."""
    if isinstance(value[0], int):
        return [[1] * len(value), [0] * len(value), value[::-1]]
    words = sorted({word for word in value if isinstance(word, str)})
    return [value[::-1], *([word] * len(value) for word in words)]


def of_table(value: Mapping[str, Any]) -> list[Any]:
    """Return a table with one of its numbers changed, or one of its tables exchanged for another of them."""
    others: list[Any] = []
    for name, item in value.items():
        if isinstance(item, float):
            large = (10000.0, 1e6) if "theta" in name else ()
            others += [{**value, name: other} for other in (1.0, item / 2, *large, *([item * 2] if large else []))]
        elif isinstance(item, dict):
            others += [{**value, name: other} for other in value.values() if other != item]
    return others


def rebuilt(root: nn.Module, own: Any, name: str, value: Any) -> nn.Module | None:
    """Return the module with the model inside built anew on the same weights; None where they do not fit."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # transformers 4
        from transformers.modeling_utils import no_init_weights

    config = copy.deepcopy(own.config)
    setattr(config, name, value)
    with torch.inference_mode(mode=False), torch.random.fork_rng(devices=[]), no_init_weights():
        other = type(own)(config).eval().requires_grad_(False)
        weights, new = own.state_dict(), other.state_dict()
        # a field that adds weights (a bias of zeros) says nothing of these
        if set(new) != set(weights) or any(new[name].shape != tensor.shape for name, tensor in weights.items()):
            return None
        other.load_state_dict(weights, assign=True)
        other.tie_weights()
    made: nn.Module = copy.deepcopy(root, {id(own): other})
    return made


class OtherError(Exception):
    """A site differs: the field is not the cause."""


class Unmoved(OtherError):
    """A wrong site is what it was: the field has no say there, whatever its value."""


def explains(localizer: Localizer, module: nn.Module, results: Mapping[tuple[int, str], LocalResult]) -> bool:
    """Tell whether another module gives every site of the kept steps from the engine's tensors upstream.

    The sites that are wrong are looked at first: most modules end there.
    """
    wrong = {key: result for key, result in results.items() if result.flagged}
    return agrees(localizer, module, wrong) and agrees(localizer, module, results)


def agrees(localizer: Localizer, module: nn.Module, results: Mapping[tuple[int, str], LocalResult]) -> bool:
    """Tell whether another module gives the sites that ``results`` are of, up to the last kept step with one."""
    dtype = localizer.truth.dtype
    replay = Replay(replace(localizer.model, module=module), localizer.taps, engine_dtype=dtype, dtype=dtype)
    replay.start()
    before = {(capture.step, site): own for capture in localizer.captures for site, own in capture.expected.items()}
    for kept in localizer.kept:
        valid, seen = Valid(kept.inputs), set()

        def check(tap: Tap, tensor: torch.Tensor) -> None:
            result = results.get((kept.step, tap.site))  # noqa: B023 - called within this turn of the loop
            seen.add(tap.site)  # noqa: B023
            if result is None:
                return
            found = rel_error(kept.actual[tap.site], tensor, tap, valid)  # noqa: B023
            if not found <= limit(result, localizer.factor):
                own = before.get((kept.step, tap.site))  # noqa: B023
                raise (OtherError if own is None or moved(tensor, own) else Unmoved)(tap.site)

        try:
            replay.step(kept.inputs, kept.actual, check)
        except Unmoved:
            raise
        except OtherError:
            return False
        if not {site for step, site in results if step == kept.step} <= seen:
            return False
    return True


def moved(tensor: torch.Tensor, own: torch.Tensor) -> bool:
    """Tell whether two tensors differ by more than how their sums were split among threads."""
    return not torch.equal(tensor, own) and not rel_l2(tensor.double(), own.double()) <= SAME


def limit(result: LocalResult, factor: float) -> float:
    """Return the local error that another module may leave at a site: a wrong one has to become right, not pass."""
    now, floor = result.metrics.rel_l2, result.bound / factor
    if not result.flagged:
        return ROOM * result.bound
    return left(now, result.bound, floor)


def difference(name: str, value: Any, other: Any) -> str:
    """Say which field has which other value."""
    if isinstance(value, dict) and isinstance(other, dict):
        inner = next(key for key in value if value[key] != other.get(key))
        return f"config.{name}[{inner!r}] is {other[inner]!r} in place of {value[inner]!r}"
    return f"config.{name} is {other!r} in place of {value!r}"


def kind_of_field(text: str) -> Kind:
    """Return the kind of another value of a field of the configuration."""
    return next((kind for pattern, kind in FIELDS if fnmatchcase(text, pattern)), "setting differs")


def named(results: Mapping[tuple[int, str], LocalResult], text: str, tried: int) -> Cause:
    """Make the cause, at the first wrong site."""
    flagged = [result for result in results.values() if result.flagged]
    first = min(flagged, key=lambda r: (r.step, r.order))
    lines = (text, f"the model with that gives every site of the engine; {tried} other values tried")
    step = "build the engine with this field of the configuration as the model has it"
    rule = "mutants.settings"
    return Cause(kind_of_field(text), first.site, confidence(rule), lines, step, rule=rule)
