"""A `.pte` file that is there already as the engine: our own, and transformers' with a static cache."""

import pytest
import torch
from models import conv_net, many_ids

from ditto_core.errors import BuildError, UsageError
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.spec import EngineSpec

pytest.importorskip("executorch")

PROFILE = {"batch": (1, 2, 4), "length": (1, 5, 16), "past": (0, 8, 32)}


def file_of(workspace, model):
    spec = EngineSpec.of(model, backend="executorch", outputs=(), profile=PROFILE)
    return workspace.build(spec).directory / "model.pte"


def pair(workspace, model, file, **fields):
    return Pair(workspace, EngineSpec.of(model, engine=file, profile=PROFILE, **fields), PairOptions())


def test_a_model_without_a_cache_runs_from_a_child_process_and_shows_its_output(workspace):
    tested = pair(workspace, conv_net, file_of(workspace, conv_net))
    found = tested.run()
    assert found, found
    assert tested.engine.taps[0].site == "5"
    assert tested.engine.refused["0"] == "a .pte file shows its outputs only"
    assert tested.sessions.engine.info.facts["isolation"] == "process"
    tested.close()


def other_weights():
    module, examples = conv_net()
    with torch.no_grad():
        module[0].weight.mul_(1.05)
    return module, examples


def test_a_file_of_other_weights_diverges(workspace):
    tested = pair(workspace, conv_net, file_of(workspace, other_weights))
    found = tested.run()
    assert not found
    assert found.first_bad.site == "5"
    tested.close()


def test_a_decoder_that_takes_and_returns_its_cache_decodes(workspace):
    tested = pair(workspace, many_ids, file_of(workspace, many_ids))
    found = tested.generate([[3, 1, 4, 1, 5], [2, 7]], max_new_tokens=3)
    assert found, found
    assert found.steps == 3
    tested.close()


def static_cache(path):
    """Write the tiny Llama as transformers exports decoders for ExecuTorch: the program keeps its cache."""
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
    from transformers import GenerationConfig
    from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

    model = many_ids()
    model.set_attn_implementation("sdpa")
    model.generation_config = GenerationConfig(
        use_cache=True,
        cache_implementation="static",
        cache_config={"batch_size": 1, "max_cache_len": 32, "device": "cpu"},
    )
    length = torch.export.Dim("length", min=1, max=16)
    with torch.no_grad():
        exported = TorchExportableModuleForDecoderOnlyLM(model, batch_size=1, max_cache_len=32).export(
            input_ids=torch.ones(1, 3, dtype=torch.long),
            cache_position=torch.arange(3),
            dynamic_shapes={"input_ids": {1: length}, "cache_position": {0: length}},
            strict=True,
        )
        config = EdgeCompileConfig(_check_ir_validity=False)
        path.write_bytes(to_edge_transform_and_lower(exported, compile_config=config).to_executorch().buffer)
    return path


def test_a_decoder_that_keeps_its_cache_by_itself_decodes_and_starts_anew(tmp_path, workspace):
    tested = pair(workspace, many_ids, static_cache(tmp_path / "llama.pte"))
    for _ in range(2):
        found = tested.generate([3, 1, 4, 1, 5], max_new_tokens=3)
        assert found, found
        assert found.steps == 3
    tested.close()


def test_what_is_not_the_models_file_is_refused_in_one_line(tmp_path, workspace):
    file = file_of(workspace, conv_net)
    (tmp_path / "no.pte").write_bytes(b"not a program" * 100)
    cases = [
        ({"engine": tmp_path / "none.pte"}, UsageError, "does not exist"),
        ({"engine": file, "options": {"thread": 2}}, UsageError, "'threads'"),
        ({"engine": file, "dtype": "float16"}, UsageError, "give dtype='float32'"),
        ({"engine": tmp_path / "no.pte"}, BuildError, "refuses the file"),
    ]
    for fields, error, text in cases:
        with pytest.raises(error, match=text) as caught:
            workspace.build(EngineSpec.of(conv_net, **fields))
        assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(BuildError, match="takes 1 inputs"):
        workspace.build(EngineSpec.of(many_ids, engine=file, profile=PROFILE))
