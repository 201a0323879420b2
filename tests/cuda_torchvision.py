"""torchvision as PyPI has it, compiled for torch with CUDA, imported beside torch for the CPU.

Its Python code runs there, its compiled operators do not, and the import fails until the two are declared that it
registers something for.
"""

import torch

declared = torch.library.Library("torchvision", "FRAGMENT")  # what it declares goes with it
try:
    import torchvision
except RuntimeError:
    for operator in ("nms", "qnms"):
        declared.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

__all__ = ["torchvision"]
