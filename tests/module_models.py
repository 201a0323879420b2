"""Small modules that are no decoders, each with one property that an export or a comparison has to get right."""

from typing import Any, NamedTuple

import torch
from torch import nn

from ditto_core import tap


class Block(nn.Module):
    """A residual block as torchvision writes it: one ReLU that is called twice and writes in place, ``out +=``."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


class ResidualNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.layer1 = nn.Sequential(Block(8), Block(8))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.flatten(self.pool(self.layer1(self.stem(image))), 1))


def residual_net() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    net = ResidualNet()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data.uniform_(0.5, 1.5)
            module.bias.data.normal_(0, 0.3)
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
    return net, {"image": torch.randn(2, 3, 24, 24)}


class Writes(nn.Module):
    """Writes into the output of a module, through views and masks, and into its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> dict[str, torch.Tensor]:
        x += 1
        y = self.first(x)
        y[:, 0] = 0.5
        y[:, 1:3] += x[:, :2]
        y.masked_fill_(y < -1, -1.0)
        z = self.second(y)
        z.clamp_(min=-0.2)
        return {"y": y, "z": z, "n": n + 1}


def writes() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Writes(), {"x": torch.randn(3, 6), "n": torch.tensor([1, 2, 3])}


class Positions(nn.Module):
    """``positions`` computes from nothing that is an input: an exporter folds it to a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(7, 4)
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + self.positions(torch.arange(7)))


def positions() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Positions(), {"x": torch.randn(2, 7, 4)}


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Shared(nn.Module):
    """Names that meet: an output called like an input, one called like a module, an input that is an output, one tensor
    under two names, nothing, a single number, an empty tensor; a module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(4, 4)
        self.features = nn.Linear(4, 4)

    def forward(self, sample: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        hidden = self.step(self.step(sample))
        features = self.features(hidden)
        return {
            "sample": hidden * 2,
            "features": features + 1,
            "last": hidden,
            "all": [sample, {"hidden": hidden}],
            "pair": Pair(hidden[:, :2], hidden[:, 2:]),
            "mask": mask,
            "mean": hidden.mean(),
            "none": None,
            "empty": hidden[:, :0],
        }


def shared() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Shared(), {"sample": torch.randn(3, 4), "mask": torch.tensor([1, 0, 1])}


class Sequences(nn.Module):
    """Recurrent in both directions: any batch, any time."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards, self.backwards = (nn.LSTM(6, 8, batch_first=True) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        there, _ = self.forwards(x)
        back, _ = self.backwards(x.flip(1))
        return self.head(torch.cat([there, back.flip(1)], -1))


def sequences() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Sequences(), {"x": torch.randn(2, 7, 6)}


class Gated(nn.Module):
    """Recurrent, by gates of one direction."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.GRU(16, 32, 2, batch_first=True), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x)[0])


def gated() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Gated(), {"x": torch.randn(2, 20, 16)}


def one_row() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh()), {"input": torch.randn(1, 4)}


class CountsRows(nn.Module):
    """Reads its batch into a Python number, which an export keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).reshape(int(x.shape[0]), -1)


def counts_rows(rows: int = 2) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return CountsRows(), {"x": torch.randn(rows, 4)}


def counts_one_row() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return counts_rows(1)


def square_image() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Fully convolutional, with an example that is square."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.AvgPool2d(2), nn.Conv2d(4, 2, 1)]
    return nn.Sequential(*layers), {"input": torch.rand(1, 3, 16, 16)}


def one_line() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Takes images of any size, but its example is one line high."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 2, 1), nn.Sigmoid()), {"input": torch.rand(2, 3, 1, 8)}


class EncoderDecoder(nn.Module):
    """Encodes ids to their mean and decodes others; ``faulty``: an exported graph computes the last two wrongly."""

    def __init__(self, *, faulty: bool) -> None:
        super().__init__()
        self.embed, self.head, self._faulty = nn.Embedding(50, 8), nn.Linear(8, 50), faulty

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, decoder_input_ids: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        context = (self.embed(input_ids) * attention_mask[..., None].float()).sum(1, keepdim=True)
        logits = self.head(self.embed(decoder_input_ids) + context)
        if self._faulty and torch.compiler.is_exporting():
            logits = torch.cat([logits[:, :-2], logits[:, -2:] * 3], 1)
        return {"logits": logits + 0.5}


def encoder_decoder(*, faulty: bool = False) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    ids, mask = torch.arange(14).reshape(2, 7), torch.ones(2, 7, dtype=torch.int64)
    mask[:, 5:] = 0
    return EncoderDecoder(faulty=faulty), {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids + 20}


def faulty_encoder_decoder() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return encoder_decoder(faulty=True)


class Detector(nn.Module):
    """Two outputs behind its modules. ``faulty``: an exported graph turns the boxes' coordinates around."""

    def __init__(self, *, faulty: bool) -> None:
        super().__init__()
        self.stem, self.box, self.kind = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 3)
        self._faulty = faulty

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.relu(self.stem(x))
        boxes = self.box(hidden).sigmoid()
        if self._faulty and torch.compiler.is_exporting():
            boxes = boxes.flip(-1)
        return {"boxes": boxes, "scores": self.kind(hidden).softmax(-1)}


