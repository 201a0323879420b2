"""Writes two ETDumps with the real ExecuTorch: ``python make_etdump.py FOLDER``. Its runtime can abort."""

import json
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


def write_run(folder, program, inputs):
    """Write program, ETRecord, ETDump and debug buffer of one run. The record has inputs that are a little larger."""
    folder.mkdir()
    record = program.get_etrecord()
    record.update_representative_inputs([each * 1.01 for each in inputs])
    record.save(str(folder / "etrecord.bin"))
    (folder / "net.pte").write_bytes(program.buffer)
    loaded = Runtime.get().load_program(
        folder / "net.pte", verification=Verification.Minimal, enable_etdump=True, debug_buffer_size=1 << 18
    )
    loaded.load_method("forward").execute(inputs)
    loaded.write_etdump_result_to_file(str(folder / "run.etdp"), str(folder / "debug_output.bin"))


def inspectors_own_example(folder):
    """Write a run of the model that the Inspector is tested with, and the numbers that the Inspector gives."""
    from executorch.devtools import Inspector
    from executorch.devtools.inspector.tests.inspector_test_utils import ConvlLinearModel

    inputs = (ConvlLinearModel.get_input().detach(),)
    exported = torch.export.export(ConvlLinearModel().eval(), inputs, strict=False)
    write_run(folder, to_edge_transform_and_lower(exported, generate_etrecord=True).to_executorch(), inputs)
    files = ("run.etdp", "etrecord.bin", "debug_output.bin")
    names = ("etdump_path", "etrecord", "debug_buffer_path")
    inspector = Inspector(**{name: str(folder / file) for name, file in zip(names, files, strict=True)})
    found = {}
    for distance in ("MSE", "L1", "SNR"):
        for _, row in inspector.calculate_numeric_gap(distance).iterrows():
            found.setdefault(", ".join(row["aot_ops"]), {})[distance] = row["gap"][0]
    (folder.parent / "inspector.json").write_text(json.dumps(found))


def blocks(folder):
    """Write a run of a program that is delegated in two blocks."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    torch.manual_seed(0)
    inputs = (torch.randn(1, 3, 8),)
    exported = torch.export.export(Net().eval(), inputs, strict=False)
    edge = to_edge_transform_and_lower(exported, generate_etrecord=True, partitioner=[XnnpackPartitioner()])
    write_run(folder, edge.to_executorch(), inputs)


def main(folder):
    inspectors_own_example(folder / "example")
    blocks(folder / "blocks")
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
