import json

import pytest

from ditto_core import EngineSpec, ModelSource, ShapeProfile
from ditto_core.engines.engine import spec_from_json
from ditto_core.errors import UsageError
from ditto_core.profile import Range


def test_dtype_aliases_are_one_spec():
    assert EngineSpec.of("m", dtype="fp16") == EngineSpec.of("m", dtype="float16") == EngineSpec.of("m", dtype="half")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "flaot16"}, "unknown dtype 'flaot16', expected one of .* did you mean 'float16'"),
        ({"bakend": "x"}, r"unknown engine argument 'bakend'; did you mean 'backend'\?"),
        ({"attention": "eagre"}, r"unknown attention 'eagre'.*did you mean 'eager'"),
        ({"profile": {"lenght": (1, 2, 3)}}, r"unknown profile dimension 'lenght'.*did you mean 'length'"),
        ({"profile": {"length": (4, 2, 3)}}, "needs 0 <= min <= opt <= max, got 4, 2, 3"),
        ({"profile": 5}, r"profile is 5, expected a table such as \{'batch': \(1, 2, 4\)\}"),
        ({"profile": {"length": 5}}, "profile of length is 5, expected three sizes: min, opt, max"),
        ({"profile": {"length": (1, "2", 3)}}, r"profile of length is \(1, '2', 3\), expected three sizes"),
        ({"outputs": 5}, r"outputs is 5, expected a selector such as 'model.layers.\*', several, or a table"),
        ({"aliases": 3}, r"aliases is 3, expected pairs \(raw name, alias\)"),
        ({"opset": "x"}, "opset is 'x', expected a number such as 20"),
        ({"engine": "a.onnx", "backend": "openvino"}, r"'a\.onnx' is run by onnx-file, .* not 'openvino'"),
        ({"engine": "a.onnx", "options": {"file": "b.onnx"}}, r"engine is 'a\.onnx' and options' file 'b\.onnx'"),
    ],
)
def test_bad_fields_are_named_with_the_nearest_choice(fields, message):
    with pytest.raises(UsageError, match=message):
        EngineSpec.of("m", **fields)


@pytest.mark.parametrize("backend", [None, "ort", "onnxruntime", "onnx-file"])
def test_an_engine_file_beside_the_default_backend_or_its_own_is_no_contradiction(backend):
    spec = EngineSpec.of("m", engine="a.onnx", backend=backend, options={"file": "a.onnx", "level": "basic"})
    assert (spec.backend, spec.option("file"), spec.option("level")) == ("onnx-file", "a.onnx", "basic")


def test_an_empty_model_is_an_error():
    with pytest.raises(UsageError, match="the model is an empty string"):
        EngineSpec.of("")


def test_outputs_take_a_string_a_list_or_aliases():
    assert EngineSpec.of("m", outputs="**").outputs == ("**",)
    assert EngineSpec.of("m", outputs=["a", "b"]).outputs == ("a", "b")
    spec = EngineSpec.of("m", outputs={"fx:mm": "inter"}, aliases=())
    assert (spec.outputs, spec.aliases) == (("fx:mm",), (("fx:mm", "inter"),))


def test_the_plain_engine_has_no_taps_but_is_otherwise_the_same():
    spec = EngineSpec.of("m", outputs={"fx:mm": "inter"}, dtype="fp16")
    assert spec.untapped() == EngineSpec.of("m", outputs=(), dtype="fp16")


def test_a_spec_survives_json():
    spec = EngineSpec.of("m", outputs=["a", "b"], dtype="bf16", profile={"past": (0, 1, 9)}, options={"threads": 2})
    assert spec_from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_no_file_says_that_a_models_own_code_is_trusted():
    spec = EngineSpec.of(ModelSource("org/name", revision="v1", trust_remote_code=True))
    assert spec_from_json(spec.to_json()).model == ModelSource("org/name", revision="v1")
    assert spec_from_json({**spec.to_json(), "trust_remote_code": True}).model.trust_remote_code is False


def test_a_step_outside_the_profile_is_told_with_the_remedy():
    profile = ShapeProfile(length=Range(1, 4, 8))
    profile.check(1, 8, 0)
    with pytest.raises(UsageError, match=r"length 9, outside the engine's profile 1\.\.8; build with .*\(1, 4, 9\)"):
        profile.check(1, 9, 0)


def test_a_model_that_is_there_is_the_same_files_in_every_working_directory(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    source = ModelSource.of("m")
    assert source == ModelSource("./m/") == ModelSource(str(tmp_path / "m"))
    assert source.label == ModelSource.of("a/m").label == "m"
    assert EngineSpec.of("org/name").model.location == "org/name"


@pytest.mark.parametrize("name", ["~no-such-user/m", "a" * 5000, "a\0b"])
def test_a_name_that_no_path_can_have_is_no_error_before_it_is_looked_up(name):
    assert ModelSource.of(name).location == name


def test_a_factory_is_labelled_by_its_name():
    def my_net():
        return None

    assert ModelSource.of(my_net).label == "my_net"
    assert ModelSource.of("a/b/SmolLM2").label == "SmolLM2"