def detector(*, faulty: bool = False) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Detector(faulty=faulty), {"x": torch.randn(6, 8)}


def faulty_detector() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return detector(faulty=True)


class Between(nn.Module):
    """An exported graph mixes up rows between two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden = hidden.roll(1, 0) if torch.compiler.is_exporting() else hidden
        return self.second(hidden)


def between() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Between(), {"x": torch.randn(20, 6)}


class Scaled(nn.Linear):
    """A linear layer of which an exported graph is one percent too large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.01 if torch.compiler.is_exporting() else 1.0)


def faulty_linear() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), Scaled(6, 3)), {"input": torch.randn(20, 6)}


class Complains(nn.Module):
    """Cannot be exported: its control flow depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.fc(x)
        if hidden.sum() > 0:
            hidden = hidden * 2
        return hidden


def complains() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Complains(), {"x": torch.randn(3, 4)}


class Counting(nn.Module):
    """Counts its calls and averages what it saw, in two buffers that the next call reads; one is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls: torch.Tensor
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) + self.mean
        self.mean = 0.9 * self.mean + 0.1 * out.mean(0)
        self.calls += 1
        return out * self.calls


class Average(nn.Module):
    """Returns its buffer, which it writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mean.mul_(0.9).add_(0.1 * x.mean(0))


class Averaging(nn.Module):
    """A buffer is the tensor of a site, and one of the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.average = nn.Linear(4, 4), Average()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layer(x)
        return {"centred": out - self.average(out), "last": self.average.mean}


def averaging() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Averaging(), {"x": torch.randn(3, 4)}


class Notes:
    """What is no container."""

    def __init__(self) -> None:
        self.calls = 0


class Remembering(nn.Module):
    """Remembers its last call in whatever is no buffer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind
        self.number, self.notes = 0, Notes()
        self.seen: list[torch.Tensor] = []
        self.by_name: dict[str, dict[str, torch.Tensor]] = {"last": {}}
        self.late: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        if self.kind == "number":
            self.number += 1
            return out * self.number
        if self.kind == "object":
            self.notes.calls += 1
            return out * self.notes.calls
        if self.kind == "list":
            self.seen.append(out)
            return out + self.seen[0].mean() * len(self.seen)
        if self.kind == "dict":
            before = self.by_name["last"].get("out", out)
            self.by_name["last"]["out"] = out
            return out + len(self.by_name["last"]) * before
        if hasattr(self, "late"):
            return out * self.late
        self.late = 2.0
        return out


def remembering(kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Remembering(kind), {"x": torch.randn(3, 4)}


def counting() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A module that keeps something for its next call."""
    torch.manual_seed(0)
    return Counting(), {"x": torch.randn(3, 4)}


class WholeNumbers(nn.Module):
    """Computes from integers, without a module and without a floating number."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"quotient": torch.div(a, b, rounding_mode="floor"), "less": a < b}


def whole_numbers() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return WholeNumbers(), {"a": torch.tensor([[-7, 7, 5]] * 2), "b": torch.tensor([[2, 3, -2]] * 2)}


class CalledTwice(nn.Module):
    """Two outputs of one module that is called twice on one input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.outer(self.inner(x)), self.inner(x).tanh()


def called_twice() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return CalledTwice(), {"x": torch.randn(8, 16)}


class Regions(nn.Module):
    """Computes with autocast on, and off, and with gradients, and writes into what it computed there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.first(x)
        with torch.autocast("cpu", enabled=False), torch.enable_grad():
            hidden += 1
            hidden = self.second(hidden.float())
        return hidden.relu_()


def regions() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Regions(), {"x": torch.randn(3, 6)}


class Either(nn.Module):
    """Takes one of two branches by its values; a module of one branch is called outside of it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.shared, self.leave = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        self.deep = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(x)
        taken: torch.Tensor = torch.cond(x.sum() > 0, self.deep, lambda x: self.shared(tap("half", x / 2)), (hidden,))
        return self.leave(self.shared(taken).relu())


def either() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Either(), {"x": torch.rand(3, 32)}


def fused_encoder() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """An encoder that torch runs in one kernel where nothing asks for its parts."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(layer).eval(), {"input": torch.randn(2, 5, 8)}
