"""Large files of the cache are read when they changed, and by `ditto cache verify`."""

import json

import pytest

from ditto_core.cache import Cache
from ditto_core.system import fingerprint


@pytest.fixture(autouse=True)
def every_file_is_large_and_settled(monkeypatch):
    monkeypatch.setattr("ditto_core.cache._place.LARGE", 3)
    monkeypatch.setattr("ditto_core.system.fingerprint.RACY_NS", -(10**12))


def get(cache, events=None):
    def build(folder):
        (folder / "engine.bin").write_bytes(b"engine")

    told = None if events is None else events.append
    return cache.get_or_build("engine", "ab" * 32, build, describe={}, on_event=told)


def test_a_large_file_is_read_again_only_after_it_changed(tmp_path, monkeypatch):
    read, real = [], fingerprint.hash_file
    monkeypatch.setattr(fingerprint, "hash_file", lambda path: read.append(path.name) or real(path))
    cache, events = Cache(tmp_path), []
    for _ in range(3):
        get(cache)
    assert read == ["engine.bin"], "by the build alone"
    (get(cache) / "engine.bin").write_bytes(b"engin3")
    get(cache, events=events)
    assert "is damaged (the content of engine.bin changed)" in events[0]


def test_a_disk_that_lost_a_byte_behind_our_back_is_found_by_verify_and_then_rebuilt(tmp_path):
    cache = Cache(tmp_path)
    engine = get(cache) / "engine.bin"
    engine.write_bytes(b"engin3")
    (note,) = (tmp_path / "digests").iterdir()  # as if the change had left no trace in the file's times
    stat = {name: getattr(engine.stat(), f"st_{name}") for name in json.loads(note.read_text())["identity"]}
    note.write_text(json.dumps({**json.loads(note.read_text()), "identity": stat}))
    assert (get(cache) / "engine.bin").read_bytes() == b"engin3"
    assert [p.what for p in cache.verify()] == ["the content of engine.bin changed"]
    assert (get(cache) / "engine.bin").read_bytes() == b"engine"
