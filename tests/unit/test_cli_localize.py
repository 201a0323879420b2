"""`ditto localize`: what it says and how it ends where no site is to blame. The run is made by hand."""

import pytest

from ditto_core.compare.blame import Localization
from tests.commands import ditto
from tests.unit.hand_made import compared

FAILED = "not localized from step 1 on: RunError: the replay failed"


@pytest.mark.parametrize(("error", "code"), [(0.0, 2), (1.0, 1)])
def test_an_engine_that_diverges_is_no_agreement_though_no_site_is_to_blame(monkeypatch, error, code):
    """Nor is one of which no local error was measured."""
    run = compared({(1, "lm_head"): error}, localization=Localization("float16", 4.0, (), notes=(FAILED,)))
    monkeypatch.setattr("ditto_core.cli.localize.localize_model", lambda *args: run)
    done = ditto("localize", "acme/model", "--input-ids", "5,6")
    assert done.returncode == code, done.stderr
    assert FAILED in done.stdout
    assert done.stdout.startswith("no local error was measured")
    assert ("no site is to blame, but engine diverges at lm_head, step 1" in done.stdout) is (code == 1)
