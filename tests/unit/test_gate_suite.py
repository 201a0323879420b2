import json

import pytest

from ditto_core import gates
from ditto_core.errors import UsageError
from ditto_core.gates.shards import Shard
from ditto_core.gates.suite import Sample, Suite, load_suite, multiple_choice
from tests.gate_suites import tiny_suite, write_suite


def test_a_file_gives_back_the_samples_that_were_written(tmp_path):
    suite = tiny_suite()
    read = load_suite(write_suite(tmp_path / "tiny.jsonl", suite))
    assert read.samples == suite.samples
    assert read.digest == suite.digest
    assert {sample.kind for sample in read.samples} == {"text", "choice", "match", "prompt"}


def test_a_changed_sample_changes_the_digest(tmp_path):
    path = write_suite(tmp_path / "tiny.jsonl")
    before = load_suite(path).digest
    path.write_text(path.read_text().replace('"answer": 1', '"answer": 0', 1))
    assert load_suite(path).digest != before


def test_the_ids_that_a_tokenizer_makes_of_texts_are_a_digest_of_their_own():
    def letters(text):
        return {"input_ids": [*map(ord, text)]}

    def grams(text):
        return letters(text.replace("b ", "é"))

    words = Suite("w", (Sample("0", prompt="ab", choices=(" c", " d"), answer=0), Sample("1", text=(1, 2))))
    assert words.samples[0].texts == ["ab", "ab c", "ab d"]
    assert words.tokens(letters) == words.tokens(letters) != words.tokens(grams)
    assert words.tokens(None) == tiny_suite().tokens(letters) == ""


def test_the_classics_are_short_passages_with_author_and_work():
    suite = load_suite("classics")
    assert 30 <= len(suite.samples) <= 60
    assert all(20 <= len(sample.text.split()) <= 90 for sample in suite.samples)
    assert "melville-moby" in suite.ids


def test_questions_about_the_classics_have_the_passage_s_own_next_words_as_answer():
    texts = {sample.id: sample.text for sample in load_suite("classics").samples}
    questions = load_suite("classics-choice").samples
    assert len(questions) >= 150
    for question in questions:
        assert len(set(question.choices)) == 4
        text = " ".join(texts[question.id.partition("/")[0]].split())
        assert text.startswith(question.prompt + question.choices[question.answer])
        wrong = [c for i, c in enumerate(question.choices) if i != question.answer]
        assert not any(text.startswith(question.prompt + choice) for choice in wrong)


def test_answers_of_the_questions_are_spread_over_the_four_places():
    answers = [question.answer for question in load_suite("classics-choice").samples]
    assert min(answers.count(i) for i in range(4)) > len(answers) / 8


def test_questions_about_one_passage_are_one_cluster(tmp_path):
    suite = load_suite("classics-choice")
    assert suite.clusters == 57
    assert all(sample.id.startswith(f"{sample.cluster}/") for sample in suite.samples)
    assert load_suite(write_suite(tmp_path / "s.jsonl", suite)).samples == suite.samples
    assert tiny_suite(3, 0, 0).clusters == 3


def test_shards_hold_every_sample_once():
    samples = tiny_suite().samples
    shares = [Shard(i, 3).of(samples) for i in (1, 2, 3)]
    assert sorted(s.id for share in shares for s in share) == sorted(s.id for s in samples)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "1/0"])
