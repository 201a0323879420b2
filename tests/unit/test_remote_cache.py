"""A cache in front of a real object store: moto's S3 server on the loopback, spoken to by s3fs."""

import json
import os
import subprocess
import sys
import textwrap
import uuid

import pytest

from ditto_core.cache import Cache
from ditto_core.cache._remote import DamagedRemote, Remote
from ditto_core.errors import CacheError

s3fs = pytest.importorskip("s3fs")
server_module = pytest.importorskip("moto.server")

KEY = "ab" * 32
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def endpoint():
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def store(endpoint, monkeypatch):
    """The URL of an empty store, and a file system that looks into it."""
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(name, value)
    fs = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    bucket = f"b{uuid.uuid4().hex}"
    fs.mkdir(bucket)
    return f"s3://{bucket}/ditto", fs


def write(**files):
    def build(folder):
        for name, content in files.items():
            path = folder / name.replace("__", "/")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)

    return build


def never(folder):
    pytest.fail("built, though the store has it")


def get(cache, build, key=KEY):
    events = []
    path = cache.get_or_build("engine", key, build, describe={"model": "m"}, on_event=events.append)
    return path, events


def contents(path):
    return {f.relative_to(path).as_posix(): f.read_bytes() for f in path.rglob("*") if f.is_file()}


def test_what_one_machine_builds_another_fetches(store, tmp_path):
    url, _ = store
    first, said = get(Cache(tmp_path / "a", url), write(engine=b"bits", deep__weights=b"w" * 5000))
    second, heard = get(Cache(tmp_path / "b", url), never)
    assert contents(second) == contents(first)
    assert said == heard == []
    assert Cache(tmp_path / "b").verify() == []


def test_an_entry_in_the_local_cache_is_not_asked_for_again(store, tmp_path):
    url, fs = store
    cache = Cache(tmp_path / "a", url)
    get(cache, write(engine=b"bits"))
    fs.rm(url, recursive=True)
    assert get(cache, never)[1] == []


def test_files_that_entries_share_are_stored_once(store, tmp_path):
    url, fs = store
    cache = Cache(tmp_path / "a", url)
    get(cache, write(engine=b"one", weights=b"shared"))
    get(cache, write(engine=b"two", weights=b"shared"), key="cd" * 32)
    assert len(fs.ls(f"{url}/objects")) == 3


def object_holding(fs, url, content):
    (found,) = [path for path in fs.ls(f"{url}/objects") if fs.cat_file(path) == content]
    return found


@pytest.mark.parametrize("harm", ["changed", "cut", "gone", "longer"])
def test_damage_in_the_store_is_noticed_built_anew_and_mended(store, tmp_path, harm):
    url, fs = store
    get(Cache(tmp_path / "a", url), write(engine=b"bits"))
    victim = object_holding(fs, url, b"bits")
    if harm == "gone":
        fs.rm_file(victim)
    else:
        fs.pipe_file(victim, {"changed": b"tibs", "cut": b"b", "longer": b"bits" * 1000}[harm])
    path, said = get(Cache(tmp_path / "b", url), write(engine=b"bits"))
    assert (path / "engine").read_bytes() == b"bits"
    assert len(said) == 1
    assert "is damaged" in said[0]
    assert "it is built here and replaced there" in said[0]
    assert get(Cache(tmp_path / "c", url), never)[1] == []


def test_a_manifest_that_points_outside_the_entry_is_refused(store, tmp_path):
    from ditto_core.system.fingerprint import fingerprint

    url, fs = store
    get(Cache(tmp_path / "a", url), write(engine=b"bits"))
    manifest = f"{url}/engine/{KEY}.json"
    body = json.loads(fs.cat_file(manifest))
    del body["digest"]
    body["files"] = {"../../evil": body["files"]["engine"]}
    fs.pipe_file(manifest, json.dumps({**body, "digest": fingerprint(body)}).encode())
    _, said = get(Cache(tmp_path / "b" / "c", url), write(engine=b"mine"))
    assert "names the file '../../evil'" in said[0]
    assert not list(tmp_path.rglob("evil"))


class Counted:
    """Says what is fetched, and passes everything on."""

    def __init__(self, fs):
        self.fs, self.fetched = fs, []

    def __getattr__(self, name):
        if name in ("get_file", "cat_file"):
            return lambda path, *a, **k: (self.fetched.append(path), getattr(self.fs, name)(path, *a, **k))[1]
        return getattr(self.fs, name)


def test_what_has_another_size_than_its_manifest_says_is_not_downloaded(store, tmp_path):
    url, fs = store
    get(Cache(tmp_path / "a", url), write(engine=b"bits"))
    fs.pipe_file(object_holding(fs, url, b"bits"), b"x" * 5000)
    remote = Remote(url)
    counted = Counted(fs)
    remote.__dict__["_opened"] = (counted, url.removeprefix("s3://"))
    with pytest.raises(DamagedRemote, match="engine has 5000 bytes, expected 4"):
        remote.fetch("engine", KEY, tmp_path / "c")
    assert [name.rpartition("/")[2] for name in counted.fetched] == [f"{KEY}.json"]


