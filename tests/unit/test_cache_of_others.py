"""A cache that this process may not write to, as a whole or in part."""

import os
import subprocess
import sys
import textwrap

import pytest

from ditto_core.cache import Cache
from tests.unit.test_cache import KEY, get

READ = """
    import sys
    from ditto_core.cache import Cache
    from ditto_core.errors import CacheError

    def build(folder):
        (folder / "engine.bin").write_bytes(b"new")

    try:
        path = Cache(sys.argv[1]).get_or_build("engine", sys.argv[2], build, describe={})
    except CacheError as error:
        sys.exit(str(error))
    print((path / "engine.bin").read_text())
"""


def read_as_reader(cache: Cache, key: str) -> subprocess.CompletedProcess:
    """Ask for an entry in a process that keeps to the permissions of files, also where the tests run as root."""
    unprivileged = ["setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner"] if os.geteuid() == 0 else []
    command = [*unprivileged, sys.executable, "-c", textwrap.dedent(READ), str(cache.root), key]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def read_only(tmp_path):
    """A cache with one entry that nobody may write to."""
    cache = Cache(tmp_path / "cache")
    get(cache)
    folders = [cache.root, *(p for p in cache.root.rglob("*") if p.is_dir())]
    files = [p for p in cache.root.rglob("*") if p.is_file()]
    for path in (*files, *reversed(folders)):
        path.chmod(0o555)
    yield cache
    for path in (*folders, *files):
        path.chmod(0o755)


def test_a_read_only_cache_gives_the_engine_that_it_holds(read_only):
    assert read_as_reader(read_only, KEY).stdout == "engine\n"


def test_a_read_only_cache_without_the_engine_is_one_clear_line(read_only):
    done = read_as_reader(read_only, "cd" * 32)
    assert done.returncode == 1
    assert done.stderr.startswith(f"the cache directory {read_only.root} cannot be written")


def test_a_damaged_engine_in_a_read_only_cache_is_not_used(read_only):
    engine = read_only.root / "engine" / KEY / "engine.bin"
    engine.chmod(0o755)
    engine.write_bytes(b"engina")
    engine.chmod(0o555)
    done = read_as_reader(read_only, KEY)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"the cache directory {read_only.root} cannot be written")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
def test_an_entry_of_another_user_is_used_though_its_time_of_use_cannot_be_set(tmp_path):
    cache = Cache(tmp_path)
    manifest = get(cache) / "entry.json"
    os.chown(manifest, 65534, 65534)
    manifest.chmod(0o444)
    assert read_as_reader(cache, KEY).stdout == "engine\n"
