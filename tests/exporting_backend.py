"""A backend that builds from the module: it saves the exported program and runs that by PyTorch's own kernels."""

from __future__ import annotations

import json
import zipfile

import torch

from ditto_core.backends.base import BuildReport
from ditto_core.errors import BackendError, BuildError, RunError, first_line
from ditto_core.session import SessionInfo

PAST = "past_key_values."


class ExportingBackend:
    name = "exporting"
    dtypes = ("float32",)

    def check(self, spec):
        if spec.dtype not in self.dtypes or spec.options:
            raise BackendError(f"exporting has float32 and no options, got {spec.dtype}, {dict(spec.options)}")

    def versions(self):
        return {"torch": str(torch.__version__)}

    def build(self, request):
        program = request.exported_program()
        torch.export.save(program.exported, request.directory / "model.pt2")
        shapes = [list(past.shape) for past in program.empty_past]
        names = {"inputs": program.inputs, "outputs": program.outputs, "finals": request.outputs, "shapes": shapes}
        (request.directory / "names.json").write_text(json.dumps(names))
        return BuildReport(program.taps, program.refused)

    def open(self, spec, directory, taps):
        return ExportingSession(spec, directory, taps)


class ExportingSession:
    def __init__(self, spec, directory, taps):
        try:
            exported = torch.export.load(directory / "model.pt2")
            self._names = json.loads((directory / "names.json").read_text())
        except (RuntimeError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise BuildError(f"the program cannot be loaded: {first_line(error)}") from error
        self._module = exported.module(check_guards=False)
        self.taps = taps
        self.info = SessionInfo("exporting float32", "exporting", spec.dtype, model=spec.model.label)
        self._past = {}

    def start(self, batch):
        pasts = [name for name in self._names["inputs"] if name.startswith(PAST)]
        shapes = zip(pasts, self._names["shapes"], strict=True)
        self._past = {name: torch.zeros(batch, *shape[1:]) for name, shape in shapes}

    def step(self, inputs, sink):
        given = {**inputs, **self._past}
        try:
            feed = [given[name] for name in self._names["inputs"]]
            if "input_ids" in given and any(each.ndim != 2 for each in feed[:3]):
                raise RunError("a token input is not of two dimensions")
            results = self._module(*feed)
        except (RuntimeError, KeyError, AssertionError) as error:
            raise RunError(f"the program failed: {first_line(error)}") from error
        values = dict(zip(self._names["outputs"], results, strict=True))
        self._past = {name: values[name.replace("past_key_values", "present")] for name in self._past}
        for tap in self.taps:
            sink(tap.site, values[tap.value])
        return {name: values[name] for name in self._names["finals"]}

    def close(self):
        self._past = {}
