"""What counts as a failure, how artifacts are sorted, and that nothing that was judged is judged again."""

import json
import sys
from pathlib import Path

import pytest

from ditto_core.debug.check import CommandCheck, Verdict, parse_command
from ditto_core.debug.iterations import IterationOptions, Iterations, Until
from ditto_core.debug.journal import Journal
from ditto_core.errors import UsageError

GOOD, BAD = Verdict(True, "fine"), Verdict(False, "off")


def python(code, **rules):
    return CommandCheck((sys.executable, "-c", code), **rules)


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("rules", "code", "output", "good"),
    [
        ({}, 0, "", True),
        ({}, 3, "", False),
        ({}, -11, "", False),
        ({"fail_codes": (3,)}, 3, "", False),
        ({"fail_codes": (3,)}, 4, "", True),
        ({"ignore_fail_codes": (3,)}, 3, "", True),
        ({"ignore_fail_codes": (3,)}, 4, "", False),
        ({"fail_regex": ("Mism.tch",)}, 1, "a Mismatch", False),
        ({"fail_regex": ("Mism.tch",)}, 0, "a Mismatch", False),
        ({"fail_regex": ("Mism.tch",)}, 1, "out of memory", True),
        ({"fail_regex": ("x", "NaN")}, 1, "has NaN", False),
        ({"fail_codes": (1,), "fail_regex": ("NaN",)}, 1, "has NaN", False),
        ({"fail_codes": (1,), "fail_regex": ("NaN",)}, 2, "has NaN", True),
        ({"fail_codes": (1,), "fail_regex": ("NaN",)}, 1, "all fine", True),
    ],
)
def test_exit_status_and_output_decide_as_in_polygraphy(rules, code, output, good):
    assert CommandCheck(("true",), **rules).judge(code, output)[0] is good


def test_the_output_of_both_streams_is_searched():
    check = python("import sys; print('one'); print('two', file=sys.stderr)", fail_regex=("two",))
    verdict, output = check.run()
    assert not verdict.good
    assert sorted(output.split()) == ["one", "two"]


