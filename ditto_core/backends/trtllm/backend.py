"""The backend: checks a spec, builds in a child process, opens sessions."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditto_core.backends.base import BuildReport, BuildRequest
from ditto_core.backends.served.place import Place
from ditto_core.backends.served.source import model_facts, served_model
from ditto_core.backends.trtllm import detect, names
from ditto_core.backends.trtllm.plan import RAW
from ditto_core.backends.trtllm.trtllm_options import TrtllmOptions
from ditto_core.errors import BackendError, ModelError
from ditto_core.model.own_code import names_code, untrusted
from ditto_core.profile import ShapeProfile
from ditto_core.session import Session
from ditto_core.sites import Tap
from ditto_core.spec import EngineSpec
from ditto_core.system.fingerprint import directory_digest
from ditto_core.system.gpus import describe_gpu

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

TARGET = "ditto_core.backends.trtllm.build:build_engine"
BUILD_LOG = "build.log"
MANIFEST = "trtllm.json"
TORCH_DTYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16"}


class TrtllmBackend:
    """TensorRT-LLM, both of its backends. Settings:
    :class:`~ditto_core.backends.trtllm.trtllm_options.TrtllmOptions`."""

    name = "trtllm"
    dtypes = ("float32", "float16", "bfloat16")

    def check(self, spec: EngineSpec) -> None:
        """Raise when TensorRT-LLM is missing, lacks what the spec asks for, or an option is unknown."""
        options = TrtllmOptions.of(spec)
        found = detect.require()
        if spec.dtype not in self.dtypes:
            raise BackendError(f"trtllm has no {spec.dtype} kernels, expected {', '.join(self.dtypes)}")
        engine = choose(options, found)
        if engine == "tensorrt" and not found.engines:
            raise BackendError(
                f"{detect.PACKAGE} {found.version} builds no TensorRT engines (removed after 1.3.0rc20): use "
                f"options={{'engine': 'pytorch'}}, or {detect.LAST_ENGINE_RELEASE}"
            )
        if engine == "pytorch" and not found.pytorch:
            raise BackendError(
                f"{detect.PACKAGE} {found.version} has no PyTorch backend that is known, 1.0 and later have"
            )

    def check_runs(self) -> None:
        """Raise when neither of its backends is whole here: engines need the package tensorrt, too."""
        found = detect.require()
        if not (found.pytorch or (found.engines and detect.installed("tensorrt"))):
            raise BackendError("; ".join(detect.problems(found)))

    def versions(self) -> dict[str, str]:
        """Versions of TensorRT-LLM and of what it builds with, GPU and driver: an engine is of one kind of GPU."""
        found = detect.require()
        others = {name: text for name in ("tensorrt", "torch") if (text := detect.installed(name))}
        return {detect.PACKAGE: found.version, **others, **describe_gpu()}

    def content(self, spec: EngineSpec) -> dict[str, str]:
        """Return the digest of the converted checkpoint that is built from. Part of the cache key.

        Raises :class:`~ditto_core.errors.ModelError` where there is none.
        """
        checkpoint = TrtllmOptions.of(spec).checkpoint
        return {"checkpoint": directory_digest(Path(checkpoint))} if checkpoint else {}

    def raw_taps(self, name: str, alias: str) -> list[Tap]:
        """Return the tap of a name that is aliased, or that is TensorRT-LLM's own: module, layer, registered output."""
        raw = name.removeprefix(RAW)
        return [with_sites(Tap(alias, raw), raw)]

    def diagnose(self) -> Iterable[str]:
        """Return what is installed, what works, what clashes, and what to run in a container."""
        return detect.report_lines()

    def build(self, request: BuildRequest) -> BuildReport:
        """Build the engine; for the PyTorch backend, which builds none, note the model. Factories are saved first."""
        from ditto_core.backends.trtllm.build import engine_config

        options = TrtllmOptions.of(request.spec)
        facts = model_facts(request, self.name)
        engine = choose(options, detect.require())
        (request.directory / MANIFEST).write_text(json.dumps({"engine": engine, **facts}) + "\n")
        model = trusted_model(facts, request.spec, request.directory)
        if engine == "pytorch":
            return torch_report(request.taps)
        wanted, refused = requested(request.taps)
        report = run_build(request, options, model, {each.name: each.alias for each in wanted})
        taps, missing = delivered(wanted, report, engine_config(request.directory)["pretrained_config"])
        return BuildReport(taps, refused | missing, {"outputs": len(report["outputs"]), "builder": options.builder})

    def open(self, spec: EngineSpec, directory: Path, taps: tuple[Tap, ...]) -> Session:
        """Load the engine on this machine's GPU. Raises :class:`BackendError` when it needs several."""
        from ditto_core.backends.trtllm.pytorch import TorchSession
        from ditto_core.backends.trtllm.session import EngineSession

        manifest = json.loads((directory / MANIFEST).read_text())
        if manifest["engine"] == "pytorch":
            model = trusted_model(manifest, spec, directory)
            return TorchSession(spec, model, taps, TrtllmOptions.of(spec).attn_backend)
        return EngineSession(spec, directory, taps)


