"""Backends that break one promise each, around ONNX Runtime. The name of a class is the promise that it breaks."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import torch

from ditto_core.backends.onnxruntime import OnnxRuntimeBackend, OnnxRuntimeSession
from ditto_core.backends.outputs_file import SESSION_FILE
from ditto_core.errors import BuildError, RunError


class Broken(OnnxRuntimeBackend):
    session = OnnxRuntimeSession

    def open(self, spec, directory, taps):
        return self.session(spec, directory, taps)


def off(outputs, when):
    """Return outputs with an error that only bits show."""
    return {name: value + 1e-6 * when for name, value in outputs.items()}


class Session(OnnxRuntimeSession):
    def change(self, inputs, outputs):
        return outputs

    def step(self, inputs, sink):
        return self.change(inputs, super().step(inputs, sink))


class description(Broken):
    def versions(self):
        return {}


class unknown_dtype(Broken):
    def check(self, spec):
        super().check(replace(spec, dtype="float32"))


class unknown_option(Broken):
    def check(self, spec):
        super().check(replace(spec, options=()))


class report(Broken):
    def build(self, request):
        made = super().build(request)
        return replace(made, taps=made.taps[:-1]) if len(made.taps) > 1 else made


class own_folder(Broken):
    def build(self, request):
        made = super().build(request)
        (request.onnx_path.parent / "notes.txt").write_text(str(request.directory))
        return made


class moved_engine(Broken):
    def build(self, request):
        made = super().build(request)
        (request.directory / "path.txt").write_text(str(request.directory))
        return made

    def open(self, spec, directory, taps):
        path = directory / "path.txt"
        if path.stat().st_size:  # a file that was emptied is another promise
            directory = Path(path.read_text())
        return super().open(spec, directory, taps)


class other_process(Broken):
    def build(self, request):
        (request.directory / "id.txt").write_text(str(os.getpid()))
        return super().build(request)

    def open(self, spec, directory, taps):
        if (text := (directory / "id.txt").read_text()) and int(text) != os.getpid():
            raise BuildError("the engine is not one of this process")
        return super().open(spec, directory, taps)


class damaged_engine(Broken):
    def open(self, spec, directory, taps):
        json.loads((directory / SESSION_FILE).read_text())  # raises ValueError
        return super().open(spec, directory, taps)


class no_tap(Broken):
    class session(Session):
        def step(self, inputs, sink):
            if not self.taps:
                sink("a site of its own", torch.zeros(1))
            return super().step(inputs, sink)


def finals(session, tap):
    return tap.value in session._finals


class one_tap(Broken):
    class session(Session):
        def step(self, inputs, sink):
            lone = len(self.taps) == 1 and not finals(self, self.taps[0])
            return super().step(inputs, (lambda site, tensor: None) if lone else sink)


class output_as_tap(Broken):
    class session(Session):
        def step(self, inputs, sink):
            lone = len(self.taps) == 1 and finals(self, self.taps[0])
            return super().step(inputs, (lambda site, tensor: None) if lone else sink)


class every_tap(Broken):
    """Gives two taps of one shape each other's tensor."""

    class session(Session):
        def step(self, inputs, sink):
            names = {"model.layers.0.self_attn.k_proj": "model.layers.0.self_attn.v_proj"}
            names |= {value: key for key, value in names.items()}
            kept = {}
            outputs = super().step(inputs, kept.__setitem__)
            for site in kept:
                sink(site, kept[names.get(site, site)])
            return outputs


class tap_order(Broken):
    class session(Session):
        def step(self, inputs, sink):
            kept = []
            outputs = super().step(inputs, lambda site, tensor: kept.append((site, tensor)))
            for site, tensor in reversed(kept):
                sink(site, tensor)
            return outputs


class dtypes(Broken):
    class session(Session):
        def step(self, inputs, sink):
            return super().step(inputs, lambda site, tensor: sink(site, tensor.double()))


