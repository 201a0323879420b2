"""Gates on a tiny Llama: healthy and quantized, sharded, killed and resumed, in several processes, on a cluster."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from ditto_core.engines.workers import local_processes
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import RunError, UsageError
from ditto_core.gates import Baseline, Gate, GateResult, Sample, Shard, Suite, merge, run_gate, scoring
from ditto_core.gates.calibration import Calibration
from ditto_core.gates.gate import floor_dtype, prepare
from ditto_core.gates.marker import MarkedGate
from ditto_core.gates.scoring import Scorer
from ditto_core.model.checkpoint import Language
from ditto_core.model.loading import tiny_decoder
from ditto_core.spec import EngineSpec
from tests.gate_suites import int8_gate, tiny_gate, tiny_suite
from tests.models import llama


@pytest.fixture(scope="module")
def whole(workspace):
    """The gate in one process and one go."""
    return run_gate(tiny_gate(), workspace)


def comparable(result):
    """A result without what tells of the run itself."""
    data = result.to_json()
    return {name: value for name, value in data.items() if name not in ("receipts", "digest", "notes")}


def test_the_same_precision_passes_with_every_metric_measured(whole):
    whole.assert_passed()
    assert [v.metric for v in whole.verdicts] == [
        "accuracy_drop",
        "perplexity_ratio",
        "kl_mean",
        "kl_by_sample",
        "kl_p99",
        "top1_disagreement",
        "greedy_disagreement",
        "worst_sample",
    ]
    found = {v.metric: v for v in whole.verdicts}
    assert found["perplexity_ratio"].estimate == pytest.approx(1, abs=1e-6)
    assert found["kl_mean"].estimate < 1e-9
    assert found["accuracy_drop"].n == 8


def test_samples_in_batches_give_the_numbers_of_each_alone(workspace, whole, monkeypatch):
    steps = []
    real = scoring.step_logits
    monkeypatch.setattr(scoring, "step_logits", lambda *step: (steps.append(step[1]), real(*step))[1])
    result = run_gate(replace(tiny_gate(), batch=4), workspace)
    assert [batch.rows for batch in steps if batch.rows > 1] == [8] * 3 + [6] * 3 + [4] * 3
    assert not all(bool(batch.mask.all()) for batch in steps)
    assert [r.id for r in result.records] == [r.id for r in whole.records]
    for found, alone in zip(result.records, whole.records, strict=True):
        for side in ("engine", "reference", "floor"):
            ours, theirs = getattr(found, side), getattr(alone, side)
            assert (ours.top, ours.correct, ours.generated) == (theirs.top, theirs.correct, theirs.generated)
            assert ours.nll == pytest.approx(theirs.nll, rel=1e-6)
        assert found.kl == pytest.approx(alone.kl, abs=1e-10)


def test_a_reference_in_the_engines_dtype_is_measured_against_the_next_higher_one(whole):
    assert whole.identity.floor == "float64"
    assert all(r.floor is not None and len(r.floor_kl) == len(r.kl) for r in whole.records)
    assert 0 < max(max(r.floor_kl) for r in whole.records) < 1e-9


@pytest.mark.parametrize(("dtype", "reference", "floor"), [
    ("float16", "eager", "float16"), ("bfloat16", "eager:float32", "bfloat16"), ("float32", "eager", "float32"),
    ("float16", "onnxruntime:float32", "float16"), ("float16", "eager:float16", "float32"),
])  # fmt: skip
def test_the_floor_is_the_eager_model_in_the_engines_dtype(dtype, reference, floor):
    gate = tiny_gate(reference=reference)
    assert floor_dtype(Gate(replace(gate.spec, dtype=dtype), gate.suite, reference)) == floor


def test_a_baseline_without_the_error_of_the_engines_dtype_is_refused(workspace, whole):
    stale = replace(Baseline.of(whole), identity=replace(whole.identity, floor="bfloat16"))
    with pytest.raises(UsageError, match="error in bfloat16, expected float64"):
        run_gate(tiny_gate(), workspace, baseline=stale)


def test_int8_is_found_to_differ_from_float32(workspace):
    result = run_gate(tiny_gate(reference="onnxruntime", quantize="int8"), workspace)
    assert not result
    found = {v.metric: v for v in result.verdicts}
    assert found["kl_mean"].low > 0.0014
    assert result.identity.engine_label == "onnxruntime int8"
    assert result.identity.reference_label == "onnxruntime float32"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_said_before_anything_runs_on_it(workspace):
    with pytest.raises(UsageError, match=r"device 'cuda' needs a GPU, but torch .* expected cpu"):
        run_gate(replace(tiny_gate(), device="cuda"), workspace)


def test_log_likelihoods_are_those_of_transformers(workspace, whole):
    model = tiny_decoder("llama")
    sample = tiny_suite().samples[0]
    ids = torch.tensor([sample.text])
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    record = whole.records[0]
    assert record.tokens == 11
    assert record.reference.nll == pytest.approx(11 * loss, rel=1e-5)
    assert record.engine.nll == pytest.approx(11 * loss, rel=1e-5)


def test_the_chosen_answer_is_the_one_that_transformers_finds_likelier(whole):
    model = tiny_decoder("llama")
    for sample, record in zip(tiny_suite().samples, whole.records, strict=True):
        if sample.kind != "choice":
            continue
        losses = []
        for choice in sample.choices:
            ids = torch.tensor([sample.prompt + choice])
            labels = torch.where(torch.arange(ids.shape[1]) < len(sample.prompt), -100, ids)
            with torch.no_grad():
                losses.append(model(ids, labels=labels).loss.item())
        assert record.reference.correct is (losses.index(min(losses)) == sample.answer)


def test_a_greedy_continuation_that_begins_with_the_answer_is_right(workspace, whole):
    prompt = tiny_suite().samples[12]
    generated = next(r for r in whole.records if r.id == prompt.id).engine.generated
    right = Sample("right", prompt=prompt.prompt, answer=generated[:2])
    wrong = Sample("wrong", prompt=prompt.prompt, answer=(generated[1], generated[0] ^ 1))
    result = run_gate(tiny_gate(Suite("m", (right, wrong))), workspace)
    assert [record.engine.correct for record in result.records] == [True, False]


def test_two_shards_merged_are_one_run(workspace, whole):
    shards = [run_gate(tiny_gate(), workspace, shard=Shard(number, 2)) for number in (1, 2)]
    assert comparable(merge(shards)) == comparable(whole)


def test_samples_of_a_killed_process_run_again_in_a_new_pool_with_the_same_bits(workspace, tmp_path, monkeypatch):
    pools = []

    class Pool(ProcessPoolExecutor):
        def __init__(self, count, context, **setup):
            pools.append(self)
            super().__init__(count if len(pools) == 1 else 1, context, **setup)

    def kill_once(done, total):
        if len(pools) == 1 and done == 3:
            os.kill(next(iter(pools[0]._processes)), signal.SIGKILL)

    monkeypatch.setattr("ditto_core.engines.workers.ProcessPoolExecutor", Pool)
    said, gate = [], int8_gate(tmp_path)
    told = replace(workspace, say=said.append)
    result = run_gate(gate, told, run=local_processes(2), on_sample=kill_once)
    assert comparable(result) == comparable(run_gate(gate, workspace))
    assert len(pools) == 2
    assert any("a worker died" in line for line in said)


def test_a_worker_that_would_build_another_engine_is_refused(workspace):
    job, _ = prepare(tiny_gate(), workspace, None)
    with pytest.raises(RunError, match=r"this worker builds engine .*, expected 000000000000"):
        replace(job, engine="0" * 64).open(workspace)


def test_a_sample_without_a_result_is_an_error(workspace):
    def forgetful(job, tasks, workspace):
        from ditto_core.engines.workers import in_process

        yield from list(in_process(job, tasks, workspace))[:-1]

    gate = tiny_gate(tiny_suite(3, 0, 0))
    with pytest.raises(RunError, match="sample 'text2' has no result"):
        run_gate(gate, workspace, run=forgetful)


SCRIPT = """
    import os, signal, sys
    from ditto_core.cache import Cache
    from ditto_core.gates import run_gate
    from ditto_core.gates.scoring import Scorer
    from ditto_core.engines.workspace import Workspace
    from tests.gate_suites import int8_gate, tiny_gate, tiny_suite

    score, scored = Scorer.score, []

    def counted(self, sample, known=None):
        if len(scored) == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        scored.append(sample.id)
        print(sample.id, flush=True)
        return score(self, sample, known)

    Scorer.score = counted
    run_gate(tiny_gate(tiny_suite(7, 5, 3)), Workspace(Cache(sys.argv[1])))
