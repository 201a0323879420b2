"""The pytest plugin of ditto-engine: marker, fixtures, options and reports around :mod:`ditto_core`."""

import pytest

pytest.register_assert_rewrite("pytest_ditto.fixtures", "pytest_ditto.marker", "pytest_ditto.reporting")
