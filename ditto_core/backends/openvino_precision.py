"""What OpenVINO computes in: its hints decide, the processor limits. Measured where it is coarser than asked."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ditto_core.session import KernelProperty

HINTS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""OpenVINO's names of the dtypes."""
CAPABILITIES = {"f32": "FP32", "f16": "FP16", "bf16": "BF16"}
ROWS, INNER, COLUMNS = 16, 1024, 64
MEASURED_ABOVE = 8.0
"""Times the ideal: float32 kernels that add in another order are within 2, bfloat16 is 1e4 off."""


def hint(core: Any, dtype: str) -> str:
    """Return what to compute a dtype in: itself where the CPU has it, else float32.

    Asked for float16 on a CPU without it, OpenVINO takes bfloat16.
    """
    own = HINTS[dtype]
    able = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return own if CAPABILITIES[own] in able else HINTS["float32"]


@lru_cache(maxsize=8)
def coarse(dtype: str, config: tuple[tuple[str, str], ...]) -> tuple[KernelProperty, ...]:
    """Measure a product under a configuration; return what it is coarser by than the dtype says, or nothing.

    [16, 1024] x [1024, 64] of normal numbers against float64; ideal is the rounding of the exact product, twice.
    """
    import openvino
    from openvino import opset13 as opset

    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(ROWS, INNER, generator=generator)
    right = torch.randn(INNER, COLUMNS, generator=generator)
    given = opset.parameter([ROWS, INNER], np.float32, name="x")
    model = openvino.Model([opset.matmul(given, opset.constant(right.numpy()), False, False)], [given])
    compiled = openvino.Core().compile_model(model, "CPU", dict(config))
    product = torch.from_numpy(compiled(left.numpy())[0])
    exact = left.double() @ right.double()
    ideal = 2 * distance(exact.to(kind), exact)
    error = distance(product, exact)
    if error <= MEASURED_ABOVE * ideal:
        return ()
    precision = str(compiled.get_property("INFERENCE_PRECISION_HINT").to_string())
    evidence = f"a product has rel_l2 {error:.1e}, ideal in {dtype} {ideal:.1e}"
    return (KernelProperty(f"computation in {precision}", error / ideal, evidence),)


def distance(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Return ``|value - exact| / |exact|`` in the L2 norm."""
    return float((value.double() - exact).norm() / exact.norm())
