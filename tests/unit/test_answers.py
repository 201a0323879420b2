"""Samples of lm-evaluation-harness: which answers an engine lost, and on what text the two sides differ."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ditto_core.errors import UsageError
from ditto_core.pair.answers import Explained, Lost, explain, lost_answers, read_samples, tally
from tests.comparisons import faulty, passing


def choice(id, likelihoods, acc, context="Two and two is"):
    """Return a multiple-choice question as lm_eval writes it: one request a continuation, numbers as texts."""
    texts = [" four", " five"]
    return {
        "doc_id": id,
        "doc": {"question": context},
        "target": "0",
        "arguments": {f"gen_args_{i}": {"arg_0": context, "arg_1": text} for i, text in enumerate(texts)},
        "resps": [[[str(number), "False"]] for number in likelihoods],
        "filtered_resps": [[str(number), "False"] for number in likelihoods],
        "filter": "none",
        "metrics": ["acc"],
        "acc": acc,
    }


def generated(id, text, strict, flexible=None):
    """Return the lines of a generated answer, one a filter."""
    base = {
        "doc_id": id,
        "target": "4",
        "arguments": {"gen_args_0": {"arg_0": "Q: 2+2?\nA:", "arg_1": {"until": ["\n"]}}},
        "resps": [[text]],
        "metrics": ["exact_match"],
    }
    flexible = strict if flexible is None else flexible
    return [base | {"filter": n, "exact_match": v} for n, v in (("strict", strict), ("flexible", flexible))]


def samples(tmp_path, name, *lines):
    path = tmp_path / f"samples_{name}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_samples(path)


def test_a_lost_choice_is_replayed_with_the_continuation_that_the_reference_takes(tmp_path):
    engine = samples(
        tmp_path, "engine", choice(0, [-9.0, -2.0], 0.0), choice(1, [-1.0, -2.0], 1.0), choice(2, [-3, -1], 0)
    )
    reference = samples(
        tmp_path, "reference", choice(0, [-2.5, -10.0], 1.0), choice(1, [-1, -2], 1.0), choice(2, [-3, -1], 0)
    )
    assert lost_answers(engine, reference) == [Lost("0", "Two and two is four")]
    assert lost_answers(reference, engine) == []


def test_a_lost_generation_is_replayed_up_to_where_the_texts_part(tmp_path):
    engine = samples(tmp_path, "engine", *generated(7, " It is 5.", 0.0, 1.0))
    reference = samples(tmp_path, "reference", *generated(7, " It is 4.", 1.0))
    assert lost_answers(engine, reference) == [Lost("7", "Q: 2+2?\nA: It is ")]
    assert lost_answers(engine, reference, filter="flexible") == []
    with pytest.raises(UsageError, match="'strict'"):
        lost_answers(engine, reference, filter="strct")


def test_both_sides_are_read_by_one_filter_whatever_the_order_of_the_lines(tmp_path):
    engine = samples(tmp_path, "engine", *generated(7, " It is 5.", 0.0, 1.0))
    reference = samples(tmp_path, "reference", *generated(7, " It is 5.", 0.0, 1.0)[::-1])
    assert lost_answers(engine, reference) == lost_answers(reference, engine) == []
    assert lost_answers(engine[::-1], reference[1:]) == []  # by strict, the one that both have
    with pytest.raises(UsageError, match="no filter in common: the engine's are strict, the reference's flexible"):
        lost_answers(engine[:1], reference[:1])
    with pytest.raises(UsageError, match="'flexible' is no filter of both sides' samples, expected strict"):
        lost_answers(engine, reference[1:], filter="flexible")


def test_a_question_that_a_side_answers_twice_is_refused(tmp_path):
    once = samples(tmp_path, "once", choice(1, [-1, -2], 1))
    twice = samples(tmp_path, "twice", choice(1, [-2, -1], 0), choice(1, [-1, -2], 1))
    with pytest.raises(UsageError, match="question 1 is 2 times in the engine's samples, expected once"):
        lost_answers(twice, once)
    with pytest.raises(UsageError, match="question 1 is 2 times in the reference's samples, expected once"):
        lost_answers(once, twice)


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    one = samples(tmp_path, "a", choice(0, [-1, -2], 1), choice(1, [-1, -2], 1))
    with pytest.raises(UsageError, match="question 1 is in the engine"):
        lost_answers(one, one[:1])
    other = samples(tmp_path, "b", choice(0, [-1, -2], 1, "Three is"), choice(1, [-1, -2], 1))
    with pytest.raises(UsageError, match="question 0 was asked otherwise"):
        lost_answers(one, other)
    with pytest.raises(UsageError, match="'acc'"):
        lost_answers(one, one, metric="acc_norm")


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"doc_id": 0, "arguments": {"x": 1}, "resps": []}', "[" * 100000, '{"doc_id": 0}']
)
def test_a_line_that_is_no_sample_is_named(tmp_path, line):
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps(choice(0, [-1, -2], 1)) + "\n" + line + "\n")
    with pytest.raises(UsageError, match="line 2"):
        read_samples(path)


def test_a_line_ends_at_a_line_feed_alone_and_a_byte_order_mark_is_no_part_of_it(tmp_path):
    line = json.dumps(choice(0, [-1, -2], 1, "two\u2028lines\u0085"), ensure_ascii=False)  # as the harness writes it
    (tmp_path / "samples.jsonl").write_bytes(b"\xef\xbb\xbf" + f"{line}\r\n".encode())
    assert [sample.id for sample in read_samples(tmp_path / "samples.jsonl")] == ["0"]


def test_an_empty_file_and_a_chat_are_refused(tmp_path):
    (tmp_path / "empty").write_text("\n")
    for path in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(UsageError):
            read_samples(path)
    chat = {"arguments": [[[{"role": "user", "content": "hi"}]]], "doc_id": 3, "resps": [["x"]]}
    ours, theirs = (samples(tmp_path, name, chat | {"acc": acc}) for name, acc in (("e", 0), ("r", 1)))
    with pytest.raises(UsageError, match="question 3"):
        lost_answers(ours, theirs)


def test_a_site_is_counted_for_each_answer_that_it_explains():
    found = explain(
        [Lost("1", "a"), Lost("2", "b"), Lost("3", "c")], lambda text: passing() if text == "c" else faulty()
    )
    bad = faulty().first_bad
    assert [each.site for each in found] == [bad.site, bad.site, ""]
    first, second = tally(found)
    assert first == f"2 of 3 lost answers: {bad.site}"
    assert second.startswith("1 of 3 lost answers: engine within its bounds")


def test_an_answer_whose_replay_could_not_be_compared_is_not_said_to_be_within_bounds():
    lacking = replace(passing(), missing={"lm_head": "the engine did not deliver it"}, logits=())
    [found] = explain([Lost("1", "a")], lambda text: lacking)
    assert (found.site, found.compared) == ("", False)
    [line] = tally([found])
    assert line.startswith("1 of 1 lost answers: not compared: 1 of ")
    assert line.endswith("lm_head: the engine did not deliver it")


def test_what_adds_the_error_goes_before_what_diverges_first():
    from ditto_core.compare.blame import Blame, Cause, Localization

    blame = Blame("a.b", "a", "Linear", "", 0, (0,), 1.0, 0.1, 0.2)
    cause = Cause("constant factor", "a.b", 0.9, ("output = 2 x expected",), "")
    localization = Localization("float32", 4.0, (), (blame,), (cause,))
    run = replace(faulty(), localization=localization)
    [found] = explain([Lost("1", "a")], lambda text: run)
    assert (found.site, found.cause) == ("a.b", "constant factor")
    assert [*tally([found, Explained("2", "a.b", "", "")])] == ["2 of 2 lost answers: a.b (constant factor)"]
