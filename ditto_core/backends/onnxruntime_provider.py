"""Where ONNX Runtime runs an engine: on one of its execution providers, or on that of a plugin package."""

from __future__ import annotations

from typing import Any

from ditto_core.backends.registry import import_package
from ditto_core.errors import BackendError, BuildError, UsageError, first_line, nearest
from ditto_core.spec import EngineSpec

CPU = "CPUExecutionProvider"
SUFFIX = "ExecutionProvider"
NESTED = ("provider_options", "session")
"""Options that are tables."""


def check_provider(library: Any, spec: EngineSpec) -> None:
    """Raise :class:`BackendError` when the provider is not here, :class:`UsageError` for a wrong option."""
    for name in NESTED:
        spec.table(name)
    if plugin := spec.option("plugin"):
        plugin_package(plugin)
    elif (name := provider_name(library, spec)) not in library.get_available_providers():
        here = ", ".join(library.get_available_providers())
        raise BackendError(f"onnxruntime {library.__version__} has no {name} on this machine, available: {here}")


def provider_name(library: Any, spec: EngineSpec) -> str:
    """Return ONNX Runtime's name of a spec's provider: ``cuda`` is ``CUDAExecutionProvider``.

    Raises :class:`UsageError` for a name that this version does not know.
    """
    given = str(spec.option("provider", CPU))
    known: dict[str, str] = {name.removesuffix(SUFFIX).lower(): name for name in library.get_all_providers()}
    short = given.removesuffix(SUFFIX).lower()
    if short not in known:
        raise UsageError(f"unknown provider {given!r}, expected one of {', '.join(known)}{nearest(short, known)}")
    return known[short]


def on_cpu(spec: EngineSpec) -> bool:
    """Tell whether a spec leaves its engine on the CPU provider."""
    given = str(spec.option("provider", CPU)).removesuffix(SUFFIX)
    return not spec.option("plugin") and given.lower() == "cpu"


def plugin_package(name: str) -> Any:
    """Import the package of a plugin provider.

    Raises :class:`BackendError` when it is not installed, :class:`RunError` when it is and does not load,
    :class:`UsageError` when it is none.
    """
    package = import_package(name, "install the plugin of onnxruntime, or give the name of one that is installed")
    if not hasattr(package, "get_library_path") or not hasattr(package, "get_ep_name"):
        raise UsageError(f"{name} is no plugin of onnxruntime: it has no get_library_path() and get_ep_name()")
    return package


def open_session(library: Any, path: str, spec: EngineSpec, options: Any) -> tuple[Any, dict[str, str]]:
    """Load an ONNX file; return the session, and what it runs on: provider, version.

    Raises :class:`BuildError` when the engine is refused, or when ONNX Runtime would run it elsewhere: it replaces a
    provider that does not load by the CPU's.
    """
    for key, value in spec.table("session").items():
        options.add_session_config_entry(key, value)
    wanted = spec.table("provider_options")
    plugin = spec.option("plugin")
    name = plugin_package(plugin).get_ep_name() if plugin else provider_name(library, spec)
    try:
        if plugin:
            options.add_provider_for_devices(plugin_devices(library, plugin), wanted)
            session = library.InferenceSession(path, options)
        else:
            session = library.InferenceSession(path, options, providers=[(name, wanted)])
    except Exception as error:
        raise BuildError(f"onnxruntime refuses the engine: {first_line(error)}") from error
    if (used := session.get_providers()[0]) != name:
        raise BuildError(f"onnxruntime runs the engine on {used}, {name} could not be loaded")
    return session, {"provider": name, **provider_version(library, name)}


def plugin_devices(library: Any, plugin: str) -> list[Any]:
    """Return the first device of a plugin's provider, with the plugin registered once a process."""
    package = plugin_package(plugin)
    name = package.get_ep_name()
    found = [device for device in library.get_ep_devices() if device.ep_name == name]
    if not found:
        library.register_execution_provider_library(name, package.get_library_path())
        found = [device for device in library.get_ep_devices() if device.ep_name == name]
    if not found:
        raise BuildError(f"{name} of {plugin} finds no device on this machine")
    return found[:1]


def provider_version(library: Any, name: str) -> dict[str, str]:
    """Return the version and the device of a provider, as far as ONNX Runtime tells them."""
    devices: list[Any] = getattr(library, "get_ep_devices", list)()  # from 1.23 on
    for device in devices:
        if device.ep_name == name:
            kind = str(device.device.type).rpartition(".")[2]
            return {"provider version": dict(device.ep_metadata).get("version", "unknown"), "provider device": kind}
    return {}
