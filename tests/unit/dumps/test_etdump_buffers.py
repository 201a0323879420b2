"""A debug buffer holds the tensors of one run: it is never taken for another's. What names it needs no ExecuTorch."""

from __future__ import annotations

import pytest

from ditto_core.dumps.etdump import own_buffer
from ditto_core.errors import TraceError


@pytest.fixture
def runs(tmp_path):
    """Two ETDumps in one folder, of which one wrote its buffer there."""
    paths = [tmp_path / name for name in ("one.etdp", "two.etdp")]
    for path in paths:
        path.write_bytes((100).to_bytes(4, "little") + b"ED00" + bytes(200))
    (tmp_path / "two_debug.bin").write_bytes(b"x")
    return paths


def test_a_buffer_beside_two_etdumps_is_neithers_until_it_is_named(runs):
    one, two = runs
    for run in runs:
        with pytest.raises(TraceError, match=r"two_debug\.bin may be of any of 2 ETDumps \(one\.etdp, two\.etdp\)"):
            own_buffer(run)
    one.unlink()
    assert own_buffer(two) == two.with_name("two_debug.bin")
