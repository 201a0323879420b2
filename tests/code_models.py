"""Models whose own code computes between and behind their modules: a detector, and a step of diffusion."""

import torch
from torch import nn
from torch.nn import functional as F

MOST = 6
"""Boxes that the detector suppresses among."""


def block(inner: int, outer: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inner, outer, 3, stride, 1), nn.BatchNorm2d(outer), nn.SiLU(inplace=True))


class Neck(nn.Module):
    """Joins two scales."""

    def __init__(self) -> None:
        super().__init__()
        self.join = block(24, 8)

    def forward(self, fine: torch.Tensor, coarse: torch.Tensor) -> torch.Tensor:
        wide = F.interpolate(coarse, scale_factor=2.0, mode="nearest")
        return self.join(torch.cat([fine, wide], 1))


class Yolo(nn.Module):
    """A detector as YOLO is one: two scales, boxes decoded by the cell's place, then non-maximum suppression."""

    stride = 4

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Sequential(block(3, 8, 2), block(8, 8, 2)), block(8, 16, 2)
        self.neck = Neck()
        self.head = nn.Conv2d(8, 4 + 3, 1)

    def decode(self, found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return boxes [row, cell, x y x y] and scores [row, cell, kind] of [row, 7, height, width]."""
        height, width = found.shape[2:]
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        cells = torch.stack([x, y], -1).reshape(1, -1, 2).float()
        flat = found.flatten(2).transpose(1, 2)
        centers = (flat[..., :2].sigmoid() + cells) * self.stride
        sizes = flat[..., 2:4].exp() * self.stride
        return torch.cat([centers - sizes / 2, centers + sizes / 2], -1), flat[..., 4:].sigmoid()

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        fine = self.stem(image)
        boxes, scores = self.decode(self.head(self.neck(fine, self.down(fine))))
        best, kinds = scores.max(-1)
        best, order = best.topk(MOST, 1)
        chosen = boxes.gather(1, order[..., None].expand(-1, -1, 4))
        keep = suppressed(chosen)
        return {"boxes": chosen, "scores": best * keep, "kinds": kinds.gather(1, order), "index": order, "keep": keep}


def suppressed(boxes: torch.Tensor, limit: float = 0.4) -> torch.Tensor:
    """Return which of the boxes [row, box, 4], best first, overlap none that is kept before them."""
    corner = torch.maximum(boxes[:, :, None, :2], boxes[:, None, :, :2])
    end = torch.minimum(boxes[:, :, None, 2:], boxes[:, None, :, 2:])
    common = (end - corner).clamp(min=0).prod(-1)
    area = (boxes[..., 2:] - boxes[..., :2]).prod(-1)
    overlap = common / (area[:, :, None] + area[:, None] - common) > limit
    keep = [torch.ones_like(overlap[:, 0, 0])]
    for i in range(1, MOST):
        keep.append(~(overlap[:, i, :i] & torch.stack(keep, -1)).any(-1))
    return torch.stack(keep, -1)


def lively(net: nn.Module) -> nn.Module:
    """Give norms weights and statistics of their own."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d | nn.GroupNorm):
            module.weight.data.uniform_(0.5, 1.5)
            module.bias.data.normal_(0, 0.3)
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
    return net


def yolo() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return lively(Yolo()), {"image": torch.rand(2, 3, 32, 32)}


class Denoising(nn.Module):
    """A step of DDIM, twenty of its scheduler's steps wide, by the noise that diffusers' UNet finds beside a text."""

    wide = 20

    def __init__(self) -> None:
        from diffusers import DDIMScheduler, UNet2DConditionModel

        super().__init__()
        self.unet = UNet2DConditionModel(
            block_out_channels=(8, 16),
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            cross_attention_dim=16,
            attention_head_dim=4,
        )
        self.register_buffer("signal", DDIMScheduler().alphas_cumprod)

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> dict[str, torch.Tensor]:
        noise = self.unet(sample, timestep, encoder_hidden_states=text).sample
        now, then = (self.signal[t][:, None, None, None] for t in (timestep, timestep - self.wide))
        clean = (sample - (1 - now).sqrt() * noise) / now.sqrt()
        return {"sample": then.sqrt() * clean + (1 - then).sqrt() * noise}


def unet() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    examples = {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([30, 400]), "text": torch.randn(2, 5, 16)}
    return lively(Denoising()), examples
