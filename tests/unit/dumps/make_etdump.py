"""Writes two ETDumps with the real ExecuTorch: ``python make_etdump.py FOLDER``. Its runtime can abort."""

import sys
from pathlib import Path

import torch
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime, Verification
from safetensors.torch import save_file


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(8, 5)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def eager_outputs(net, x):
    found = {}
    hooks = [
        module.register_forward_hook(lambda _m, _i, out, name=name: found.update({name: out.detach().clone()}))
        for name, module in net.named_modules()
        if name and not isinstance(module, torch.nn.ModuleList)
    ]
    net(x)
    for hook in hooks:
        hook.remove()
    return found


def main(folder):
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(1, 3, 8)
    edge = to_edge_transform_and_lower(torch.export.export(net, (x,), strict=False), generate_etrecord=True)
    program = edge.to_executorch()
    (folder / "net.pte").write_bytes(program.buffer)
    for name, scale in (("one", 1.0), ("two", 2.0)):
        (folder / name).mkdir()
        program.get_etrecord().save(str(folder / name / "etrecord.bin"))
        loaded = Runtime.get().load_program(
            folder / "net.pte", verification=Verification.Minimal, enable_etdump=True, debug_buffer_size=1 << 18
        )
        loaded.load_method("forward").execute((x * scale,))
        loaded.write_etdump_result_to_file(str(folder / name / "run.etdp"), str(folder / name / "debug_output.bin"))
        save_file(eager_outputs(net, x * scale), folder / f"{name}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
