"""What ``assert_close`` takes: nestings of tensors, arrays and numbers, walked side by side down to the leaves."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack

from ditto_core.errors import UsageError, nearest

NARROW = ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")


@dataclass(frozen=True, slots=True)
class Leaf:
    """Two tensors at one path, and the dtypes and strides, in elements, that they had before they became tensors.

    ``valid``: the elements that count, None for all.
    """

    path: str
    actual: torch.Tensor
    expected: torch.Tensor
    dtypes: tuple[str, str]
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    valid: torch.Tensor | None = None


def walk(path: str, actual: Any, expected: Any) -> Iterator[Leaf]:
    """Yield the leaves of two nestings. Raises AssertionError where the structures differ."""
    __tracebackhide__ = True
    actual, expected = unfold(actual), unfold(expected)
    if isinstance(actual, Mapping) and isinstance(expected, Mapping):
        same_keys(path, actual, expected)
        for key in expected:
            yield from walk(f"{path}[{key!r}]", actual[key], expected[key])
    elif is_list(actual) and is_list(expected):
        if len(actual) != len(expected):
            raise AssertionError(f"{path or 'comparison'}: {len(actual)} items, expected {len(expected)}")
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            yield from walk(f"{path}[{i}]", a, b)
    elif any(isinstance(side, Mapping) or is_list(side) for side in (actual, expected)):
        kinds = type(actual).__name__, type(expected).__name__
        raise AssertionError(f"{path or 'comparison'}: {kinds[0]} against {kinds[1]}, expected the same structure")
    elif actual is None or expected is None:
        if actual is not expected:
            kinds = type(actual).__name__, type(expected).__name__
            raise AssertionError(f"{path or 'comparison'}: {kinds[0]} against {kinds[1]}")
    else:
        yield leaf_of(path, actual, expected)


def unfold(value: Any) -> Any:
    """Return a dataclass, or a cache of transformers with its layers' tensors, as plain dicts and lists."""
    if isinstance(value, Mapping | type):
        return value
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if type(value).__module__.startswith("transformers.") and hasattr(value, "layers"):
        return [tensors_of(layer) for layer in value.layers]
    if type(value).__module__.startswith("transformers.") and hasattr(value, "self_attention_cache"):
        return {"self": value.self_attention_cache, "cross": value.cross_attention_cache}
    return value


def tensors_of(layer: Any) -> dict[str, torch.Tensor]:
    """Return what a cache keeps of one layer: ``keys`` and ``values``, or the states of a linear one."""
    return {name: value for name, value in vars(layer).items() if isinstance(value, torch.Tensor)}


def leaf_of(path: str, actual: Any, expected: Any) -> Leaf:
    """Return the two sides of a leaf as tensors. Raises AssertionError where the masks of arrays forbid it."""
    __tracebackhide__ = True
    a, b = as_tensor(actual), as_tensor(expected)
    dtypes, strides = (dtype_of(actual, a), dtype_of(expected, b)), (stride_of(actual, a), stride_of(expected, b))
    return Leaf(path, a, b, dtypes, strides, unmasked(path, actual, expected))


def unmasked(path: str, actual: Any, expected: Any) -> torch.Tensor | None:
    """Return where ``expected`` holds a number that counts, None where neither side is a masked array.

    Raises AssertionError when ``actual`` masks what ``expected`` does not, and when nothing is left.
    """
    __tracebackhide__ = True
    if not any(isinstance(side, np.ma.MaskedArray) for side in (actual, expected)):
        return None
    hidden, left = (
        np.ma.getmaskarray(side) if isinstance(side, np.ma.MaskedArray) else np.zeros((), bool)
        for side in (expected, actual)
    )
    if hidden.shape in ((), left.shape) and (alone := int((left & ~hidden).sum())):
        raise AssertionError(f"{path or 'comparison'}: {alone} of {left.size} elements are masked in actual alone")
    if hidden.all():
        raise AssertionError(f"{path or 'comparison'}: nothing to compare, all {hidden.size} elements are masked")
    return torch.from_numpy(~hidden) if hidden.ndim else None


