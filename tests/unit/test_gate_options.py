"""Options of `ditto gate run` become settings of the gate."""

import typer
from typer.testing import CliRunner

from ditto_core.cli import gate_options as shared


def test_device_and_threads_are_settings_of_the_gate():
    application, found = typer.Typer(), []

    @application.command()
    def run(
        context: typer.Context,
        device: shared.Device = None,
        threads: shared.Threads = None,
        max_new_tokens: shared.NewTokens = None,
    ):
        context.params.update(name="", suite="classics", option=None, profile=None)
        found.append(shared.settings_of(context))

    assert CliRunner().invoke(application, ["--device", "cuda:1", "--threads", "0"]).exit_code == 0
    assert {name: found[0].values[name] for name in ("device", "threads")} == {"device": "cuda:1", "threads": 0}
