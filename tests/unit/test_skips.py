"""Only what is missing skips a test: a package, a device, a dtype. What is there and fails is an error."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from ditto_core.backends.vllm import serving
from ditto_core.errors import BackendError, RunError
from ditto_core.spec import EngineSpec
from pytest_ditto.bench import unavailable


class StandInForVllm(ModuleType):
    """Does not start."""

    def LLM(self, model, **settings):
        raise RuntimeError("Engine core initialization failed")


@pytest.mark.parametrize(
    ("package", "spec", "how"),
    [
        ("onnxruntime", EngineSpec.of("m"), "pip install"),
        ("openvino", EngineSpec.of("m", backend="openvino"), "pip install"),
        ("its_plugin", EngineSpec.of("m", options={"plugin": "its_plugin"}), "install the plugin of onnxruntime"),
    ],
)
@pytest.mark.parametrize("broken", [False, True])
def test_a_package_that_is_not_installed_skips_and_one_that_does_not_load_fails(
    package, spec, how, broken, tmp_path, monkeypatch
):
    monkeypatch.delitem(sys.modules, package, raising=False)
    if not broken:
        monkeypatch.setitem(sys.modules, package, None)
        assert unavailable(spec).startswith(f"{package} is not installed: {how}")
        return
    (tmp_path / f"{package}.py").write_text("import no_such_part")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RunError, match=rf"^{package} is installed but does not load \(.*no_such_part"):
        unavailable(spec)


@pytest.mark.parametrize(
    ("device", "kind", "said"),
    [
        ("", BackendError, "vLLM finds no device"),
        ("cpu", RunError, "vLLM does not serve tiny: Engine core"),
    ],
)
def test_vllm_without_a_device_skips_and_a_start_that_fails_is_an_error(device, kind, said, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", StandInForVllm("vllm"))
    platforms = SimpleNamespace(current_platform=SimpleNamespace(device_type=device))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.json").write_text("{}")
    spec = EngineSpec.of(str(tmp_path / "tiny"), backend="vllm")
    with pytest.raises(kind, match=said) as caught:
        serving.start(spec, spec.model.location, tapped=True)
    assert type(caught.value) is kind
