"""A float16 network of blocks in which the norm of one block overflows."""

import torch
from torch import nn


class PlainNorm(nn.Module):
    """RMSNorm without the cast to float32 that transformers has."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(size))

    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.weight


class Block(nn.Module):
    def __init__(self, size, scale):
        super().__init__()
        self.up = nn.Linear(size, 2 * size, bias=False)
        self.norm = PlainNorm(2 * size)
        self.down = nn.Linear(2 * size, size, bias=False)
        with torch.no_grad():
            self.up.weight.mul_(scale)

    def forward(self, x):
        return x + self.down(self.norm(self.up(x)))


class Net(nn.Module):
    def __init__(self, hot):
        super().__init__()
        self.blocks = nn.ModuleList(Block(32, 1000.0 if i == hot else 1.0) for i in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def one_hot_norm():
    """Block 2's norm squares values of about 1000: beyond 65504, while everything else is small."""
    torch.manual_seed(0)
    return Net(hot=2).half(), {"x": torch.randn(3, 32).half()}


def no_hot_norm():
    torch.manual_seed(0)
    return Net(hot=-1).half(), {"x": torch.randn(3, 32).half()}
