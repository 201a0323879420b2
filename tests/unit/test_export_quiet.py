"""A failing test must not show what torch's exporter says to itself."""

import logging

from ditto_core.model.tracing import quiet


def test_what_pytest_attaches_to_torchs_trace_hears_nothing_of_an_export(caplog):
    trace = logging.getLogger("torch.__trace")
    trace.addHandler(caplog.handler)  # as pytest does with loggers that do not propagate
    trace.setLevel(logging.DEBUG)
    before = list(trace.handlers)
    try:
        with quiet():
            trace.debug("inside")
            logging.getLogger("torch._export.non_strict_utils").warning("inside")
        assert trace.handlers == before
        trace.debug("after")
    finally:
        trace.removeHandler(caplog.handler)
    assert {record.message for record in caplog.records} == {"after"}
