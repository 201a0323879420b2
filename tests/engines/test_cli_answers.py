"""`ditto answers` on a real engine with a wrong weight: the site of the weight explains the lost answer."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from ditto_core.backends.onnxruntime import ENGINE_FILE
from ditto_core.cli import application
from ditto_core.engines.copied import DIGESTS_FILE
from ditto_core.model.loading import tiny_decoder
from ditto_core.spec import EngineSpec
from tests.faults import scale_weight

WORDS = ("two", "and", "is", "four", "five", "?")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny Llama on disk, with a tokenizer of six words."""
    folder = tmp_path_factory.mktemp("model")
    tiny_decoder("llama").save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    return folder


def samples(path, acc, likelihoods):
    lines = []
    for id, right in enumerate(acc):
        arguments = {f"gen_args_{i}": {"arg_0": "two and two is", "arg_1": w} for i, w in enumerate((" four", " five"))}
        resps = [[[str(number), "False"]] for number in likelihoods]
        lines.append(json.dumps({"doc_id": id, "arguments": arguments, "resps": resps, "filter": "none", "acc": right}))
    path.write_text("\n".join(lines))
    return path


def answers(*words):
    done = CliRunner().invoke(application(), ["answers", *map(str, words)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout


def test_the_wrong_weight_of_an_engine_explains_its_lost_answer(checkpoint, workspace, tmp_path, shared_cache_dir):
    reference = samples(tmp_path / "reference.jsonl", [1.0, 1.0], [-1.0, -2.0])
    engine = samples(tmp_path / "engine.jsonl", [0.0, 1.0], [-2.0, -1.0])
    folder = workspace.build(EngineSpec.of(str(checkpoint), outputs=("**",))).copy_to(tmp_path / "engine").directory
    cache = ("--cache-dir", shared_cache_dir, "--json", tmp_path / "found.json")
    code, text = answers(folder, engine, reference, *cache)
    assert (code, text.splitlines()[0]) == (0, "1 answers lost")
    assert "engine within its bounds" in text.splitlines()[1]
    scale_weight(folder / ENGINE_FILE, "model.layers.1.mlp.down_proj", 1.5)
    (folder / DIGESTS_FILE).unlink()  # else it is damaged
    code, text = answers(folder, engine, reference, *cache)
    assert code == 1
    assert text.splitlines()[1] == "1 of 1 lost answers: model.layers.1.mlp.down_proj (weight scaled)"
    [found] = json.loads((tmp_path / "found.json").read_text())
    assert (found["id"], found["site"]) == ("0", "model.layers.1.mlp.down_proj")
    assert answers(folder, reference, engine, *cache) == (0, "0 answers lost\n")
    assert json.loads((tmp_path / "found.json").read_text()) == []  # no longer the answer that another run lost
