"""Options of `ditto gate run` become settings of the gate."""

from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from ditto_core.cli import gate_options as shared
from ditto_core.errors import UsageError
from ditto_core.gates.policy import Policy
from tests.gate_suites import tiny_gate


def test_device_threads_and_batch_are_settings_of_the_gate():
    application, found = typer.Typer(), []

    @application.command()
    def run(
        context: typer.Context,
        device: shared.Device = None,
        threads: shared.Threads = None,
        batch: shared.Batch = None,
        max_new_tokens: shared.NewTokens = None,
    ):
        context.params.update(name="", suite="classics", option=None, profile=None)
        found.append(shared.settings_of(context))

    assert CliRunner().invoke(application, ["--device", "cuda:1", "--threads", "0", "--batch", "4"]).exit_code == 0
    given = {"device": "cuda:1", "threads": 0, "batch": 4}
    assert {name: found[0].values[name] for name in given} == given


@pytest.mark.parametrize(("device", "batch", "rows"), [("cpu", 0, 1), ("cuda", 0, 16), ("cpu", 4, 4), ("cuda:1", 1, 1)])
def test_samples_run_alone_on_the_cpu_and_in_batches_on_a_gpu_unless_a_number_is_given(device, batch, rows):
    assert replace(tiny_gate(), device=device, batch=batch).rows == rows


def test_a_seed_below_nothing_is_refused():
    with pytest.raises(UsageError, match="a gate's seed is -1, expected 0 or more"):
        Policy(seed=-1)


def test_a_batch_below_nothing_is_refused():
    with pytest.raises(UsageError, match="batch is -1, expected at least 1, or 0"):
        replace(tiny_gate(), batch=-1)
