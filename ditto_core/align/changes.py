"""What may be wrong at one operator, as changes that would make it right: candidates computed from the model.

An attribute takes the values that the model's configuration and modules have, a rotary table is the model's, a weight
is a parameter of the module, an input is what the model reads there. The change under which the operator, run alone,
gives the model's values is the cause.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ditto_core.align.alone import Change, Operator
from ditto_core.align.layout import layouts, product
from ditto_core.align.matching import LOOSE, Matching
from ditto_core.align.nearest import block
from ditto_core.align.values import HIDDEN_SCORE, Array, Value

NUMBERS: Mapping[str, tuple[str, ...]] = {"scale": ("scal", "multiplier"), "softcap": ("softcap",), "epsilon": ("eps",)}
SWITCHES = {
    "rotary_interleaved": "rotary",
    "interleaved": "rotary",
    "do_rotary": "rotary",
    "unidirectional": "mask",
    "is_causal": "mask",
}
WINDOW = "local_window_size"
"""Attributes by what they are: a number that the model has under a name with one of these words; on or off, with the
cause that it is; the attention window."""
ABSENT: Mapping[str, Sequence[str]] = {
    "GroupQueryAttention": ("scale", "softcap", "rotary_interleaved", WINDOW),
    "MultiHeadAttention": ("scale", "unidirectional"),
    "Attention": ("scale", "unidirectional", "softcap", "is_causal"),
    "RotaryEmbedding": ("interleaved",),
}
"""Attributes that an operator takes although the file does not give them."""
TABLES = {"GroupQueryAttention": (7, 8), "RotaryEmbedding": (2, 3)}
"""Places of the tables of cosines and sines [positions, half of a head]."""
BIASES = {"MultiHeadAttention": 5, "GroupQueryAttention": 10, "Attention": 5}
"""Places of what is added to the scores, [batch, heads or 1, queries, keys]."""
NEAR, FORMS = 48, 3
"""So many ancestors of a wrong site may be what an operator should read, each in so many layouts."""
MOST_PACKED = 3
PACKED = " | "


def changes(operator: Operator, site: int) -> Iterator[Change]:
    """Yield what would make an operator right whose output should be ``site``: one change each, then two attributes."""
    single = list(attribute_changes(operator, site))
    yield from single
    yield from table_changes(operator)
    yield from weight_changes(operator, site)
    yield from column_changes(operator, site)
    yield from input_changes(operator, site)
    yield from bias_changes(operator)
    for one, other in itertools.combinations(single, 2):
        if one.kind != other.kind:
            attributes = {**one.attributes, **other.attributes}
            yield Change(f"{one.kind} and {other.kind}", f"{one.text}; {other.text}", attributes)


def attribute_changes(operator: Operator, site: int) -> Iterator[Change]:
    """Yield other values of attributes: those that the model has, or the other of two."""
    given = operator.attributes
    for name in dict.fromkeys((*given, *ABSENT.get(operator.node.op_type, ()))):
        if name in NUMBERS:
            kind, tried = name, list(model_numbers(operator, site, name))
        elif name == WINDOW:
            kind, tried = "window", list(operator.study.origin.windows())
        else:
            kind, tried = SWITCHES.get(name, ""), [0, 1] if name in SWITCHES else []
        now = given.get(name, -1 if name == WINDOW else 0)
        for value in dict.fromkeys(tried):
            if not math.isclose(value, now, rel_tol=1e-6):
                yield Change(kind, f"{name} is {now:.6g}, with {value:.6g} it is right", {name: value})


def model_numbers(operator: Operator, site: int, name: str) -> Iterator[float]:
    """Yield the numbers of the right side that have a name like an attribute's, then what it usually is."""
    known = operator.study.origin.numbers(operator.study.matching.sites[site])
    yield from (value for key, value in known if any(word in key for word in NUMBERS[name]))
    yield from {"scale": (1.0,), "softcap": (0.0,)}.get(name, ())


def table_changes(operator: Operator) -> Iterator[Change]:
    """Yield the tables of the model's rotary embeddings in the place of the file's."""
    places = TABLES.get(operator.node.op_type, ())
    given = [table for place in places if (table := operator.weight(place)) is not None]
    if not places or len(given) < len(places):
        return
    rows, half = given[0].shape
    for name, tables in operator.study.origin.rotaries(rows):
        inputs = {place: repeated(operator, table[:, :half]) for place, table in zip(places, tables, strict=True)}
        text = f"its tables of cosines and sines are not those of {name}, with these it is right"
        yield Change("rotary", text, {}, inputs)


