"""A revision of a Hub id holds for everything that is read of it: weights, tokenizer and configurations."""

import pytest
from huggingface_hub import constants
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, T5Config

from ditto_core.errors import ModelError
from ditto_core.model.checkpoint import locate
from ditto_core.spec import ModelSource
from ditto_core.stepping.solo import source_batch, tokenizer_for

NAME, IDS = "org/name", {"main": 1, "v1": 2}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Return the Hub's cache with a model whose revisions have other words and other first tokens."""
    repository = tmp_path / "hub" / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    for revision, number in IDS.items():
        commit = str(number) * 40
        (repository / "refs" / revision).write_text(commit)
        snapshot = repository / "snapshots" / commit
        words = Tokenizer(models.WordLevel({"<unk>": 0, "hello": number, "world": 3 - number}, "<unk>"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(snapshot)
        T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(snapshot)
        GenerationConfig(decoder_start_token_id=number).save_pretrained(snapshot)
        (snapshot / "model.safetensors").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return repository / "snapshots"


@pytest.mark.parametrize(("revision", "number"), [("", 1), ("v1", 2)])
def test_an_engine_generates_with_the_tokenizer_and_the_settings_of_its_revision(hub, revision, number):
    source = ModelSource(NAME, revision=revision)
    tokenizer = tokenizer_for(["hello"], source)
    batch = source_batch(source, ["hello"], tokenizer, None, 1)
    assert batch.encoded["input_ids"].tolist() == [[number]]
    assert batch.start.tolist() == [[number]]
    assert locate(source) == hub / (str(number) * 40)


@pytest.mark.parametrize("damage", ["", "{"])
def test_settings_of_generation_that_cannot_be_read_are_not_passed_over(hub, damage):
    source = ModelSource(NAME)
    (hub / (str(IDS["main"]) * 40) / "generation_config.json").write_text(damage)
    with pytest.raises(ModelError, match=r"generation_config\.json of .*name cannot be read"):
        source_batch(source, ["hello"], tokenizer_for(["hello"], source), None, 1)


def test_a_folder_of_the_hub_ids_name_is_no_revision_of_it(hub, tmp_path, monkeypatch):
    folder = tmp_path / "work" / NAME
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(ModelError, match=r"name' lies on this disk and has no revision 'v1': leave the revision out"):
        locate(ModelSource(NAME, revision="v1"))
    assert locate(ModelSource(NAME)) == folder