def trusted_model(facts: Mapping[str, Any], spec: EngineSpec, directory: Path) -> str:
    """Return the directory of the model that an engine is built from or serves.

    Raises :class:`ModelError` for a checkpoint whose own code TensorRT-LLM would run untrusted: both of its backends
    take ``trust_remote_code`` for granted when they read a configuration, whatever they are told.
    """
    model, source = served_model(facts, spec, directory), spec.model
    if source.factory is None and not source.trust_remote_code and names_code(Path(model)):
        raise ModelError(f"{source.label} is not given to TensorRT-LLM: {untrusted(source)}")
    return model


def choose(options: TrtllmOptions, found: detect.Installation) -> str:
    """Return which backend of TensorRT-LLM is meant: the one that is asked for, else engines where there are any."""
    return options.engine or ("tensorrt" if found.engines else "pytorch")


def torch_report(taps: tuple[Tap, ...]) -> BuildReport:
    """Return what the PyTorch backend can show."""
    places = {tap.site: names.torch_place(origin(tap)) for tap in taps}
    shown = tuple(Tap(**{**tap.__dict__, "value": place.value}) for tap in taps if (place := places[tap.site]))
    refused = {site: names.why_not(site) for site, place in places.items() if place is None}
    return BuildReport(shown, refused, {"engine": "pytorch"})


@dataclass(frozen=True)
class Request:
    """What the builder is asked for a tap: a name of its own, and the alias that the engine's output gets, if any."""

    tap: Tap
    name: str
    alias: str = ""
    place: Place | None = None


def origin(tap: Tap) -> str:
    """Return the name that a tap was asked for by: its site, or what an alias stands for."""
    return tap.site if tap.fx_node else tap.value


def with_sites(tap: Tap, tensor: str, architecture: str = "") -> Tap:
    """Return a tap of TensorRT-LLM's own name with the sites that it is, by which a reference finds it."""
    found = tuple(site for site in names.same(tensor, architecture) if site != tap.site)
    return replace(tap, aliases=found, axes=("batch", "length", "") if found else ())


def requested(taps: tuple[Tap, ...]) -> tuple[list[Request], dict[str, str]]:
    """Return what to ask the builder for, and a reason for each site that TensorRT-LLM computes nowhere.

    A tap without an FX node is one of TensorRT-LLM's own names.
    """
    wanted, refused = [], {}
    for tap in taps:
        place = names.engine_place(origin(tap))
        if place is not None:
            wanted.append(Request(tap, place.tensor, place=place))
        elif tap.fx_node:
            refused[tap.site] = names.why_not(tap.site)
        else:
            wanted.append(Request(tap, tap.value, "" if tap.site.startswith(RAW) else tap.site))
    return wanted, refused


def run_build(request: BuildRequest, options: TrtllmOptions, model: str, outputs: Mapping[str, str]) -> dict[str, Any]:
    """Build in a child process, unless the options say otherwise, and return the report of rank 0."""
    from ditto_core.backends.trtllm.build import Order, build_engine
    from ditto_core.system.isolate import run_isolated

    order = Order(
        options.builder,
        model,
        options.checkpoint,
        request.spec.dtype,
        str(request.directory),
        sizes(request.spec.profile),
        outputs,
        str(request.artifacts) if request.artifacts else "",
        options.workers,
        options.build,
        options.plugin,
    )
    if not options.isolate:
        return build_engine(**asdict(order))
    log = request.directory / BUILD_LOG
    found: dict[str, Any] = run_isolated(TARGET, asdict(order), timeout=options.timeout or None, log=log)
    return found


def sizes(profile: ShapeProfile) -> dict[str, int]:
    """Return what the engine must hold: a step after ``past.max`` tokens needs room for one more."""
    sequence = max(profile.past.max, profile.length.max) + 1
    return {"batch": profile.batch.max, "prompt": profile.length.max, "sequence": sequence}


def unfit(request: Request, config: Mapping[str, Any]) -> str:
    """Say why a site cannot be had from the tensor of its place, by an engine's ``pretrained_config``."""
    from ditto_core.backends.trtllm.build import interleaved

    place, axes = request.place, request.tap.axes
    if place is None:
        return ""
    if place.parts > 1 and interleaved(config):
        return f"the engine interleaves it head by head: tap 'trt:{request.name}' as a whole"
    if names.HEADWISE.search(place.module) and not place.port and axes and "length" not in axes:
        return "it has as many heads as the sample prompt has tokens, so that its layout cannot be told"
    return names.unlike(place.module, place.port, config.get("architecture", ""))


def delivered(
    wanted: list[Request], report: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[tuple[Tap, ...], dict[str, str]]:
    """Return the taps that the engine shows, by the tensors that hold them, and a reason for each that is missing.

    ``config`` is the engine's ``pretrained_config``.
    """
    shown: list[Tap] = []
    refused: dict[str, str] = {}
    for request in wanted:
        hits = [name for name, found in report["outputs"].items() if request.name in found["requests"]]
        if why := unfit(request, config):
            refused[request.tap.site] = why
            continue
        if not hits:
            refused[request.tap.site] = report["refused"].get(request.name, "the build did not mark it")
        for hit in hits:
            site = request.tap.site if len(hits) == 1 else hit if request.alias else RAW + hit
            dtype = TORCH_DTYPES.get(report["outputs"][hit]["dtype"], request.tap.dtype)
            value = request.place.value if request.place else hit
            tap = replace(request.tap, site=site, value=value, dtype=dtype)
            if not tap.fx_node:
                tap = with_sites(tap, report["outputs"][hit]["source"], config.get("architecture", ""))
            shown.append(tap)
    return tuple(shown), refused