def weight_changes(operator: Operator, site: int) -> Iterator[Change]:
    """Yield the parameters near a site in the place of a weight of the same size, also several of them packed."""
    origin, target = operator.study.origin, operator.study.matching.sites[site]
    for place, name in enumerate(operator.node.input):
        array = operator.weight(place)
        if array is None or array.size < 2:
            continue
        found = [
            (relative(array, turned), right, turned)
            for right, known in fitting(origin.weights(target, array.size), array)
            for turned in oriented(known, array)
        ]
        for off, right, turned in sorted(found, key=lambda each: (PACKED in each[1], each[0])):
            if off:
                other = origin.named(array)
                state = (
                    f"{off:.1e} off from {right}" if not other else other + (" transposed" if other == right else "")
                )
                text = f"its weight {name} is {state}, with {right} it is right"
                yield Change("weight", text, {}, {place: repeated(operator, turned)})


def fitting(known: Mapping[str, Array], like: Array) -> Iterator[tuple[str, Array]]:
    """Yield the parameters with as many numbers as ``like``, then several packed that have as many together."""
    yield from ((name, array) for name, array in known.items() if array.size == like.size)
    for kind in ("weight", "bias"):
        parts = {name: array for name, array in known.items() if name.endswith(kind) and array.size < like.size}
        for count in range(2, MOST_PACKED + 1):
            for names in itertools.permutations(parts, count):
                arrays = [parts[name] for name in names]
                if sum(a.size for a in arrays) == like.size and len({a.shape[1:] for a in arrays}) == 1:
                    yield PACKED.join(names), np.concatenate(arrays)


def oriented(parameter: Array, like: Array) -> Iterator[Array]:
    """Yield a parameter in the shape of a weight: as it is, transposed."""
    for turned in (parameter, parameter.T):
        if turned.shape == like.shape:
            yield np.ascontiguousarray(turned).astype(like.dtype)
    if parameter.ndim != like.ndim:
        yield parameter.reshape(like.shape).astype(like.dtype)


def relative(actual: Array, expected: Array) -> float:
    """Return the relative L2 distance of two arrays of one shape; numbers beyond any activation do not count."""
    seen = np.abs(expected) < HIDDEN_SCORE
    distance = np.linalg.norm(actual[seen].astype(np.float64) - expected[seen])
    return float(distance / (np.linalg.norm(expected[seen].astype(np.float64)) + 1e-30))


def column_changes(operator: Operator, site: int) -> Iterator[Change]:
    """Yield packed inputs with two blocks of columns exchanged, or with one replaced by what the model reads."""
    matching = operator.study.matching
    for place, value in operator.reads.items():
        blocks = blocks_of(matching, value)
        for one, other in itertools.combinations(blocks, 2):
            if one[1] - one[0] == other[1] - other[0]:
                arrays = [with_exchanged(array, one, other) for array in value.arrays]
                text = f"columns {one[0]}:{one[1]} and {other[0]}:{other[1]} of {value.name} are exchanged"
                yield at_its_maker(operator, place, value, text, arrays)
        for (start, stop), kind in itertools.product(blocks if len(blocks) > 1 else (), ancestors(matching, site)):
            part = block(value, 0, start, stop)
            if product(part.dims) == product(matching.sites[kind].dims):
                for columns in in_shape_of(matching, kind, part):
                    arrays = [with_columns(*each, start) for each in zip(value.arrays, columns, strict=True)]
                    text = f"columns {start}:{stop} of {value.name} are not {matching.title(kind)}"
                    yield at_its_maker(operator, place, value, text, arrays)


def at_its_maker(operator: Operator, place: int, value: Value, text: str, arrays: list[Array]) -> Change:
    """Return the change of an input that blames the operator that computes it."""
    return Change("wiring", text, {}, {place: arrays}, (operator.label,), value.where, {value.name: arrays})


def blocks_of(matching: Matching, value: Value) -> list[tuple[int, int]]:
    """Return the blocks of columns of a packed value, as its sites cut it."""
    ends = {0, value.dims[-1][0]} if value.dims else set()
    for site in matched(matching, value):
        ends |= set(matching.values[matching.matches[site].value].columns or ())
    return list(itertools.pairwise(sorted(ends)))


def with_columns(array: Array, columns: Array, start: int) -> Array:
    """Return an array with other columns from ``start`` on."""
    made: Array = array.copy()
    made[..., start : start + columns.shape[-1]] = columns
    return made


