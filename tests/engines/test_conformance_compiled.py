"""The backends that compile for a while keep their promises: ``make conformance``, not a part of ``make test``."""

import pytest

from ditto_core.backends.registry import get_backend
from ditto_core.errors import BackendError
from ditto_core.spec import EngineSpec
from ditto_core.testing import check_backend
from ditto_core.testing.subject import decoder
from ditto_core.testing.suite import PROMISES

BUILDS = {"other_process", "one_tap", "output_as_tap"}
"""Promises that need an engine of their own, which takes most of the time; ``benchmarks/backends.py`` checks them."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("backend", "options", "left_out"),
    [
        ("executorch", {"kernels": "portable"}, set()),
        ("executorch", {"kernels": "xnnpack"}, BUILDS),
        ("inductor", {"compiler": "aot_eager"}, set()),
        ("inductor", {"compiler": "inductor"}, BUILDS),
        ("inductor", {"compiler": "aot_inductor"}, BUILDS),
    ],
    ids=["executorch-portable", "executorch-xnnpack", "aot_eager", "inductor", "aot_inductor"],
)
def test_a_backend_that_compiles_keeps_its_promises(workspace, backend, options, left_out):
    assert left_out <= {promise.__name__ for promise in PROMISES}
    try:
        get_backend(backend).check(EngineSpec.of(decoder, backend=backend, options=options))
    except BackendError as error:
        pytest.skip(str(error))
    check_backend(backend, options=options, workspace=workspace, isolation="none", without=left_out)
