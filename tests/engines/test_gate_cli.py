"""`ditto gate` as a user types it, and the workflow of docs/gates.md as CI would run it."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ditto_core.cli import main
from ditto_core.compare.tolerance_files import load_tolerance
from ditto_core.gates import Policy, load_suite
from ditto_core.gates.text import plan
from tests.gate_suites import tiny_suite, write_suite
from tests.models import llama

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs/gates.md").read_text()


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A repository with the table of the page, its model and its suite."""
    folder = tmp_path_factory.mktemp("project")
    (table,) = re.findall(r"^```toml\n(.*?)^```", DOC, re.DOTALL | re.MULTILINE)
    (folder / "pyproject.toml").write_text(table)
    llama().save_pretrained(folder / "models" / "llama")
    write_suite(folder / "suite.jsonl", tiny_suite(5, 4, 1))
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    for arguments in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", *arguments], cwd=folder, check=True)
    return folder


@pytest.fixture
def command(project, shared_cache_dir, monkeypatch, capsys):
    """Run a command's main function here, which saves importing torch."""
    monkeypatch.chdir(project)
    monkeypatch.setenv("DITTO_CACHE_DIR", str(shared_cache_dir))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["ditto", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=end.value.code or 0, stdout=out, stderr=err)

    return run


def workflow_commands(sha):
    """The `ditto` lines of the workflow in order, the matrix written out."""
    (workflow,) = re.findall(r"^```yaml\n(.*?)^```", DOC, re.DOTALL | re.MULTILINE)
    for line in re.findall(r"- run: ditto (.*)", workflow):
        text = line.replace("${{ github.sha }}", sha)
        for number in ("1", "2") if "matrix" in text else ("",):
            yield shlex.split(text.replace("${{ matrix.shard }}", number))


def test_the_workflow_of_the_page_runs_and_a_stale_foreign_or_edited_result_is_refused(command, project):
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=project, capture_output=True, text=True, check=True)
    sha = head.stdout.strip()
    done = [command(*line) for line in workflow_commands(sha)]
    assert [d.returncode for d in done] == [0] * 4, "\n".join(d.stdout + d.stderr for d in done)
    assert "smallest detectable drop of accuracy on 5 samples" in done[0].stderr
    assert done[0].stdout.startswith("shard 1/2: 6 of 11 samples")
    assert "gate suite on onnxruntime int8 against onnxruntime float32: passed, 11 samples" in done[3].stdout
    assert sha[:12] in done[3].stdout

    result = project / "gate.json"
    data = json.loads(result.read_text())
    foreign = command("gate", "check", result, "--commit", "0" * 40)
    assert (foreign.returncode, "of commit" in foreign.stderr) == (1, True)
    stale = command("gate", "check", result, "--max-age", "0s")
    assert (stale.returncode, "expected at most 0 s" in stale.stderr) == (1, True)
    no_gpu = command("gate", "check", result, "--gpu", "H100")
    assert (no_gpu.returncode, "expected H100" in no_gpu.stderr) == (1, True)
    result.write_text(json.dumps({**data, "records": data["records"][1:]}))
    edited = command("gate", "check", result)
    assert (edited.returncode, "was changed after it was written" in edited.stderr) == (2, True)


def test_the_plan_on_the_page_is_the_plan_of_the_suite():
    (block,) = re.findall(r"^```\n(suite .*?)^```", DOC, re.DOTALL | re.MULTILINE)
    assert block.splitlines() == list(plan(load_suite("classics-choice"), Policy(), "float32"))


def test_one_missing_sample_fails_closed(command, project, tmp_path):
    ran = command("gate", "run", "nightly", "--shard", "1/2", "--output", tmp_path / "shard.json")
    assert ran.returncode == 0, ran.stderr
    merged = command("gate", "merge", tmp_path / "shard.json", "--output", tmp_path / "gate.json")
    assert merged.returncode == 1
    assert "INCOMPLETE, sample 'text1' and 4 more missing of 11" in merged.stdout
    checked = command("gate", "check", tmp_path / "gate.json")
    assert checked.returncode == 1
    assert "INCOMPLETE" in checked.stdout