def test_a_shard_that_does_not_exist_is_refused(text):
    with pytest.raises(UsageError):
        Shard.parse(text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "bad.jsonl, line 2: expected JSON"),
        ("[]", "expected a JSON object"),
        ('{"txt": "a"}', "got 'txt'; did you mean 'text'?"),
        ("{}", "expected either 'text' or 'prompt'"),
        ('{"text": "a", "prompt": "b"}', "expected either 'text' or 'prompt'"),
        ('{"text": "a", "answer": "b"}', "expected neither 'choices' nor 'answer'"),
        ('{"prompt": "a", "choices": ["b", "c"], "answer": 2}', "an index into the 2 choices, got 2"),
        ('{"prompt": "a", "choices": ["b"], "answer": 0}', "at least two choices"),
        ('{"prompt": "a", "choices": ["b", "c", "b"], "answer": 2}', "one choice that is the answer, got 'b' twice"),
        ('{"prompt": "a", "choices": [[1], [1]], "answer": 0}', "one choice that is the answer, got (1,) twice"),
        ('{"prompt": "a", "answer": 3}', "expected 'answer' to be a text"),
        ('{"prompt": "a", "answer": " "}', "expected 'answer' to be a text"),
    ],
)
def test_a_bad_line_is_named_with_what_was_expected(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(UsageError) as error:
        load_suite(path)
    assert message in str(error.value)
    assert "line 2" in str(error.value)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_line_ends_at_a_line_feed_alone_and_a_byte_order_mark_is_no_part_of_it(tmp_path, mark, end):
    texts = ["a\u2028b", "a\u0085b\u2029", "café"]
    path = tmp_path / "s.jsonl"
    path.write_bytes(mark + "".join(json.dumps({"text": text}, ensure_ascii=False) + end for text in texts).encode())
    assert [sample.text for sample in load_suite(path).samples] == texts


def test_wrong_choices_may_be_alike():
    assert Sample.from_json({"prompt": "a", "choices": ["b", "c", "b"], "answer": 1}, "0").answer == 1


def test_an_empty_file_and_a_double_id_are_refused(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_text("\n")
    with pytest.raises(UsageError, match="has no sample"):
        load_suite(path)
    path.write_text(2 * (json.dumps(Sample("a", text="x").to_json()) + "\n"))
    with pytest.raises(UsageError, match="the sample 'a' twice"):
        load_suite(path)


def test_an_unknown_suite_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'classics'"):
        load_suite("clasics")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"text": 5}, "'text' to hold text or a list of token ids, got 5"),
        ({"prompt": [1, "a"]}, "'prompt' to hold text or a list of token ids"),
        ({"prompt": [1.5]}, "'prompt' to hold text or a list of token ids"),
        ({"prompt": [-1, 2]}, "'prompt' to hold text or a list of token ids"),
        ({"prompt": "x", "answer": {"a": 1}}, "'answer' to hold text or a list of token ids"),
        ({"prompt": "x", "cluster": 5}, "'cluster' to be a text, got 5"),
        ({"prompt": "x", "choices": "ab", "answer": 0}, "'choices' to be a list, got 'ab'"),
        ({"prompt": "x", "choices": [1, 2], "answer": 1}, "'choices' to hold text or a list of token ids, got 1"),
        (
            {"prompt": "x", "choices": ["a", "b"], "answer": True},
            "'answer' to be an index into the 2 choices, got True",
        ),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_with_its_line(tmp_path, line, expected):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "good"}\n' + json.dumps(line) + "\n")
    with pytest.raises(UsageError) as error:
        load_suite(path)
    assert str(error.value).startswith(f"bad.jsonl, line 2: expected {expected}")


def test_a_field_that_is_null_is_a_field_that_is_not_there():
    line = {"id": None, "text": None, "prompt": "x", "choices": None, "answer": None}
    assert Sample.from_json(line, "7") == Sample("7", prompt="x")


def test_a_negative_number_of_samples_is_refused():
    with pytest.raises(UsageError, match="the number of samples is -1, expected at least 1, or 0 for all"):
        tiny_suite().first(-1)


def test_a_misspelt_suite_gets_the_nearest_name_even_below_a_folder(tmp_path):
    with pytest.raises(UsageError, match="did you mean 'classics'"):
        load_suite(tmp_path / "clasics")


def test_questions_are_made_of_words_and_of_passages_that_are_long_enough():
    with pytest.raises(UsageError, match="sample 'ids' is no text"):
        multiple_choice(Suite("s", (Sample("ids", text=(1, 2, 3)),)))
    with pytest.raises(UsageError, match="suite s-choice has no sample"):
        multiple_choice(Suite("s", (Sample("short", text="a few words only"),)))


def test_a_file_that_is_no_text_is_one_line(tmp_path):
    path = tmp_path / "suite.jsonl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"suite .*suite\.jsonl cannot be read: .*codec"):
        load_suite(path)


def test_a_module_attribute_that_is_none_is_an_error_of_python():
    with pytest.raises(AttributeError, match=r"'ditto_core\.gates' has no attribute 'Gates'"):
        gates.Gates  # noqa: B018