def dtype_of(value: Any, tensor: torch.Tensor) -> str:
    """Return the name of a side's dtype as it was given: a quantized or complex tensor is viewed as another."""
    own = getattr(value, "dtype", tensor.dtype)
    return str(getattr(own, "name", own)).removeprefix("torch.")


def stride_of(value: Any, tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a side's strides in elements, as it was given: a reversed array is copied."""
    if isinstance(value, np.ndarray):
        return tuple(step // value.itemsize for step in value.strides)
    return value.stride() if isinstance(value, torch.Tensor) and value.layout == torch.strided else tensor.stride()


def is_list(value: Any) -> bool:
    """Tell whether a value is a list or tuple of further values."""
    return isinstance(value, list | tuple)


def same_keys(path: str, actual: Mapping[Any, Any], expected: Mapping[Any, Any]) -> None:
    """Raise AssertionError that names the keys which only one side has."""
    __tracebackhide__ = True
    missing = [key for key in expected if key not in actual]
    extra = [key for key in actual if key not in expected]
    if not missing and not extra:
        return
    said = [
        f"{word} {', '.join(map(repr, keys))}" for word, keys in (("missing", missing), ("unexpected", extra)) if keys
    ]
    hint = nearest(str(missing[0]), map(str, extra)) if missing and extra else ""
    raise AssertionError(f"{path or 'comparison'}: keys differ: {'; '.join(said)}{hint}")


def as_tensor(value: Any) -> torch.Tensor:
    """View a tensor, an array, an object with DLPack or a number as a tensor. Raises :class:`UsageError` for others."""
    if isinstance(value, torch.Tensor):
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            raise UsageError("cannot compare inside torch.vmap or torch.func: return the tensors, compare them outside")
        found = value.detach()
    elif isinstance(value, np.ndarray):
        found = from_array(value)
    elif isinstance(value, bool | int | float | complex | np.generic):
        found = from_array(np.asarray(value))
    elif hasattr(value, "__dlpack__"):
        found = torch.utils.dlpack.from_dlpack(value)
    else:
        raise UsageError(
            f"cannot compare {type(value).__name__}: expected tensors, arrays, numbers, dicts or lists of them"
        )
    if found.is_meta or found.is_nested:
        raise UsageError(
            f"cannot compare a {'meta' if found.is_meta else 'nested'} tensor: expected one with its numbers"
        )
    found = found.dequantize() if found.is_quantized else found
    return found.to_dense() if found.layout != torch.strided else found


def from_array(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """View a numpy array, memory-mapped ones too, as a tensor; one that torch cannot view (reversed, foreign-endian,
    a field of records) is copied. A masked array gives all its numbers.

    The bfloat16 and 8-bit floats that ml_dtypes adds to numpy are viewed as torch's of the same name.
    """
    if array.dtype.name in NARROW:
        bits = np.uint8 if array.itemsize == 1 else np.int16
        return from_array(array.view(bits)).view(getattr(torch, array.dtype.name))
    if array.dtype.kind not in "biufc" or array.dtype in (np.longdouble, np.clongdouble):
        raise UsageError(f"cannot compare an array of {array.dtype}: expected numbers")
    if array.dtype.kind in "iu":  # numpy has two dtypes of 64-bit integers, torch knows one
        array = array.view(f"{array.dtype.byteorder}{array.dtype.kind}{array.itemsize}")
    odd = any(stride < 0 or stride % array.itemsize for stride in array.strides)
    if odd or not array.dtype.isnative or not array.flags.aligned:
        array = array.astype(array.dtype.newbyteorder("="), copy=True)
    with warnings.catch_warnings():
        # Nothing here writes, so a read-only array is safe to view.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
