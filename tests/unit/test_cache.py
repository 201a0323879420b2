import errno
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ditto_core.cache import Cache, default_root, link_or_copy
from ditto_core.errors import CacheError

KEY = "ab" * 32
NAMES = "abcdefgh"


def write(content: bytes, name: str = "engine.bin"):
    return lambda folder: (folder / name).write_bytes(content) and None


def never(folder: Path) -> None:
    pytest.fail("built again")


def get(cache: Cache, key: str = KEY, build=None, events=None) -> Path:
    told = None if events is None else events.append
    return cache.get_or_build("engine", key, build or write(b"engine"), describe={"model": "m"}, on_event=told)


def run_script(body: str, *arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(body), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )


def leftovers(cache: Cache) -> list[Path]:
    return list(cache.root.glob("*/.*"))


def test_a_built_entry_is_returned_without_a_second_build(tmp_path):
    cache = Cache(tmp_path)
    first = get(cache)
    assert get(cache, build=never) == first
    assert (first / "engine.bin").read_bytes() == b"engine"


def test_the_manifest_records_size_and_digest_of_every_file(tmp_path):
    def build(folder):
        (folder / "deep").mkdir()
        (folder / "deep" / "weights").write_bytes(b"abc")

    manifest = json.loads((get(Cache(tmp_path), build=build) / "entry.json").read_text())
    assert manifest["files"] == {"deep/weights": {"sha256": hashlib.sha256(b"abc").hexdigest(), "size": 3}}
    assert (manifest["kind"], manifest["key"], manifest["describe"]) == ("engine", KEY, {"model": "m"})


def test_eight_processes_build_once_and_the_waiting_ones_say_so(tmp_path):
    script = """
        import sys, time
        from pathlib import Path
        from ditto_core.cache import Cache
        root, log, name = sys.argv[1:]
        def build(folder):
            with open(log, "a") as stream:
                stream.write(name)
            while not Path(root, "go").exists():
                time.sleep(0.01)
            (folder / "engine.bin").write_text("x")
        def told(event):
            print(event, flush=True)
        path = Cache(Path(root)).get_or_build("engine", "k", build, describe={}, on_event=told)
        print((path / "engine.bin").read_text())
    """
    workers = [run_script(script, tmp_path, tmp_path / "log", n) for n in NAMES]
    while not (builder := (tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""):
        time.sleep(0.01)
    waiting = [w for w, n in zip(workers, NAMES, strict=True) if n != builder]
    said = [worker.stdout.readline() for worker in waiting]
    (tmp_path / "go").touch()
    assert [worker.communicate(timeout=60)[0] for worker in workers] == ["x\n"] * 8
    assert said == ["waiting for another process that holds engine/k\n"] * 7
    assert (tmp_path / "log").read_text() == builder


def test_a_killed_build_leaves_a_cache_that_the_next_run_uses_without_help(tmp_path):
    script = """
        import sys, time
        from pathlib import Path
        from ditto_core.cache import Cache
        def build(folder):
            (folder / "half").write_text("half")
            print("building", flush=True)
            time.sleep(600)
        Cache(Path(sys.argv[1])).get_or_build("engine", sys.argv[2], build, describe={})
    """
    worker = run_script(script, tmp_path, KEY)
    assert worker.stdout.readline() == "building\n"
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    cache = Cache(tmp_path)
    assert len(leftovers(cache)) == 1
    assert cache.entries() == []
    assert sorted(f.name for f in get(cache, "another").iterdir()) == ["engine.bin", "entry.json"]
    assert leftovers(cache) == []


READER = """
    import hashlib, sys, time
    from pathlib import Path
    from ditto_core.cache import Cache
    root, key = sys.argv[1:]
    def build(folder):
        (folder / "engine.bin").write_bytes(b"engine" * 1000)
    cache = Cache(root)
    for i in range(30):
        path = cache.get_or_build("engine", f"{key}{i % 3}", build, describe={})
        time.sleep(0.01)  # what follows the check of an entry: it is opened
        assert (path / "engine.bin").read_bytes() == b"engine" * 1000
    print("read", flush=True)
"""


def test_entries_that_eight_processes_read_stay_while_another_prunes(tmp_path):
    readers = [run_script(READER, tmp_path, "shared"[: 3 + i % 2]) for i in range(8)]
    cache, pruned = Cache(tmp_path), 0
    while any(reader.poll() is None for reader in readers):
        pruned += len(cache.prune(max_size=0))
    assert [reader.communicate()[0] for reader in readers] == ["read\n"] * 8
    cache.prune(max_size=0)
    assert cache.entries() == []
    assert list((tmp_path / "leases").iterdir()) == []


def test_the_lease_of_a_killed_process_holds_nothing(tmp_path):
    script = """
        import sys, time
        from ditto_core.cache import Cache
        cache = Cache(sys.argv[1])
        cache.get_or_build("engine", "k", lambda folder: (folder / "x").write_text("x"), describe={})
        print("built", flush=True)
        time.sleep(600)
    """
    user, cache = run_script(script, tmp_path), Cache(tmp_path)
    assert user.stdout.readline() == "built\n"
    assert cache.prune(max_size=0) == []
    user.kill()
    user.wait()
    assert [entry.key for entry in cache.prune(max_size=0)] == ["k"]
    assert list((tmp_path / "leases").iterdir()) == []


WITHOUT_LOCKS = """
    import errno, fcntl, os, sys
    def refused(*arguments):
        code = getattr(errno, sys.argv[3])
        raise OSError(code, os.strerror(code))
    fcntl.flock = refused
"""
"""A stand-in for a network file system without locks: the call that takes them is refused, as there."""


@pytest.mark.parametrize("error", ["ENOLCK", "EOPNOTSUPP"])
def test_without_locks_eight_processes_get_whole_entries_while_one_prunes_old_ones(tmp_path, error):
    (tmp_path / "engine" / ".dead.01234567.tmp").mkdir(parents=True)
    os.utime(tmp_path / "engine" / ".dead.01234567.tmp", (time.time() - 2 * 86400,) * 2)
    (tmp_path / "engine" / ".lives.01234567.tmp").mkdir()
    script = WITHOUT_LOCKS + READER.replace("root, key = sys.argv[1:]", "root, key, _ = sys.argv[1:]")
    script += "    cache.prune(max_age=3600)\n"
    readers = [run_script(script, tmp_path, "shared", error) for _ in range(8)]
    assert [reader.communicate(timeout=120)[0] for reader in readers] == ["read\n"] * 8
    assert Cache(tmp_path).verify() == []
    assert [entry.key for entry in sorted(Cache(tmp_path).entries(), key=lambda e: e.key)] == [
        f"shared{i}" for i in range(3)
    ]
    assert [path.name for path in leftovers(Cache(tmp_path))] == [".lives.01234567.tmp"]


def test_a_flipped_byte_is_noticed_rebuilt_and_said(tmp_path):
    cache, events = Cache(tmp_path), []
    engine = get(cache) / "engine.bin"
    stat = engine.stat()
    engine.write_bytes(b"engin3")
    os.utime(engine, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert [p.what for p in cache.verify()] == ["the content of engine.bin changed"]
    assert (get(cache, events=events) / "engine.bin").read_bytes() == b"engine"
    assert events == [f"cache entry engine/{KEY[:12]} is damaged (the content of engine.bin changed); it is rebuilt"]
    assert cache.verify() == []


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda d: (d / "engine.bin").unlink(), "engine.bin is missing"),
        (lambda d: (d / "engine.bin").write_bytes(b"eng"), "engine.bin has 3 bytes, expected 6"),
        (lambda d: (d / "other").touch(), "other does not belong there"),
        (lambda d: (d / "entry.json").unlink(), "entry.json is missing or damaged"),
        (lambda d: (d / "entry.json").write_text("{}"), "entry.json is missing or damaged"),
        (
            lambda d: (d / "entry.json").write_text((d / "entry.json").read_text().replace('"m"', '"n"')),
            "entry.json is missing or damaged",
        ),
    ],
)
def test_every_kind_of_damage_is_named_and_repaired(tmp_path, damage, what):
    cache, events = Cache(tmp_path), []
    damage(get(cache))
    assert [p.what for p in cache.verify()] == [what]
    get(cache, events=events)
    assert what in events[0]
    assert cache.verify() == []