def test_a_failed_gate_is_exit_code_1_with_number_and_limit(command, tmp_path):
    done = command("gate", "run", "nightly", "--limit", "kl_mean=0.0014", "--output", tmp_path / "gate.json")
    assert done.returncode == 1
    assert "FAILED, kl_mean 0.0" in done.stdout
    assert "limit 0.0014" in done.stdout
    assert not json.loads((tmp_path / "gate.json").read_text())["ok"]


def test_a_baseline_is_written_and_used(command, tmp_path):
    common = ["gate", "run", "nightly", "--baseline", tmp_path / "base.json", "--output", tmp_path / "gate.json"]
    assert command(*common).returncode == 2
    written = command(*common, "--update-baseline")
    assert written.returncode == 0, written.stderr
    used = command(*common)
    assert used.returncode == 0, used.stderr
    assert "kl_mean" in written.stdout
    assert "kl_mean" not in used.stdout


def test_tolerances_are_measured_over_the_suite_of_a_gate(command, tmp_path):
    rules = tmp_path / "tolerances.toml"
    words = ["nightly", "--samples", "2", "--add-output", "lm_head", "--dtype", "float32", "--output", rules]
    refused = command("calibrate", *words)
    assert refused.returncode == 2
    assert "not calibrated: the logits diverge, step 0: kl_mean" in refused.stderr
    rules.write_text(
        """[tolerances]\nlogits = [{ metric = "kl_mean", bound = 0.05, reason = "tiny model" },
 { metric = "top1_disagreement", bound = 0.2 }]\n"""
    )
    done = command("calibrate", *words)
    assert done.returncode == 0, done.stderr
    assert "2 rules in" in done.stderr
    assert "suite: 2 of 2 samples" in done.stderr
    assert "onnxruntime int8 against onnxruntime float32, 1 steps" in rules.read_text()
    assert [rule.selector for rule in load_tolerance(rules).rules] == ["logits", "logits", "lm_head"]


def test_a_result_is_held_against_the_projects_own_table(command, project, tmp_path):
    path = tmp_path / "gate.json"
    command("gate", "run", "nightly", "--limit", "kl_mean=9", "--samples", "9", "--output", path)
    believed = command("gate", "check", path)
    held = command("gate", "check", "nightly", path)
    assert held.returncode == 1
    assert "its suite is" in held.stderr
    assert "its suite is" not in believed.stderr
    command("gate", "run", "nightly", "--limit", "kl_mean=9", "--output", path)
    other = command("gate", "check", "nightly", path)
    assert (other.returncode, "its limits is" in other.stderr) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "the gate names no model"),
        (["run", "nightyl"], "has no gate 'nightyl'; did you mean 'nightly'?"),
        (["run", "nightly", "--shard", "3/2"], "shard 3/2 does not exist"),
        (["run", "nightly", "--limit", "kl=1"], "a gate has no metric 'kl'"),
        (["run", "nightly", "--limit", "kl_mean"], "expected METRIC=BOUND"),
        (["run", "nightly", "--suite", "nowhere"], "is neither a JSONL file nor one of"),
        (["run", "nightly", "--reference", "eagr"], "unknown reference 'eagr'"),
        (["run", "nightly", "--jobs", "0"], "the number of jobs is 0"),
        (["run", "nightly", "--jobs", "2", "--cluster", "tcp://x:1"], "exclude each other"),
        (["run", "nightly", "--update-baseline"], "needs --baseline FILE"),
        (["check", "pyproject.toml"], "is no gate result"),
        (["check", "nightly", "pyproject.toml", "x"], "got 3 arguments"),
        (["check", "nowhere.json"], "is no gate result (No such file or directory)"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(command, arguments, message):
    done = command("gate", *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    lines = [
        line for line in done.stderr.splitlines() if message in line or not (line.endswith("…") or "sample" in line)
    ]
    assert len(lines) == 1, done.stderr
    assert message in lines[0]
