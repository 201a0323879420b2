"""Measure what the matrix kernels do, because flags do not say: TF32 inputs, or accumulation in float16.

One product of normal random numbers, [rows, inner] x [inner, 256] with the model's own longest inner dimension, is
compared with float64; a product that is accumulated in float32 and rounded to the dtype is the ideal.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from ditto_core.backends.tensorrt.binding import Binder
from ditto_core.backends.tensorrt.library import Library, Messages, load_library
from ditto_core.backends.tensorrt.runtime import Loaded
from ditto_core.errors import BuildError, DittoError, first_line
from ditto_core.session import KernelProperty

ROWS, INNER, COLUMNS = 16, 1024, 256
MOST_INNER = 16384
TF32_ERROR = 5e-5
"""Relative L2 error: TF32 rounds inputs to 11 bits, 3e-4 was measured; exact float32 stays below 1e-5."""
WIDE_RATIO = 2.0
"""A kernel that accumulates in float32 is within 1.1 of the ideal; float16 accumulation was 4 or more."""
OVERRIDE = "NVIDIA_TF32_OVERRIDE"


@dataclass(frozen=True)
class Error:
    """Relative L2 errors of one product against float64: the engine's, and the ideal kernel's."""

    engine: float
    ideal: float

    @property
    def ratio(self) -> float:
        """How many times coarser than ideal the engine is."""
        return self.engine / self.ideal


@dataclass(frozen=True)
class Kernels:
    """What was measured: facts for people, and the property that explains errors, where there is one."""

    facts: Mapping[str, str]
    properties: tuple[KernelProperty, ...] = field(default=())

    def for_rows(self, rows: int) -> tuple[KernelProperty, ...]:
        """Return the properties for a batch: with several rows, decoding multiplies matrices as prefill does."""
        return tuple(replace(each, phase="both") for each in self.properties) if rows > 1 else self.properties


@lru_cache(maxsize=16)
def measure_kernels(dtype: str, tf32: bool, device: int, inner: int = INNER) -> Kernels:
    """Measure the kernels of engines in ``dtype`` on a GPU, once a process.

    A probe that fails is reported as such; it never keeps an engine from opening.
    """
    try:
        several, one = measure(dtype, tf32, torch.device("cuda", device), min(inner or INNER, MOST_INNER))
    except (DittoError, RuntimeError) as error:
        return Kernels({"matmul": f"not measured: {first_line(error)}"})
    return describe(dtype, tf32, several, one)


def describe(dtype: str, tf32: bool, several: Error, one: Error) -> Kernels:
    """Put the errors of a product with several rows and of one with a single row into words."""
    names = [verdict(dtype, error) for error in (several, one)]
    facts = {
        key: f"{name} (rel_l2 {error.engine:.1e}, ideal {error.ideal:.1e})"
        for key, name, error in zip(("matmul", "matvec"), names, (several, one), strict=True)
    }
    if dtype == "float32":
        forced = several.engine > TF32_ERROR
        facts["tf32"] = "in force" if forced else "not in force"
        if forced and not tf32:
            facts["tf32"] += f" although the flag is cleared; set {OVERRIDE}=0 before the process starts"
    if os.environ.get(OVERRIDE):
        facts[OVERRIDE] = os.environ[OVERRIDE]
    return Kernels(facts, coarse(names, several, one))


def coarse(names: list[str], several: Error, one: Error) -> tuple[KernelProperty, ...]:
    """Return the property of kernels that are not ideal."""
    if names[0].startswith("float32"):
        return ()
    evidence = f"a product of {ROWS} rows has rel_l2 {several.engine:.1e}, ideal {several.ideal:.1e}"
    evidence += f"; of one row {one.engine:.1e}, ideal {one.ideal:.1e}"
    return (KernelProperty(names[0], several.ratio, evidence, "both" if names[1] == names[0] else "prefill"),)


def verdict(dtype: str, error: Error) -> str:
    """Name the property of a kernel that its error shows."""
    if dtype == "float32":
        return "TF32" if error.engine > TF32_ERROR else "float32"
    return "float32 accumulation" if error.ratio <= WIDE_RATIO else f"{dtype} accumulation"


def measure(dtype: str, tf32: bool, device: torch.device, inner: int) -> tuple[Error, Error]:
    """Return the errors of a product with 16 rows and with one."""
    library, kind = load_library(), getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(inner, COLUMNS, generator=generator).to(kind)
    rows = torch.randn(ROWS, inner, generator=generator).to(kind)
    messages = Messages(library)
    loaded = load_product(library, messages, weights, dtype, tf32)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def error(x: torch.Tensor) -> Error:
        exact = x.double() @ weights.double()
        # Float32 has no kernel to go by: twice the rounding of the result is what a short product shows.
        rounded = relative(exact.to(kind), exact)
        ideal = 2 * rounded if dtype == "float32" else relative((x.float() @ weights.float()).to(kind), exact)
        with torch.cuda.stream(stream):
            outputs = Binder(library, loaded, messages, device).bind({"x": x.to(device)}, 0)
            if not loaded.context.execute_async_v3(stream.cuda_stream):
                raise BuildError(messages.last())
            stream.synchronize()
        return Error(relative(outputs["y"].cpu(), exact), ideal)

    return error(rows), error(rows[:1])


def relative(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Return ``|value - exact| / |exact|`` in the L2 norm."""
    return float((value.double() - exact).norm() / exact.norm())


def build_product(library: Library, messages: Messages, weights: torch.Tensor, dtype: str, tf32: bool) -> bytes:
    """Build an engine that multiplies ``x`` [1..16, inner] by constant weights into ``y``."""
    trt = library.module
    kind = next(t for t in trt.DataType.__members__.values() if library.torch_dtype(t) == dtype)
    builder = trt.Builder(messages.logger)
    typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if typed is None else 1 << int(typed))
    x = network.add_input("x", kind, (-1, weights.shape[0]))
    constant = network.add_constant(tuple(weights.shape), trt.Weights(kind, weights.data_ptr(), weights.numel()))
    none = trt.MatrixOperation.NONE
    product = network.add_matrix_multiply(x, none, constant.get_output(0), none).get_output(0)
    product.name = "y"
    network.mark_output(product)
    config = builder.create_builder_config()
    (config.set_flag if tf32 else config.clear_flag)(trt.BuilderFlag.TF32)
    profile = builder.create_optimization_profile()
    profile.set_shape("x", *((count, weights.shape[0]) for count in (1, ROWS, ROWS)))
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