def test_an_entry_moved_to_another_key_is_not_taken_for_it(tmp_path):
    cache, events = Cache(tmp_path), []
    path = get(cache, "one", write(b"1"))
    path.rename(path.with_name("two"))
    assert (get(cache, "two", write(b"2"), events) / "engine.bin").read_bytes() == b"2"
    assert len(events) == 1


def test_a_build_that_fails_leaves_nothing_and_its_error_passes(tmp_path):
    def build(folder):
        (folder / "half").touch()
        raise RuntimeError("no such layer")

    cache = Cache(tmp_path)
    with pytest.raises(RuntimeError, match="no such layer"):
        get(cache, build=build)
    assert (cache.entries(), leftovers(cache)) == ([], [])


def test_a_file_in_place_of_the_cache_directory_is_one_clear_line(tmp_path):
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CacheError, match="is not a directory: free space") as caught:
            get(Cache(root))
        assert "\n" not in str(caught.value)


@pytest.fixture
def small_files():
    """The kernel refuses to let any file grow beyond 64 kB: what a full disk does, without one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_cache_that_takes_no_more_bytes_is_one_clear_line_and_nothing_half_written(tmp_path, small_files):
    cache = Cache(tmp_path)
    with pytest.raises(CacheError, match="does not take a file that large"):
        get(cache, build=write(b"x" * 100_000))
    assert (cache.entries(), leftovers(cache)) == ([], [])


def test_a_full_disk_is_one_clear_line(tmp_path):
    with pytest.raises(CacheError, match=r"is full: free space \(`ditto cache prune`\)"):
        get(Cache(tmp_path), build=lambda folder: Path("/dev/full").write_bytes(b"x") and None)


def test_an_unreadable_file_of_the_model_is_not_blamed_on_the_cache(tmp_path):
    def build(folder):
        raise PermissionError(errno.EACCES, "Permission denied", "/models/weights")

    with pytest.raises(PermissionError):
        get(Cache(tmp_path), build=build)


@pytest.mark.parametrize("key", ["", "../x", "a/b", ".hidden", "a\n"])
def test_a_key_that_is_no_plain_name_is_refused(tmp_path, key):
    with pytest.raises(CacheError, match="cannot name a cache entry"):
        get(Cache(tmp_path), key)


def aged(cache: Cache, key: str, content: bytes, days: float) -> Path:
    path = get(cache, key, write(content))
    moment = time.time() - days * 86400
    os.utime(path / "entry.json", (moment, moment))
    return path


def test_prune_removes_the_least_recently_used_first(tmp_path):
    cache = Cache(tmp_path)
    for key, days in (("new", 1), ("old", 30), ("mid", 10)):
        aged(cache, key, b"x" * 100, days)
    assert [e.key for e in cache.entries()] == ["new", "mid", "old"]
    assert [e.key for e in cache.prune(max_size=250, dry_run=True)] == ["old"]
    assert [e.key for e in cache.prune(max_size=250)] == ["old"]
    assert [e.key for e in cache.prune(max_age=5 * 86400)] == ["mid"]
    assert [e.key for e in cache.entries()] == ["new"]


def test_reading_an_entry_makes_it_recently_used(tmp_path):
    cache = Cache(tmp_path)
    aged(cache, "a", b"x" * 100, 30)
    aged(cache, "b", b"x" * 100, 10)
    get(cache, "a", never)
    assert [e.key for e in cache.prune(max_size=100)] == ["b"]


def test_prune_counts_a_shared_file_once_and_frees_it_with_the_last_entry(tmp_path):
    cache = Cache(tmp_path)
    weights = aged(cache, "weights", b"w" * 1000, 3) / "engine.bin"
    for key in ("engine1", "engine2"):
        get(cache, key, lambda folder: link_or_copy(weights, folder / "engine.bin"))
    assert weights.stat().st_nlink == 3
    assert cache.prune(max_size=1000) == []
    assert [e.key for e in cache.prune(max_size=999)] == ["weights", "engine1", "engine2"]


def test_prune_by_age_takes_by_products_along(tmp_path):
    cache = Cache(tmp_path)
    old, new = cache.state("floors", "old.json"), cache.state("gates", "new.jsonl")
    for path, age in ((old, 10 * 86400), (new, 0)):
        path.write_text("{}")
        os.utime(path, (time.time() - age,) * 2)
    cache.prune(max_age=20 * 86400)
    cache.prune(max_age=5 * 86400, dry_run=True)
    cache.prune(max_size=0)
    assert old.exists()
    cache.prune(max_age=5 * 86400)
    assert not old.exists()
    assert new.exists()


def test_prune_leaves_a_locked_entry_alone(tmp_path):
    script = """
        import sys, time
        from pathlib import Path
        from filelock import FileLock
        with FileLock(sys.argv[1]):
            print("locked", flush=True)
            time.sleep(600)
    """
    cache = Cache(tmp_path)
    for key in ("held", "free"):
        aged(cache, key, b"x", 30)
    holder = run_script(script, tmp_path / "locks" / "engine-held.lock")
    assert holder.stdout.readline() == "locked\n"
    try:
        assert [e.key for e in cache.prune(max_size=0)] == ["free"]
    finally:
        holder.kill()
        holder.wait()
    assert [e.key for e in cache.prune(max_size=0)] == ["held"]


def test_prune_clears_dead_builds_and_unreadable_entries(tmp_path):
    cache = Cache(tmp_path)
    (get(cache, "bad") / "entry.json").write_text("?")
    (tmp_path / "engine" / ".k.0123abcd.tmp").mkdir()
    cache.prune(max_size=10**9, dry_run=True)
    assert len(list((tmp_path / "engine").iterdir())) == 2
    cache.prune(max_size=10**9)
    assert list((tmp_path / "engine").iterdir()) == []


def test_a_link_falls_back_to_a_copy_across_file_systems(tmp_path):
    shared = Path("/dev/shm")
    if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system at /dev/shm")
    source = tmp_path / "source"
    source.write_bytes(b"abc")
    target = shared / f"ditto-test-{os.getpid()}"
    try:
        link_or_copy(source, target)
        assert (target.read_bytes(), source.stat().st_nlink) == (b"abc", 1)
    finally:
        target.unlink(missing_ok=True)


def test_the_default_root_is_the_users_cache_directory_unless_the_environment_names_another(monkeypatch, tmp_path):
    monkeypatch.delenv("DITTO_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_root() == tmp_path / "xdg" / "ditto_core"
    monkeypatch.setenv("DITTO_CACHE_DIR", str(tmp_path / "mine"))
    assert default_root() == tmp_path / "mine"