class tensors_last(Broken):
    """Has one buffer for all taps of a shape."""

    class session(Session):
        def step(self, inputs, sink):
            buffers = {}

            def reuse(site, tensor):
                buffer = buffers.setdefault(tuple(tensor.shape), torch.empty_like(tensor))
                sink(site, buffer.copy_(tensor))

            return super().step(inputs, reuse)


class outputs(Broken):
    """Returns the logits of the last token alone."""

    class session(Session):
        def change(self, inputs, outputs):
            return {n: v[:, -1:] if n == "logits" else v for n, v in outputs.items()}


class decoding(Broken):
    """The third step without padding is wrong."""

    class session(Session):
        def start(self, batch):
            super().start(batch)
            self.steps = 0

        def change(self, inputs, outputs):
            self.steps += 1
            wrong = self.steps > 2 and inputs["attention_mask"].all()
            return {n: v.flip(-1) for n, v in outputs.items()} if wrong else outputs


class batch_sizes(Broken):
    class session(Session):
        def change(self, inputs, outputs):
            wrong = "input_ids" in inputs and inputs["input_ids"].shape == (1, 1)
            return {n: -v for n, v in outputs.items()} if wrong else outputs


class padding(Broken):
    class session(Session):
        def step(self, inputs, sink):
            masks = {n: torch.ones_like(v) for n, v in inputs.items() if n == "attention_mask"}
            return super().step({**inputs, **masks}, sink)


class restart(Broken):
    """A sequence after one with another number of rows is a little off."""

    class session(Session):
        rows = 0

        def change(self, inputs, outputs):
            rows = len(next(iter(outputs.values())))
            before, self.rows = self.rows, rows
            return off(outputs, before not in (0, rows))


class two_sessions(Broken):
    """A session is a little off while another one is open."""

    class session(Session):
        opened = 0

        def __init__(self, *arguments):
            super().__init__(*arguments)
            two_sessions.session.opened += 1

        def change(self, inputs, outputs):
            return off(outputs, two_sessions.session.opened > 1)

        def close(self):
            two_sessions.session.opened -= 1
            super().close()


class determinism(Broken):
    class session(Session):
        numbers = itertools.count()

        def step(self, inputs, sink):
            noise = 1e-7 * next(self.numbers)
            return super().step(inputs, lambda site, tensor: sink(site, tensor + noise * tensor.abs().max()))


class inputs_kept(Broken):
    class session(Session):
        def change(self, inputs, outputs):
            if "position_ids" in inputs:
                inputs["position_ids"].add_(1)
            return outputs


class missing_input(Broken):
    """Takes the last step's input for one that is missing."""

    class session(Session):
        def step(self, inputs, sink):
            self.last = {**getattr(self, "last", {}), **inputs}
            return super().step(self.last, sink)


class wrong_shape(Broken):
    class session(Session):
        def step(self, inputs, sink):
            positions = {name: tensor.reshape(2, -1) for name, tensor in inputs.items() if tensor.ndim == 3}
            return super().step({**inputs, **positions}, sink)


class works_after_a_refusal(Broken):
    class session(Session):
        failed = False

        def step(self, inputs, sink):
            try:
                values = super().step(inputs, sink)
            except RunError:
                self.failed = True
                raise
            return off(values, self.failed)


class errors_in_one_line(Broken):
    class session(Session):
        def step(self, inputs, sink):
            try:
                return super().step(inputs, sink)
            except RunError as error:
                raise RunError(f"{error}\nat some place in the engine") from error


class model_without_a_cache(Broken):
    def build(self, request):
        if not request.decoder:
            raise BuildError("decoders only")
        return super().build(request)


class memory(Broken):
    class session(Session):
        def change(self, inputs, outputs):
            self.kept = [*getattr(self, "kept", ()), *(v.clone() for v in outputs.values())]
            return outputs


class cleanup(Broken):
    class session(Session):
        left = ()

        def __init__(self, *arguments):
            super().__init__(*arguments)
            cleanup.session.left += (os.memfd_create("left"),)


BROKEN = {
    name: value for name, value in list(globals().items()) if isinstance(value, type) and Broken in value.__bases__
}
