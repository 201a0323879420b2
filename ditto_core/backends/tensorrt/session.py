"""A loaded engine on the current CUDA stream, fed with torch tensors that are never copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from ditto_core.backends.base import SessionInfo, TapSink
from ditto_core.backends.tensorrt.binding import Binder
from ditto_core.backends.tensorrt.gpu import driver_version
from ditto_core.backends.tensorrt.library import Library, Messages, load_library
from ditto_core.backends.tensorrt.listener import UnfusedTensors
from ditto_core.backends.tensorrt.manifest import EngineManifest
from ditto_core.backends.tensorrt.options import Options
from ditto_core.backends.tensorrt.probe import measure_kernels
from ditto_core.backends.tensorrt.runtime import load_engine
from ditto_core.errors import BackendError, RunError, UsageError
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec

PAST, PRESENT = "past_key_values.", "present."
ADVICE = "run once more with CUDA_LAUNCH_BLOCKING=1 in the environment to have the error where it happens"


class TensorRTSession:
    """Steps one engine. The present tensors of a step are the past of the next, where they lie; two sets take turns.

    Inputs on the CPU are moved to the GPU. An input of another dtype, shape or GPU is an error that names it; int64
    values for an int32 input are converted by value.
    """

    def __init__(self, spec: EngineSpec, directory: Path, taps: tuple[Tap, ...]) -> None:
        library = load_library()
        require_gpu(library)
        self._manifest = EngineManifest.load(directory)
        check_library(library, self._manifest)
        self._spec, self._options = spec, Options.of(spec)
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._own_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._messages = Messages(library)
        self._loaded = load_engine(library, self._messages, directory, self._options)
        outputs = [t.name for t in self._manifest.outputs]
        cache = [name for name in outputs if name.startswith(PRESENT)]
        self._binder = Binder(
            library,
            self._loaded,
            self._messages,
            self._device,
            alternating=cache,
            fresh=[name for name in outputs if name not in cache],
        )
        self._taps = taps
        self._unfused = self._listen(library, directory)
        self._past: dict[str, torch.Tensor] = {}
        self._steps = 0
        self._sizes: dict[str, int] = {}
        self._facts = self._describe(library)

    @property
    def info(self) -> SessionInfo:
        """What this session is. ``facts`` hold versions, GPU, and what the matrix kernels were measured to do."""
        label, facts = f"tensorrt {self._spec.dtype}", dict(self._facts)
        if self._unfused:
            facts["unfused"] = self._unfused.summary
        return SessionInfo(label, "tensorrt", self._spec.dtype, str(self._device), self._spec.model.label, facts)

    @property
    def taps(self) -> tuple[Tap, ...]:
        """What is delivered, in topological order."""
        return self._taps

    @property
    def manifest(self) -> EngineManifest:
        """How the engine was built."""
        return self._manifest

    def start(self, batch: int) -> None:
        """Give every layer an empty past of shape [batch, kv_head, 0, head_dim]."""
        self._steps = 0
        for tensor in self._manifest.inputs:
            if tensor.name.startswith(PAST):
                sizes = {"batch": batch, "past": 0}
                shape = [sizes[d] if isinstance(d, str) else d for d in tensor.shape]
                self._past[tensor.name] = torch.empty(shape, dtype=getattr(torch, tensor.dtype), device=self._device)

    def step(self, inputs: Mapping[str, torch.Tensor], sink: TapSink) -> dict[str, torch.Tensor]:
        """Run one forward pass; see :class:`~ditto_core.backends.base.Session`.

        Raises :class:`UsageError` for a step outside the profiles or an input that does not fit, :class:`RunError`
        when TensorRT fails.
        """
        with self._stream() as stream:
            feed = {**self._given(inputs), **self._past}
            self._choose_profile(feed, stream)
            outputs = self._run(feed, stream)
        for name in self._past:
            self._past[name] = outputs[name.replace(PAST, PRESENT)]
        self._steps += 1
        self._deliver(outputs, sink)
        return {t.name: outputs[t.name] for t in self._manifest.outputs if not t.name.startswith(PRESENT)}

    def close(self) -> None:
        """Release the engine and keep the kernels that were compiled for the next session."""
        if self._loaded is not None:
            self._past.clear()
            self._binder.release()
            self._loaded.close()
            del self._binder, self._loaded

    @contextmanager
    def _stream(self) -> Iterator[torch.cuda.Stream]:
        """Yield the caller's stream; beside the default one, which costs synchronisation, a stream of our own."""
        current = torch.cuda.current_stream(self._device)
        if current != torch.cuda.default_stream(self._device):
            yield current
            return
        self._own_stream.wait_stream(current)
        with torch.cuda.stream(self._own_stream):
            yield self._own_stream
        current.wait_stream(self._own_stream)

    def _given(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        wanted = {t.name for t in self._manifest.inputs} - self._past.keys()
        missing = sorted(wanted - inputs.keys())
        if missing:
            raise UsageError(f"the engine needs input {missing[0]!r}, given: {', '.join(sorted(inputs))}")
        return {name: on_gpu(tensor, self._device) for name, tensor in inputs.items() if name in wanted}

    def _choose_profile(self, feed: Mapping[str, torch.Tensor], stream: torch.cuda.Stream) -> None:
        sizes = self._sizes = dimensions(self._manifest, feed)
        profiles = self._manifest.shape_profiles
        for index, profile in enumerate(profiles):
            if all(size in getattr(profile, name) for name, size in sizes.items() if name != "total"):
                self._binder.use_profile(index, stream)
                return
        widest = profiles[-1]
        named = {n: sizes.get(n, getattr(widest, n).min) for n in ("batch", "length", "past")}
        widest.check(**named)
        raise UsageError(f"no profile serves {named}, the engine has {', '.join(map(str, self._manifest.profiles))}")

    def _run(self, feed: Mapping[str, torch.Tensor], stream: torch.cuda.Stream) -> dict[str, torch.Tensor]:
        outputs = self._binder.bind(feed, self._steps)
        try:
            with self._capturing(stream):
                done = self._loaded.context.execute_async_v3(stream.cuda_stream)
                stream.synchronize()
        except RuntimeError as error:
            raise RunError(self._failure(str(error).splitlines()[0])) from error
        if not done:
            raise RunError(self._failure(self._messages.last()))
        return outputs

    @contextmanager
    def _capturing(self, stream: torch.cuda.Stream) -> Iterator[None]:
        if self._unfused is None:
            yield
            return
        with self._unfused.collecting():
            yield

    def _deliver(self, outputs: Mapping[str, torch.Tensor], sink: TapSink) -> None:
        found = dict(outputs) if self._unfused is None else {**outputs, **self._unfused.named(self._sizes)}
        for tap in self._taps:
            if tap.value in found:
                sink(tap.site, found[tap.value])

    def _failure(self, reason: str) -> str:
        if "out of memory" in reason.lower() and is_alive():
            free, total = (size / 2**30 for size in torch.cuda.mem_get_info(self._device))
            return f"out of GPU memory in step {self._steps} ({free:.1f} of {total:.1f} GiB free): {reason}"
        return f"the engine failed in step {self._steps}: {reason}; {ADVICE}"

    def _listen(self, library: Library, directory: Path) -> UnfusedTensors | None:
        if self._options.taps != "unfused":
            return None
        return UnfusedTensors(library, self._loaded, directory, self._device)

    def _describe(self, library: Library) -> dict[str, str]:
        facts = {
            library.label: library.version,
            "gpu": torch.cuda.get_device_name(self._device),
            "driver": driver_version(),
            "tf32_flag": "set" if self._options.tf32 else "cleared",
            "taps": self._options.taps,
            "built_on": str(self._manifest.facts.get("gpu", "")),
        }
        if self._options.probe:
            facts |= measure_kernels(self._spec.dtype, self._options.tf32, self._device.index)
        return facts


def require_gpu(library: Library) -> None:
    """Raise :class:`BackendError` with the reason why no engine can run here."""
    if torch.cuda.is_available():
        return
    reason = "this torch was built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
    raise BackendError(
        f"{library.label} engines run on an NVIDIA GPU only: {reason} (torch {torch.__version__}); building works here"
    )


def check_library(library: Library, manifest: EngineManifest) -> None:
    """Raise :class:`RunError` when the engine was built by another TensorRT."""
    if (library.label, library.version) != (manifest.library, manifest.version):
        built, here = f"{manifest.library} {manifest.version}", f"{library.label} {library.version}"
        raise RunError(f"the engine was built by {built}, but {here} is installed; build it again")


def dimensions(manifest: EngineManifest, feed: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the size of each named dimension. Raises :class:`UsageError` where inputs disagree or a shape is wrong."""
    sizes: dict[str, int] = {}
    source: dict[str, str] = {}
    for info in manifest.inputs:
        shape = tuple(feed[info.name].shape)
        fixed = [(d, s) for d, s in zip(info.shape, shape, strict=False) if isinstance(d, int)]
        if len(shape) != len(info.shape) or any(d != s for d, s in fixed):
            raise UsageError(
                f"input {info.name!r} has shape {list(shape)}, expected [{', '.join(map(str, info.shape))}]"
            )
        for name, size in zip(info.shape, shape, strict=True):
            if isinstance(name, str) and sizes.setdefault(name, size) != size:
                raise UsageError(f"input {info.name!r} has {name} {size}, but {source[name]!r} has {sizes[name]}")
            if isinstance(name, str):
                source.setdefault(name, info.name)
    if {"past", "length", "total"} <= sizes.keys() and sizes["past"] + sizes["length"] != sizes["total"]:
        expected = f"past {sizes['past']} + length {sizes['length']} = {sizes['past'] + sizes['length']}"
        raise UsageError(f"input {source['total']!r} covers {sizes['total']} tokens, expected {expected}")
    return sizes


def on_gpu(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move a tensor of the CPU to the GPU; leave one of a GPU alone."""
    return tensor.to(device) if tensor.device.type == "cpu" else tensor


def is_alive() -> bool:
    """Tell whether the CUDA context still answers; after an illegal address it does not."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