"""


def test_a_killed_gate_goes_on_without_repeating_a_sample(workspace, shared_cache_dir, monkeypatch):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(shared_cache_dir)]
    killed = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = killed.stdout.split()
    assert len(before) == 6

    scored, said, score = [], [], Scorer.score
    monkeypatch.setattr(Scorer, "score", lambda self, s, known=None: scored.append(s.id) or score(self, s, known))
    suite = tiny_suite(7, 5, 3)
    resumed = run_gate(tiny_gate(suite), replace(workspace, say=said.append))
    assert said == ["gate tiny goes on: 6 of 18 samples are done"]
    assert Counter(before + scored) == Counter(suite.ids)
    assert comparable(resumed) == comparable(run_gate(tiny_gate(suite), workspace))


def test_a_gate_goes_on_only_with_the_threads_batch_and_machine_that_it_began_with(workspace, monkeypatch):
    gate, said = tiny_gate(tiny_suite(4, 0, 0), "onnxruntime"), []
    told = replace(workspace, say=said.append)
    known = Baseline.of(run_gate(gate, workspace))

    def interrupted(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_gate(gate, workspace, on_sample=interrupted)
    for other in (replace(gate, threads=2), replace(gate, batch=2)):
        run_gate(other, told)
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("NVIDIA_TF32_OVERRIDE", "0")
        run_gate(gate, told)
    run_gate(gate, told, baseline=known)  # its samples have the reference's results from there, and no KL
    assert said == []
    run_gate(gate, told)
    assert said == ["gate tiny goes on: 2 of 4 samples are done"]


def test_a_baseline_replaces_the_reference(workspace, whole):
    result = run_gate(tiny_gate(), workspace, baseline=Baseline.of(whole))
    result.assert_passed()
    assert [r.reference for r in result.records] == [r.reference for r in whole.records]
    assert [r.engine for r in result.records] == [r.engine for r in whole.records]
    assert "kl_mean" not in {v.metric for v in result.verdicts}  # it needs the reference's logits
    quantized = run_gate(tiny_gate(quantize="int8"), workspace, baseline=Baseline.of(whole))
    assert {v.metric: v for v in quantized.verdicts}["top1_disagreement"].estimate > 0


def test_a_marked_gate_writes_its_baseline_then_runs_from_it(workspace, tmp_path):
    marked = MarkedGate.of({"baseline": "base.json", "output": "out.json"}, tmp_path)
    gate, whole = tiny_gate(tiny_suite(4, 1, 1)), Shard(1, 1)
    written = marked.run(gate, workspace, whole, update=True, together=lambda part: part)
    assert set(Baseline.load(tmp_path / "base.json").samples) == set(gate.suite.ids)
    again = marked.run(gate, workspace, whole, update=False, together=lambda part: part)
    assert [r.reference for r in again.records] == [r.reference for r in written.records]
    assert all(not r.kl for r in again.records)  # the reference did not run
    assert comparable(GateResult.load(tmp_path / "out.json")) == comparable(again)
    bare = MarkedGate.of({}, tmp_path).run(gate, workspace, whole, update=False, together=lambda part: part)
    assert comparable(bare) == comparable(written)


def test_a_result_of_another_gate_is_told_by_what_differs(whole):
    assert tiny_gate().differences(whole) == []
    other = replace(tiny_gate(tiny_suite(7), quantize="int8"), max_new_tokens=5)
    found = [line.split(" is ")[0] for line in other.differences(whole)]
    assert found == ["its suite", "its samples", "its engine", "its max_new_tokens"]
    engine = tiny_gate(reference="onnxruntime:float16")
    assert engine.differences(whole) == ["its reference is 'eager float32', expected 'onnxruntime float16'"]


def test_a_baseline_that_lacks_a_sample_or_is_of_others_is_refused(workspace, whole):
    baseline = Baseline.of(whole)
    with pytest.raises(UsageError, match="the baseline lacks sample 'text6': write it anew with --update-baseline"):
        run_gate(tiny_gate(tiny_suite(7)), workspace, baseline=baseline)
    changed = [replace(s, text=s.text[:-1]) if s.id == "text0" else s for s in tiny_suite().samples]
    with pytest.raises(UsageError, match="of other samples"):
        run_gate(tiny_gate(Suite("tiny", tuple(changed))), workspace, baseline=baseline)
    with pytest.raises(UsageError, match="of the reference eager float32, expected openvino float32: write it anew"):
        run_gate(tiny_gate(reference="openvino:float32"), workspace, baseline=baseline)
    stranger = replace(baseline, receipt=replace(baseline.receipt, model="0" * 64))
    with pytest.raises(UsageError, match="of another model"):
        run_gate(tiny_gate(), workspace, baseline=stranger)


def with_words(folder, words):
    """Put a tokenizer beside a model, in the one file that tells no configuration."""
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    made.pre_tokenizer = Whitespace()
    made.save(str(folder / "llama" / "tokenizer.json"))


def test_another_tokenizer_is_another_gate_another_calibration_and_refuses_the_baseline(workspace, tmp_path):
    words = ["u", *map(chr, range(97, 123))]
    suite = Suite("words", tuple(Sample(str(i), text=" ".join(words[i + 1 : i + 9])) for i in range(3)))
    gate = int8_gate(tmp_path, suite)
    with_words(tmp_path, words)

    def keys():
        fresh = Workspace(workspace.cache)
        calibration = Calibration.of(gate, ["lm_head"], fresh)
        return prepare(gate, fresh, None)[1].key, calibration.key(suite, fresh)

    known, baseline = keys(), Baseline.of(run_gate(gate, Workspace(workspace.cache)))
    assert known == keys()
    with_words(tmp_path, words[::-1])
    assert not set(known) & set(keys())
    with pytest.raises(UsageError, match="baseline has other token ids than the tokenizer makes of words now: write"):
        run_gate(gate, Workspace(workspace.cache), baseline=baseline)


def test_the_receipt_tells_what_produced_the_result(whole):
    (receipt,) = whole.receipts
    assert len(receipt.engine) == len(receipt.reference) == len(receipt.model) == 64
    assert receipt.versions.keys() >= {"torch", "transformers", "onnxruntime", "python"}
    assert receipt.machine.keys() == {"gpu", "driver", "cpu", "system"}
    arithmetic = {"tf32_matmul", "tf32_cudnn", "NVIDIA_TF32_OVERRIDE", "sums_in_16_bits", "sdpa", "cpu_capability"}
    assert receipt.settings.keys() == {*arithmetic, "threads"}
    assert receipt.seeds.keys() == {"bootstrap", "torch"}
    assert json.loads(json.dumps(receipt.to_json()))


def test_a_sample_that_does_not_fit_the_engine_is_named(workspace):
    long = Suite("long", (Sample("long", text=(1,) * 600),))
    with pytest.raises(UsageError, match="sample 'long': step needs length 600, outside the engine's profile"):
        run_gate(tiny_gate(long), workspace)


def test_a_model_that_is_no_decoder_has_no_gate(workspace):
    from tests.models import conv_net

    with pytest.raises(UsageError, match="is not a decoder"):
        run_gate(replace(tiny_gate(), spec=EngineSpec.of(conv_net)), workspace)


def test_a_comparison_carries_the_fingerprints_of_engine_and_model(workspace):
    from ditto_core.pair.pair import Pair

    spec = EngineSpec.of(llama)
    pair = Pair(workspace, spec)
    receipt = pair.generate([3, 1, 4], max_new_tokens=1).receipt
    assert receipt.engine == workspace.build(spec).directory.name
    assert receipt.model == workspace.digest(spec.model)
    assert receipt.versions["onnxruntime"]


def test_a_gate_between_two_engines_of_a_model_on_disk_loads_no_module(workspace, tmp_path):
    gate = int8_gate(tmp_path, tiny_suite(1, 1, 1))
    run_gate(gate, workspace)  # exported and built
    fresh = Workspace(workspace.cache)
    result = run_gate(gate, fresh)
    assert len(result.records) == 4
    assert not fresh._models
    assert fresh.language(gate.spec.model) == workspace.language(EngineSpec.of(llama).model) == Language(None, 256)