def test_a_manifest_that_names_another_object_by_a_path_is_refused(store, tmp_path):
    from ditto_core.system.fingerprint import fingerprint

    url, fs = store
    get(Cache(tmp_path / "a", url), write(engine=b"bits"))
    manifest = f"{url}/engine/{KEY}.json"
    body = json.loads(fs.cat_file(manifest))
    del body["digest"]
    body["files"]["engine"]["sha256"] = "../../secret"
    fs.pipe_file(manifest, json.dumps({**body, "digest": fingerprint(body)}).encode())
    _, said = get(Cache(tmp_path / "b", url), write(engine=b"mine"))
    assert "names the object '../../secret'" in said[0]


def test_a_manifest_without_end_is_not_read(store, tmp_path, monkeypatch):
    monkeypatch.setattr("ditto_core.cache._remote.LARGEST_MANIFEST", 100)
    url, _ = store
    get(Cache(tmp_path / "a", url), write(engine=b"bits"))
    _, said = get(Cache(tmp_path / "b", url), write(engine=b"mine"))
    assert "expected at most 100" in said[0]


def test_an_entry_without_its_manifest_is_absent(store, tmp_path):
    url, fs = store
    get(Cache(tmp_path / "a", url), write(engine=b"bits"))
    fs.rm_file(f"{url}/engine/{KEY}.json")
    path, said = get(Cache(tmp_path / "b", url), write(engine=b"new"))
    assert (path / "engine").read_bytes() == b"new"
    assert said == []


PUSH = """
    import sys
    from pathlib import Path
    from ditto_core.cache import Cache

    def build(folder):
        (folder / "a").write_bytes(sys.argv[3].encode() * 300_000)
        (folder / "b").write_bytes(sys.argv[3].encode() * 200_000)
        Path(sys.argv[1], "ready").touch()
        other = Path(sys.argv[4], "ready")
        while not other.exists():  # both have missed, so both push
            pass

    Path(sys.argv[1]).mkdir()
    Cache(Path(sys.argv[1]), sys.argv[2]).get_or_build("engine", "ab" * 32, build, describe={}, on_event=print)
"""


def test_two_machines_that_push_one_key_at_once_leave_one_whole_entry(store, tmp_path):
    url, _ = store
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    folders = [str(tmp_path / "x"), str(tmp_path / "y")]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PUSH), folders[i], url, "xy"[i], folders[1 - i]],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in (0, 1)
    ]
    said = [child.communicate(timeout=120)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert said == ["", ""]
    path, _ = get(Cache(tmp_path / "third", url), never)
    assert (path / "a").read_bytes()[:1] == (path / "b").read_bytes()[:1]


def test_a_bucket_that_is_not_there_costs_a_note_and_is_not_made(store, tmp_path):
    _, fs = store
    path, (said,) = get(Cache(tmp_path / "a", "s3://no-such-bucket-here/x"), write(engine=b"bits"))
    assert (path / "engine").read_bytes() == b"bits"
    assert said.startswith("s3://no-such-bucket-here/x cannot be written (")
    assert said.endswith("is in the local cache only")
    assert not fs.exists("no-such-bucket-here")


def test_a_server_that_does_not_answer_costs_notes_and_not_the_build(tmp_path):
    path, (read, written) = get(Cache(tmp_path / "a", "http://127.0.0.1:9/x"), write(engine=b"bits"))
    assert (path / "engine").read_bytes() == b"bits"
    assert read.startswith("http://127.0.0.1:9/x cannot be read (Client")
    assert read.endswith(f"engine/{KEY[:12]} is built here")
    assert "cannot be written" in written


def test_any_fsspec_url_will_do(tmp_path):
    url = (tmp_path / "share").as_uri()
    get(Cache(tmp_path / "a", url), write(engine=b"bits", deep__weights=b"w"))
    assert get(Cache(tmp_path / "b", url), never)[1] == []


def test_a_url_that_nothing_opens_is_an_error_with_the_remedy(tmp_path):
    with pytest.raises(CacheError, match=r"cannot open the cache nosuch://x: .*pytest-ditto-engine\[remote\]"):
        get(Cache(tmp_path / "a", "nosuch://x"), write(engine=b"bits"))


def test_a_place_is_a_directory_or_a_url(tmp_path, monkeypatch):
    monkeypatch.setenv("DITTO_CACHE_DIR", str(tmp_path / "env"))
    assert Cache.at() == Cache(tmp_path / "env")
    assert Cache.at("s3://b/x") == Cache(tmp_path / "env", "s3://b/x")
    assert Cache.at(tmp_path / "own") == Cache(tmp_path / "own")
    monkeypatch.setenv("DITTO_CACHE_DIR", "s3://b/y")
    assert Cache.at().remote == "s3://b/y"
    assert Cache.at().root.name == "ditto_core"