def with_exchanged(array: Array, one: tuple[int, int], other: tuple[int, int]) -> Array:
    """Exchange two blocks of columns."""
    made: Array = array.copy()
    made[..., slice(*one)], made[..., slice(*other)] = array[..., slice(*other)], array[..., slice(*one)]
    return made


def input_changes(operator: Operator, site: int) -> Iterator[Change]:
    """Yield what the model reads in the place of each input, and each two inputs of one shape exchanged."""
    matching = operator.study.matching
    for (one, a), (other, b) in itertools.combinations(operator.reads.items(), 2):
        if a.dims == b.dims and a is not b:
            text = f"inputs {one} ({a.name}) and {other} ({b.name}) are exchanged"
            yield Change("wiring", text, {}, {one: b.arrays, other: a.arrays}, (a.where, b.where))
    for place, value in operator.reads.items():
        for kind in ancestors(matching, site):
            if product(matching.sites[kind].dims) == product(value.dims):
                for arrays in in_shape_of(matching, kind, value):
                    yield replaced(operator, place, value, kind, arrays)


def replaced(operator: Operator, place: int, value: Value, kind: int, arrays: list[Array]) -> Change:
    """Return the change of an input to a site. A value near to it is itself wrong, another one is in a wrong place."""
    matching = operator.study.matching
    title = matching.title(kind)
    off = max(relative(ours, theirs) for ours, theirs in zip(value.arrays, arrays, strict=True))
    if off <= matching.tolerance and any((np.abs(array) >= HIDDEN_SCORE).any() for array in arrays):
        return Change("mask", f"its input {value.name} lacks the mask of {title}", {}, {place: arrays})
    if off < LOOSE and not matched(matching, value):
        return at_its_maker(operator, place, value, f"{value.name} is {off:.1e} off from {title}", arrays)
    found = matching.matches.get(kind)
    holder = matching.values[found.value] if found is not None and matching.right(found) else None
    where = f", which the file has in {holder.name}" if holder is not None else ""
    text = f"input {place} is {value.name}, the model reads {title}{where}"
    involved = (value.where, *([holder.where] if holder is not None else []))
    return Change("wiring", text, {}, {place: arrays}, involved)


def bias_changes(operator: Operator) -> Iterator[Change]:
    """Yield the model's masks in the place of what is added to the scores, where the file adds nothing or its own."""
    place = BIASES.get(operator.node.op_type, -1)
    node = operator.node
    if place < 0 or (place < len(node.input) and node.input[place] in operator.values):
        return
    matching = operator.study.matching
    for kind in sorted(set(matching.site_class.values())):
        found = matching.sites[kind]
        if (
            len(found.dims) == 4
            and set(found.dims[1]) == {1}
            and any((array < -HIDDEN_SCORE).any() for array in found.arrays)
        ):
            arrays = [np.maximum(array, np.finfo(np.float32).min) for array in found.arrays]
            yield Change("mask", f"its mask is not {matching.title(kind)}, with that it is right", {}, {place: arrays})


def ancestors(matching: Matching, site: int) -> list[int]:
    """Return the classes of the sites that a site is computed from, the nearest first."""
    waiting, seen, found = list(matching.sites[site].parents), set(), list[int]()
    while waiting and len(found) < NEAR:
        index = waiting.pop(0)
        if index not in seen:
            seen.add(index)
            waiting += matching.sites[index].parents
            if index in matching.site_class:
                found.append(matching.site_class[index])
    return list(dict.fromkeys(found))


def in_shape_of(matching: Matching, kind: int, value: Value) -> Iterator[list[Array]]:
    """Yield the numbers of a class of sites in a value's shape: of a member of that shape, else in every layout."""
    alike = (i for i, other in matching.site_class.items() if other == kind and matching.sites[i].dims == value.dims)
    first = next(alike, None)
    if first is not None:
        yield list(matching.sites[first].arrays)
        return
    site = matching.sites[kind]
    for layout in layouts(site.dims, value.dims, value.batches)[:FORMS]:
        pairs = zip(site.arrays, value.batches, strict=True)
        yield [np.ascontiguousarray(layout.apply(array, batch)) for array, batch in pairs]


def matched(matching: Matching, value: Value) -> list[int]:
    """Return the classes of the sites that a value, or columns of it, was found to be."""
    index = next(i for i, each in enumerate(matching.values) if each is value)
    return matching.sites_of.get(matching.value_class.get(index, index), [])


def repeated(operator: Operator, array: Array) -> list[Array]:
    """Return the same array for every probe."""
    return [array] * len(operator.study.feeds)
