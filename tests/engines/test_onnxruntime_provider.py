"""ONNX Runtime's execution providers and session entries as options. Providers of other hardware are refused here."""

import signal
from contextlib import nullcontext

import pytest
from models import conv_net

from ditto_core.backends import onnxruntime_crash
from ditto_core.backends.onnxruntime import OnnxRuntimeBackend
from ditto_core.errors import BackendError, BuildError, UsageError
from ditto_core.spec import EngineSpec
from ditto_core.system.isolate import cause_of

onnxruntime = pytest.importorskip("onnxruntime")


ABSENT = next(n for n in onnxruntime.get_all_providers() if n not in onnxruntime.get_available_providers())


def spec(**options):
    return EngineSpec.of(conv_net, outputs=(), options=options)


def test_the_report_names_provider_version_and_device(workspace):
    session = workspace.build(spec(provider="cpu")).open()
    facts = session.info.facts
    assert facts["provider"] == "CPUExecutionProvider"
    assert facts["provider version"] == onnxruntime.__version__
    assert facts["provider device"] == "CPU"
    session.close()


def test_session_entries_reach_onnxruntime(tmp_path, workspace):
    options = {"session": '{"session.save_model_format": "ORT"}'}
    session = workspace.build(spec(**options)).open()
    entry = session._session.get_session_options().get_session_config_entry("session.save_model_format")
    assert entry == "ORT"
    session.close()


@pytest.mark.filterwarnings("ignore:Specified provider:UserWarning")
def test_an_engine_that_would_run_on_another_provider_is_refused(workspace):
    """ONNX Runtime itself takes the CPU where a provider is not there."""
    built = workspace.build(spec())
    with pytest.raises(BuildError, match="on CPUExecutionProvider") as caught:
        OnnxRuntimeBackend().open(spec(provider=ABSENT), built.directory, ())
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"provider": ABSENT}, BackendError, ABSENT),
        ({"provider": "cud"}, UsageError, "'cuda'"),
        ({"provider_options": "no table"}, UsageError, "provider_options"),
        ({"session": ["a"]}, UsageError, "session"),
        ({"plugin": "no_such_package"}, BackendError, "no_such_package"),
        ({"plugin": "json"}, UsageError, "get_library_path"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options, error, text):
    with pytest.raises(error, match=text) as caught:
        OnnxRuntimeBackend().check(spec(**options))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(("code", "crashes"), [(-signal.SIGSEGV, True), (-signal.SIGKILL, False), (1, False)])
def test_only_a_crash_of_the_trial_refuses_an_engine(monkeypatch, tmp_path, code, crashes):
    """The trial loads the model once more: the memory that it may lack is no fault of the graph."""

    def ended(*args):
        raise BuildError(f"load in a child process: {cause_of(code)}")

    monkeypatch.setattr(onnxruntime_crash, "run_isolated", ended)
    with pytest.raises(BuildError, match="crashes while") if crashes else nullcontext():
        onnxruntime_crash.refuse_crashing(tmp_path / "model.onnx", "float16", "all")
