import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ditto_core.cache import Cache


@pytest.fixture
def cache(tmp_path) -> Cache:
    cache = Cache(tmp_path / "cache")
    for key, days in (("a" * 64, 40), ("b" * 64, 1)):
        path = cache.get_or_build("engine", key, fill, describe={"model": "tiny", "dtype": "float16"})
        moment = time.time() - days * 86400
        os.utime(path / "entry.json", (moment, moment))
    return Cache(cache.root)  # the one that is dropped used the entries


def fill(folder: Path) -> None:
    (folder / "engine.bin").write_bytes(b"x" * 1500)


def ditto(cache: Cache, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "DITTO_CACHE_DIR": str(cache.root)}
    command = [sys.executable, "-c", "from ditto_core.cli import main; main()", "cache", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_ls_shows_every_entry(cache):
    done = ditto(cache, "ls")
    assert done.returncode == 0
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[1][:6] == ["engine", "b" * 12, "tiny", "float16", "1.5", "kB"]
    assert rows[1][-3:] == ["1", "d", "ago"]
    assert "2 entries, 3.0 kB in " in done.stdout.replace("\n", " ")


def test_ls_as_json_can_be_read_by_programs(cache):
    entries = json.loads(ditto(cache, "ls", "--json").stdout)
    assert [(e["key"], e["size"], e["describe"]["model"]) for e in entries] == [
        ("b" * 64, 1500, "tiny"),
        ("a" * 64, 1500, "tiny"),
    ]


def test_ls_of_an_empty_cache_says_so(tmp_path):
    done = ditto(Cache(tmp_path / "none"), "ls")
    assert (done.returncode, done.stdout.startswith("0 entries, 0 B in ")) == (0, True)
    assert not (tmp_path / "none").exists()


def test_verify_exits_0_when_sound_and_1_when_damaged(cache):
    assert ditto(cache, "verify").returncode == 0
    (cache.root / "engine" / ("a" * 64) / "engine.bin").write_bytes(b"y" * 1500)
    done = ditto(cache, "verify")
    assert done.returncode == 1
    assert f"engine/{'a' * 64}: the content of engine.bin changed" in done.stdout
    (problem,) = json.loads(ditto(cache, "verify", "--json").stdout)
    assert problem == {"kind": "engine", "key": "a" * 64, "what": "the content of engine.bin changed"}


@pytest.mark.parametrize("option", [["--max-age", "30d"], ["--max-size", "2KB"]])
def test_prune_removes_what_was_asked_for_and_dry_run_only_says_so(cache, option):
    dry = ditto(cache, "prune", *option, "--dry-run")
    assert "would remove 1 entry, 1.5 kB" in dry.stdout
    assert len(cache.entries()) == 2
    assert "removed 1 entry, 1.5 kB" in ditto(cache, "prune", *option).stdout
    assert [e.key for e in cache.entries()] == ["b" * 64]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prune"], "say what to remove"),
        (["prune", "--max-size", "10XB"], "cannot read the size '10XB'"),
        (["prune", "--max-age", "30"], "cannot read the time '30'"),
    ],
)
def test_bad_input_exits_2_with_the_remedy(cache, arguments, message):
    done = ditto(cache, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(cache.entries()) == 2


def test_a_cache_that_is_a_file_exits_2_with_one_line(tmp_path):
    (tmp_path / "file").touch()
    done = ditto(Cache(tmp_path / "file"), "prune", "--max-size", "1GB")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "is not a directory" in done.stderr
