"""A loaded engine on the current CUDA stream, fed with torch tensors that are never copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch

from ditto_core.backends.tensorrt.binding import Binder
from ditto_core.backends.tensorrt.library import Library, Messages, load_library
from ditto_core.backends.tensorrt.listener import UnfusedTensors
from ditto_core.backends.tensorrt.manifest import EngineManifest
from ditto_core.backends.tensorrt.probe import Kernels, measure_kernels
from ditto_core.backends.tensorrt.runtime import Loaded, load_engine
from ditto_core.backends.tensorrt.tensorrt_options import TensorrtOptions
from ditto_core.errors import BackendError, RunError, UsageError, first_line
from ditto_core.profile import STEP
from ditto_core.session import SessionInfo, TapSink
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec
from ditto_core.system.gpus import driver_version

PAST, PRESENT = "past_key_values.", "present."
ADVICE = "run once more with CUDA_LAUNCH_BLOCKING=1 in the environment to have the error where it happens"


class Streams(Protocol):
    """Where an engine runs: ``use`` yields an object with ``cuda_stream`` (its handle) and ``synchronize()``."""

    def use(self) -> AbstractContextManager[Any]:
        """Enter the stream that the engine is to run on."""
        ...


class TensorRTSession:
    """Steps one engine. The present tensors of a step are the past of the next, where they lie; two sets take turns.

    Inputs on the CPU are moved to the GPU. An input of another dtype, shape or GPU is an error that names it; int64
    values for an int32 input are converted by value.
    """

    def __init__(
        self,
        spec: EngineSpec,
        manifest: EngineManifest,
        taps: tuple[Tap, ...],
        *,
        loaded: Loaded,
        binder: Binder,
        messages: Messages,
        streams: Streams,
        unfused: UnfusedTensors | None = None,
        facts: Mapping[str, str] | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        self.manifest = manifest
        self._spec, self._taps = spec, taps
        self._loaded, self._binder, self._messages = loaded, binder, messages
        self._streams, self._unfused = streams, unfused
        self._facts, self._kernels = dict(facts or {}), kernels or Kernels({})
        self._profiles = manifest.shape_profiles
        self._past: dict[str, torch.Tensor] = {}
        self._sizes: dict[str, int] = {}
        self._steps, self._rows = 0, 1

    @property
    def info(self) -> SessionInfo:
        """What this session is. ``facts`` hold versions, GPU, and what the matrix kernels were measured to do."""
        facts = {**self._facts, **self._kernels.facts}
        if self._unfused:
            facts["unfused"] = self._unfused.summary
        return SessionInfo(
            label=f"tensorrt {self._spec.dtype}",
            backend="tensorrt",
            dtype=self._spec.dtype,
            device=str(self._binder.device),
            model=self._spec.model.label,
            facts=facts,
            kernels=self._kernels.for_rows(self._rows),
        )

    @property
    def taps(self) -> tuple[Tap, ...]:
        """What is delivered, in topological order."""
        return self._taps

    @property
    def past(self) -> Mapping[str, torch.Tensor]:
        """The KV cache that the next step reads, by the engine's input name."""
        return self._past

    def start(self, batch: int) -> None:
        """Give every layer an empty past [batch, kv_head, 0, head_dim], or zeros where a state has a fixed size."""
        self._steps, self._rows = 0, batch
        sizes = {"batch": batch, "past": 0}
        for tensor in self.manifest.inputs:
            if tensor.name.startswith(PAST):
                shape = [sizes[d] if isinstance(d, str) else d for d in tensor.shape]
                self._past[tensor.name] = torch.zeros(
                    shape, dtype=getattr(torch, tensor.dtype), device=self._binder.device
                )

    def step(self, inputs: Mapping[str, torch.Tensor], sink: TapSink) -> dict[str, torch.Tensor]:
        """Run one forward pass; see :class:`~ditto_core.backends.base.Session`.

        Raises :class:`UsageError` for a step outside the profiles or an input that does not fit, :class:`RunError`
        when TensorRT fails.
        """
        with self._streams.use() as stream:
            feed = {**self._given(inputs), **self._past}
            self._sizes = dimensions(self.manifest, feed)
            self._binder.use_profile(self._profile(), stream)
            outputs = self._run(feed, stream)
        for name in self._past:
            self._past[name] = outputs[name.replace(PAST, PRESENT)]
        self._steps += 1
        self._deliver(outputs, sink)
        return {t.name: outputs[t.name] for t in self.manifest.outputs if not t.name.startswith(PRESENT)}

    def close(self) -> None:
        """Release the engine and keep the kernels that were compiled for the next session."""
        self._past.clear()
        if self._unfused:
            self._unfused.release()
        self._binder.release()
        self._loaded.close()

    def _given(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        wanted = {t.name for t in self.manifest.inputs} - self._past.keys()
        missing = sorted(wanted - inputs.keys())
        if missing:
            raise UsageError(f"the engine needs input {missing[0]!r}, given: {', '.join(sorted(inputs)) or 'nothing'}")
        return {name: from_cpu(tensor, self._binder.device) for name, tensor in inputs.items() if name in wanted}

    def _profile(self) -> int:
        """Return the first profile that serves this step's sizes."""
        named = {name: size for name, size in self._sizes.items() if name in self._profiles[0].ranges}
        for index, profile in enumerate(self._profiles):
            if all(size in profile.ranges[name] for name, size in named.items()):
                return index
        widest = self._profiles[-1]
        widest.check(**{name: named.get(name, widest.ranges[name].min) for name in STEP})
        served = ", ".join(map(str, self.manifest.profiles))
        raise UsageError(f"no profile of the engine serves {named}, it has {served}")

    def _run(self, feed: Mapping[str, torch.Tensor], stream: Any) -> dict[str, torch.Tensor]:
        outputs = self._binder.bind(feed, self._steps)
        try:
            with self._unfused.collecting() if self._unfused else nullcontext():
                done = self._loaded.context.execute_async_v3(stream.cuda_stream)
                stream.synchronize()
        except RuntimeError as error:
            raise RunError(self._failure(first_line(error))) from error
        if not done:
            raise RunError(self._failure(self._messages.last()))
        return outputs

    def _deliver(self, outputs: Mapping[str, torch.Tensor], sink: TapSink) -> None:
        found = {**outputs, **(self._unfused.named(self._sizes) if self._unfused else {})}
        for tap in self._taps:
            if tap.value in found:
                sink(tap.site, found[tap.value])

    def _failure(self, reason: str) -> str:
        if "out of memory" in reason.lower():
            return f"the engine ran out of GPU memory in step {self._steps}: {reason}"
        return f"the engine failed in step {self._steps}: {reason}; {ADVICE}"


class CudaStreams:
    """The caller's current stream; where that is the default one, which costs synchronisation, a stream of our own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def use(self) -> Iterator[torch.cuda.Stream]:
        """Enter the stream; it waits for the caller's work, and the caller's later work waits for it."""
        current = torch.cuda.current_stream(self._device)
        if current != torch.cuda.default_stream(self._device):
            with torch.cuda.device(self._device):  # it may not be the caller's current one
                yield current
            return
        self._own.wait_stream(current)
        with torch.cuda.stream(self._own):
            yield self._own
        current.wait_stream(self._own)


def open_session(spec: EngineSpec, directory: Path, taps: tuple[Tap, ...]) -> TensorRTSession:
    """Load the engine in a directory on the current GPU.

    Raises :class:`BackendError` without a GPU, :class:`RunError` when the engine is another version's or is refused.
    """
    library = load_library()
    require_gpu(library)
    manifest, options = EngineManifest.load(directory), TensorrtOptions.of(spec)
    require_version(library, manifest)
    device = torch.device("cuda", torch.cuda.current_device())
    messages = Messages(library)
    loaded = load_engine(library, messages, directory, options)
    unfused = UnfusedTensors(library, loaded, directory, device) if options.taps == "unfused" else None
    return TensorRTSession(
        spec,
        manifest,
        taps,
        loaded=loaded,
        binder=make_binder(library, manifest, loaded, messages, device=device),
        messages=messages,
        streams=CudaStreams(device),
        unfused=unfused,
        facts=describe(library, manifest, options, device),
        kernels=kernels_of(manifest, options, device) if options.probe else None,
    )


def make_binder(
    library: Library, manifest: EngineManifest, loaded: Loaded, messages: Messages, *, device: torch.device
) -> Binder:
    """Make a binder in which the KV cache alternates between two buffers and final outputs get their own memory."""
    names = [tensor.name for tensor in manifest.outputs]
    cache = {name for name in names if name.startswith(PRESENT)}
    return Binder(library, loaded, messages, device, alternating=cache, fresh=set(names) - cache)


def require_gpu(library: Library) -> None:
    """Raise :class:`BackendError` with the reason why no engine can run here."""
    if torch.cuda.is_available():
        return
    reason = "this torch was built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
    raise BackendError(
        f"{library.label} engines run on an NVIDIA GPU only: {reason} (torch {torch.__version__}); building works here"
    )


def require_version(library: Library, manifest: EngineManifest) -> None:
    """Raise :class:`RunError` when the engine was built by another TensorRT."""
    if (library.label, library.version) != (manifest.library, manifest.version):
        built, here = f"{manifest.library} {manifest.version}", f"{library.label} {library.version}"
        raise RunError(f"the engine was built by {built}, but {here} is installed; build it again")


def describe(
    library: Library, manifest: EngineManifest, options: TensorrtOptions, device: torch.device
) -> dict[str, str]:
    """Return what a report says of a session."""
    return {
        library.label: library.version,
        "gpu": torch.cuda.get_device_name(device),
        "driver": driver_version(),
        "tf32_flag": "set" if options.tf32 else "cleared",
        "taps": options.taps,
        "built_on": str(manifest.facts.get("gpu", "")),
    }


def kernels_of(manifest: EngineManifest, options: TensorrtOptions, device: torch.device) -> Kernels:
    """Measure the kernels that an engine of this dtype and inner dimension uses on this GPU."""
    return measure_kernels(manifest.dtype, options.tf32, device.index, int(manifest.facts.get("inner", 0)))


def dimensions(manifest: EngineManifest, feed: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the size of each named dimension. Raises :class:`UsageError` where inputs disagree or a shape is wrong."""
    sizes: dict[str, int] = {}
    source: dict[str, str] = {}
    for info in manifest.inputs:
        shape = tuple(feed[info.name].shape)
        fixed = [(d, s) for d, s in zip(info.shape, shape, strict=False) if isinstance(d, int)]
        if len(shape) != len(info.shape) or any(d != s for d, s in fixed):
            expected = ", ".join(map(str, info.shape))
            raise UsageError(f"input {info.name!r} has shape {list(shape)}, expected [{expected}]")
        for name, size in zip(info.shape, shape, strict=True):
            if not isinstance(name, str):
                continue
            if sizes.setdefault(name, size) != size:
                raise UsageError(f"input {info.name!r} has {name} {size}, but {source[name]!r} has {sizes[name]}")
            source.setdefault(name, info.name)
    if {"past", "length", "total"} <= sizes.keys() and sizes["past"] + sizes["length"] != sizes["total"]:
        expected = f"past {sizes['past']} + length {sizes['length']} = {sizes['past'] + sizes['length']}"
        raise UsageError(f"input {source['total']!r} covers {sizes['total']} tokens, expected {expected}")
    return sizes


def from_cpu(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move a tensor of the CPU to ``device``; leave one of a GPU alone."""
    return tensor.to(device) if tensor.device.type == "cpu" else tensor
