"""OpenVINO's IR that is there already as the engine."""

import pytest
from models import conv_net, many_ids

from ditto_core.errors import BuildError, UsageError
from ditto_core.pair.pair import Pair
from ditto_core.spec import EngineSpec

openvino = pytest.importorskip("openvino")


def ir_of(workspace, model, path, *, half=False):
    exported = workspace.graph(EngineSpec.of(model, backend="openvino"))
    openvino.save_model(openvino.convert_model(exported.onnx_path), path, compress_to_fp16=half)
    return path


def test_a_decoder_decodes_and_shows_its_logits(tmp_path, workspace):
    spec = EngineSpec.of(many_ids, engine=ir_of(workspace, many_ids, tmp_path / "llama.xml"))
    pair = Pair(workspace, spec)
    found = pair.generate([[3, 1, 4, 1, 5], [2, 7]], max_new_tokens=3)
    assert found, found
    assert (found.steps, [tap.site for tap in pair.engine.taps]) == (3, ["lm_head"])
    assert pair.engine.refused["model.norm"] == "an IR shows its outputs only"
    pair.close()


def test_weights_that_were_rounded_to_float16_diverge(tmp_path, workspace):
    """What OpenVINO's tools do unless told otherwise."""
    pair = Pair(workspace, EngineSpec.of(conv_net, engine=ir_of(workspace, conv_net, tmp_path / "cnn.xml", half=True)))
    found = pair.run()
    assert not found
    assert found.first_bad.site == "5"
    assert 1e-5 < found.first_bad.metrics.rel_l2 < 1e-2
    pair.close()


def test_what_is_not_the_models_file_is_refused_in_one_line(tmp_path, workspace):
    file = ir_of(workspace, conv_net, tmp_path / "cnn.xml")
    cases = [
        (conv_net, {"engine": tmp_path / "none.xml"}, UsageError, "does not exist"),
        (conv_net, {"engine": file, "options": {"thread": 2}}, UsageError, "'threads'"),
        (conv_net, {"engine": file, "dtype": "float16"}, UsageError, "give dtype='float32'"),
        (many_ids, {"engine": file}, BuildError, "no input 'input_ids'"),
    ]
    for model, fields, error, text in cases:
        with pytest.raises(error, match=text) as caught:
            workspace.build(EngineSpec.of(model, **fields))
        assert len(str(caught.value).splitlines()) == 1