def test_a_check_that_runs_too_long_is_killed_and_bad():
    verdict, _ = python("import time; time.sleep(60)", timeout=0.5).run()
    assert not verdict.good
    assert verdict.reason == "still running after 0.5 s, killed"
    assert verdict.seconds < 30


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CommandCheck(("true",), fail_regex=("(",)), r"'\('.* regular expression"),
        (lambda: CommandCheck(("true",), fail_codes=(1,), ignore_fail_codes=(2,)), "exclude each other"),
        (lambda: CommandCheck(()), "got no command"),
        (lambda: CommandCheck(("no-such-program-here",)).run(), "cannot be started"),
        (lambda: parse_command(["echo 'a"]), "cannot be split"),
        (lambda: Until.parse("soon"), "expected good, bad or a number"),
        (lambda: Until.parse("0"), "expected good, bad or a number"),
    ],
)
def test_mistakes_are_errors_and_no_verdicts(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_until_stops_at_the_first_good_or_bad_or_after_a_number():
    assert [Until.parse("bad").reached(n, v) for n, v in ((1, GOOD), (2, BAD))] == [False, True]
    assert [Until.parse("good").reached(n, v) for n, v in ((1, BAD), (2, GOOD))] == [False, True]
    assert [Until.parse("3").reached(n, BAD) for n in (2, 3)] == [False, True]


def test_artifacts_are_sorted_by_verdict_and_numbered_and_never_overwritten():
    options = IterationOptions(artifacts=(Path("log.txt"),), art_dir=Path("art"), check=python("raise SystemExit(7)"))

    def make(verdict):
        Path("log.txt").write_text(str(verdict))
        return verdict

    for _ in range(2):
        with Iterations(options, "search") as iterations:
            iterations.run("a", lambda: make(GOOD))
            iterations.run("b", lambda: make(BAD))
            iterations.run("c", lambda: make({}))
    found = sorted(str(p.relative_to("art")) for p in Path("art").rglob("*.txt"))
    first = ["bad/log_0001.txt", "bad/log_0002_rc7.txt", "good/log_0000.txt"]
    assert found == sorted([*first, *(name.replace(".txt", ".1.txt") for name in first)])
    assert not Path("log.txt").exists()


def test_a_missing_artifact_is_said():
    said = []
    options = IterationOptions(artifacts=(Path("log.txt"),), art_dir=Path("art"))
    with Iterations(options, "search", said.append) as iterations:
        iterations.run("a", lambda: GOOD)
    assert "artifact log.txt was not written in iteration 0" in said


def test_iteration_json_tells_the_check_which_iteration_runs_and_goes_in_the_end():
    code = "import json; d = json.load(open('iteration.json')); raise SystemExit(10 + d['iteration'])"
    with Iterations(IterationOptions(check=python(code)), "search") as iterations:
        codes = [iterations.run(key, dict).returncode for key in "ab"]
    assert codes == [10, 11]
    assert list(Path().iterdir()) == []


def test_an_error_leaves_the_replay_and_the_next_run_repeats_nothing():
    made = []

    def make(key, error=None):
        made.append(key)
        if error:
            raise error
        return BAD

    with pytest.raises(KeyboardInterrupt), Iterations(IterationOptions(), "search") as iterations:
        iterations.run("a", lambda: make("a"))
        iterations.run("b", lambda: make("b", KeyboardInterrupt()))
    assert [p.name for p in Path().iterdir()] == ["ditto_debug_replay.jsonl"]
    with Iterations(IterationOptions(), "search") as iterations:
        assert iterations.run("a", lambda: make("again")) == Verdict(**{**BAD.__dict__, "seconds": 0.0})
        iterations.run("b", lambda: make("b"))
        assert (iterations.count, iterations.judged) == (2, 1)
    assert made == ["a", "b", "b"]
    assert list(Path().iterdir()) == []


def test_a_replay_that_was_asked_for_stays_and_can_be_loaded_elsewhere():
    with Iterations(IterationOptions(save_replay=Path("mine.jsonl")), "search") as iterations:
        iterations.run("a", lambda: GOOD)
    options = IterationOptions(load_replay=Path("mine.jsonl"))
    with Iterations(options, "search") as iterations:
        assert iterations.run("a", pytest.fail).good
        assert iterations.judged == 0


def test_the_replay_of_another_search_is_refused():
    Journal.open(Path("r.jsonl"), "one").add("a", GOOD)
    with pytest.raises(UsageError, match="replay of another search"):
        Journal.open(Path("r.jsonl"), "two")


def test_a_line_that_a_crash_cut_off_is_dropped_but_damage_before_it_is_an_error():
    journal = Journal.open(Path("r.jsonl"), "s")
    journal.add("a", GOOD)
    journal.add("b", BAD)
    text = Path("r.jsonl").read_text()
    Path("r.jsonl").write_text(text[:-20])
    assert set(Journal.open(Path("r.jsonl"), "s").verdicts) == {"a"}
    Path("r.jsonl").write_text(text.replace('{"key": "a"', '{"kex'))
    with pytest.raises(UsageError, match="damaged in line 2"):
        Journal.open(Path("r.jsonl"), "s")
    Path("r.jsonl").write_text("something else\n")
    with pytest.raises(UsageError, match=r"not a replay"):
        Journal.open(Path("r.jsonl"), "s")
    with pytest.raises(UsageError, match="is not there"):
        Journal.open(Path("new.jsonl"), "s", Path("nowhere.jsonl"))


def test_a_file_that_the_search_would_overwrite_is_an_error():
    Path("polygraphy_debug.onnx").write_text("precious")
    with (
        pytest.raises(UsageError, match="would be overwritten"),
        Iterations(IterationOptions(iter_artifact=Path("polygraphy_debug.onnx")), "search"),
    ):
        pass
    assert Path("polygraphy_debug.onnx").read_text() == "precious"


def test_a_verdict_survives_json():
    verdict = Verdict(False, "off", 3, 1.5, {"digest": "ab"})
    assert Verdict.from_json(json.loads(json.dumps(verdict.to_json()))) == verdict


def test_a_file_in_the_way_is_refused_the_second_time_too():
    Path("polygraphy_debug.onnx").write_text("precious")
    for _ in range(2):
        with (
            pytest.raises(UsageError, match="would be overwritten"),
            Iterations(IterationOptions(iter_artifact=Path("polygraphy_debug.onnx")), "search"),
        ):
            pass
    assert [p.name for p in Path().iterdir()] == ["polygraphy_debug.onnx"]


def test_what_a_check_leaves_running_does_not_hold_it_up():
    """The check ends at once; the program that it started keeps its output open."""
    verdict, output = CommandCheck(("sh", "-c", "sleep 60 & echo done"), timeout=20).run()
    assert verdict.good
    assert output == "done\n"
    assert verdict.seconds < 20
