"""Measure what the matrix kernels do, since flags do not tell: TF32 inputs, or accumulation in float16.

One matrix product [rows, 1024] x [1024, 256] of normal random numbers is compared with float64, and with float64
rounded to the engine's dtype, which is the least error that any kernel can have.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from ditto_core.backends.tensorrt.binding import Binder
from ditto_core.backends.tensorrt.library import Library, Messages, load_library
from ditto_core.backends.tensorrt.runtime import Loaded
from ditto_core.errors import BuildError, DittoError

ROWS, INNER, COLUMNS = 16, 1024, 256
TF32_ERROR = 5e-5
"""Relative L2 error: TF32 rounds inputs to 11 bits, 3e-4 was measured; exact float32 stays below 1e-5."""
WIDE_RATIO = 2.0
"""A kernel that accumulates in float32 is within 1.1 of rounding alone; float16 accumulation was 4 or more."""
OVERRIDE = "NVIDIA_TF32_OVERRIDE"


@lru_cache(maxsize=16)
def measure_kernels(dtype: str, tf32: bool, device: int) -> Mapping[str, str]:
    """Return facts about the kernels of an engine in ``dtype`` on a GPU: ``matmul``, ``matvec``, ``tf32``.

    A probe that fails is reported as such; it never keeps an engine from opening.
    """
    try:
        errors = measure(dtype, tf32, torch.device("cuda", device))
    except (DittoError, RuntimeError) as error:
        return {"matmul": f"not measured: {str(error).splitlines()[0]}"}
    return describe(dtype, tf32, errors)


def describe(dtype: str, tf32: bool, errors: Mapping[int, tuple[float, float]]) -> dict[str, str]:
    """Put measured errors into words. ``errors`` maps a number of rows to (error, error of rounding alone)."""
    facts = {}
    for name, rows in (("matmul", ROWS), ("matvec", 1)):
        error, rounding = errors[rows]
        facts[name] = f"{verdict(dtype, error, rounding)} (rel_l2 {error:.1e}, rounding alone {rounding:.1e})"
    if dtype == "float32":
        forced = errors[ROWS][0] > TF32_ERROR
        facts["tf32"] = "in force" if forced else "not in force"
        if forced and not tf32:
            facts["tf32"] += f" although the flag is cleared; set {OVERRIDE}=0 before the process starts"
    if os.environ.get(OVERRIDE):
        facts[OVERRIDE] = os.environ[OVERRIDE]
    return facts


def verdict(dtype: str, error: float, rounding: float) -> str:
    """Name the property of a kernel that its error shows."""
    if dtype == "float32":
        return "TF32" if error > TF32_ERROR else "float32"
    return "float32 accumulation" if error <= WIDE_RATIO * rounding else f"{dtype} accumulation"


def measure(dtype: str, tf32: bool, device: torch.device) -> dict[int, tuple[float, float]]:
    """Return (rel_l2 error, rel_l2 of rounding alone) of the product for 16 rows and for one row."""
    library, kind = load_library(), getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(INNER, COLUMNS, generator=generator).to(kind)
    rows = torch.randn(ROWS, INNER, generator=generator).to(kind)
    messages = Messages(library)
    loaded = load_product(library, messages, weights, dtype, tf32)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    found = {}
    for count in (ROWS, 1):
        exact = rows[:count].double() @ weights.double()
        with torch.cuda.stream(stream):
            outputs = Binder(library, loaded, messages, device).bind({"x": rows[:count].to(device)}, 0)
            if not loaded.context.execute_async_v3(stream.cuda_stream):
                raise BuildError(messages.last())
            stream.synchronize()
        found[count] = (relative(outputs["y"].cpu().double(), exact), relative(exact.to(kind).double(), exact))
    return found


def relative(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Return ``|value - exact| / |exact|`` in the L2 norm."""
    return float((value - exact).norm() / exact.norm())


def build_product(library: Library, messages: Messages, weights: torch.Tensor, dtype: str, tf32: bool) -> bytes:
    """Build an engine that multiplies ``x`` [1..16, 1024] by constant weights into ``y``."""
    trt = library.module
    kind = next(t for t in trt.DataType.__members__.values() if library.torch_dtype(t) == dtype)
    builder = trt.Builder(messages.logger)
    typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if typed is None else 1 << int(typed))
    x = network.add_input("x", kind, (-1, INNER))
    constant = network.add_constant(tuple(weights.shape), trt.Weights(kind, weights.data_ptr(), weights.numel()))
    none = trt.MatrixOperation.NONE
    product = network.add_matrix_multiply(x, none, constant.get_output(0), none).get_output(0)
    product.name = "y"
    network.mark_output(product)
    config = builder.create_builder_config()
    (config.set_flag if tf32 else config.clear_flag)(trt.BuilderFlag.TF32)
    profile = builder.create_optimization_profile()
    profile.set_shape("x", (1, INNER), (ROWS, INNER), (ROWS, INNER))
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise BuildError(messages.last())
    return bytes(engine)


def load_product(library: Library, messages: Messages, weights: torch.Tensor, dtype: str, tf32: bool) -> Loaded:
    """Build and load the product's engine. Raises :class:`BuildError` when this GPU does not take it."""
    runtime: Any = library.module.Runtime(messages.logger)
    engine = runtime.deserialize_cuda_engine(build_product(library, messages, weights, dtype, tf32))
    context = engine.create_execution_context() if engine is not None else None
    if context is None:
        raise BuildError(messages.last())
    return Loaded(runtime, engine, context)
