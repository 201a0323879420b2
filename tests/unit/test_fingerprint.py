import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ditto_core.errors import ModelError
from ditto_core.system import fingerprint as fp
from ditto_core.system.fingerprint import DigestMemo, directory_digest, file_digest, fingerprint, module_digest


@pytest.fixture
def settled(monkeypatch):
    """Files count as settled at once; without it the memo waits two seconds."""
    monkeypatch.setattr(fp, "RACY_NS", -(10**12))


@pytest.fixture
def reads(monkeypatch):
    """The paths that were read in full."""
    seen, real = [], fp.hash_file
    monkeypatch.setattr(fp, "hash_file", lambda path: seen.append(path) or real(path))
    return seen


def test_fingerprint_is_independent_of_the_order_of_keys_but_not_of_values():
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})
    assert fingerprint("ab", "c") != fingerprint("a", "bc")


@pytest.mark.parametrize("size", [0, 1, fp.BLOCK - 1, fp.BLOCK, fp.BLOCK + 1])
def test_file_digest_is_the_sha256_of_the_bytes(tmp_path, size):
    content = os.urandom(size)
    (tmp_path / "f").write_bytes(content)
    assert file_digest(tmp_path / "f") == hashlib.sha256(content).hexdigest()


def test_an_unchanged_file_is_read_once(tmp_path, settled, reads):
    (tmp_path / "f").write_bytes(b"abc")
    digests = {file_digest(tmp_path / "f", DigestMemo(tmp_path / "memo")) for _ in range(3)}
    assert digests == {hashlib.sha256(b"abc").hexdigest()}
    assert len(reads) == 1


def test_a_file_rewritten_with_its_old_size_and_mtime_is_read_again(tmp_path, settled, reads):
    memo, path = DigestMemo(tmp_path / "memo"), tmp_path / "f"
    path.write_bytes(b"abc")
    before = path.stat()
    file_digest(path, memo)
    time.sleep(0.02)
    path.write_bytes(b"abd")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert file_digest(path, memo) == hashlib.sha256(b"abd").hexdigest()


def test_another_name_of_a_file_is_not_read_and_a_change_after_it_is(tmp_path, settled, reads):
    memo, path = DigestMemo(tmp_path / "memo"), tmp_path / "f"
    path.write_bytes(b"abc")
    expected = memo.digest(path)
    for name in ("one", "two"):
        (tmp_path / name).hardlink_to(path)
    (tmp_path / "two").unlink()
    assert memo.unread([path, tmp_path / "one"]) == 0
    assert memo.digest(tmp_path / "one") == memo.digest(path) == expected
    assert reads == [path]
    path.write_bytes(b"abd")
    assert memo.unread([path, tmp_path / "one"]) == 6
    assert memo.digest(tmp_path / "one") == hashlib.sha256(b"abd").hexdigest()


def test_a_file_with_another_name_and_other_bytes_is_read(tmp_path, settled):
    memo, path = DigestMemo(tmp_path / "memo"), tmp_path / "f"
    path.write_bytes(b"abc")
    memo.digest(path)
    time.sleep(0.02)
    (tmp_path / "one").hardlink_to(path)
    path.write_bytes(b"abd")
    assert memo.digest(path) == hashlib.sha256(b"abd").hexdigest()


def test_files_without_an_inode_of_their_own_are_read_each_time(tmp_path, settled, reads, monkeypatch):
    monkeypatch.setattr(fp, "_identity", lambda path: dict.fromkeys(("size", "mtime_ns", "ctime_ns", "ino", "dev"), 0))
    memo = DigestMemo(tmp_path / "memo")
    for name, content in {"a": b"abc", "b": b"abd"}.items():
        (tmp_path / name).write_bytes(content)
        assert memo.digest(tmp_path / name) == hashlib.sha256(content).hexdigest()
    assert len(reads) == 2


def test_small_files_are_read_each_time(tmp_path, settled, reads):
    memo = DigestMemo(tmp_path / "memo", least=3)
    for name, content in {"small": b"ab", "large": b"abc"}.items():
        (tmp_path / name).write_bytes(content)
        for _ in range(2):
            memo.digest(tmp_path / name)
    assert [path.name for path in reads] == ["small", "small", "large"]


def test_a_file_that_changed_just_now_is_not_remembered(tmp_path, reads):
    (tmp_path / "f").write_bytes(b"abc")
    for _ in range(2):
        file_digest(tmp_path / "f", DigestMemo(tmp_path / "memo"))
    assert len(reads) == 2


def test_a_damaged_memo_costs_time_and_not_correctness(tmp_path, settled):
    memo = DigestMemo(tmp_path / "memo")
    (tmp_path / "f").write_bytes(b"abc")
    expected = file_digest(tmp_path / "f", memo)
    (note,) = (tmp_path / "memo").iterdir()
    for text in ("", "[]", json.dumps({**json.loads(note.read_text()), "sha256": None})):
        note.write_text(text)
        assert file_digest(tmp_path / "f", memo) == expected


def test_a_memo_that_cannot_be_written_is_done_without(tmp_path, settled):
    (tmp_path / "file").write_bytes(b"abc")
    expected = hashlib.sha256(b"abc").hexdigest()
    assert file_digest(tmp_path / "file", DigestMemo(tmp_path / "file" / "memo")) == expected


def test_directory_digest_covers_names_and_content_of_matching_files_only(tmp_path):
    def digest():
        return directory_digest(tmp_path, ["*.safetensors", "*.json"])

    (tmp_path / "model.safetensors").write_bytes(b"w")
    (tmp_path / "config.json").write_text("{}")
    first = digest()
    (tmp_path / "README.md").write_text("hello")
    assert digest() == first
    (tmp_path / "model.safetensors").write_bytes(b"v")
    assert digest() != first
    (tmp_path / "model.safetensors").write_bytes(b"w")
    assert digest() == first
    (tmp_path / "config.json").rename(tmp_path / "other.json")
    assert digest() != first


def test_a_link_counts_by_the_content_behind_it(tmp_path):
    (tmp_path / "blob").write_bytes(b"w")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "model.bin").symlink_to(tmp_path / "blob")
    (tmp_path / "b" / "model.bin").write_bytes(b"w")
    assert directory_digest(tmp_path / "a") == directory_digest(tmp_path / "b")


def test_what_cannot_be_read_is_one_clear_line(tmp_path):
    with pytest.raises(ModelError, match=r"no file below .* matches \*\.safetensors"):
        directory_digest(tmp_path, ["*.safetensors"])
    with pytest.raises(ModelError, match=r"cannot read .*gone: No such file"):
        file_digest(tmp_path / "gone")


class Small(torch.nn.Module):
    def __init__(self, eps: float = 1e-5, dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(3, 2, dtype=dtype)
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.eps = eps


class Other(Small):
    def forward(self, x):
        return x


def test_module_digest_is_the_same_for_the_same_module():
    assert module_digest(Small()) == module_digest(Small())


def changed(edit):
    module = Small()
    with torch.no_grad():
        edit(module)
    return module


@pytest.mark.parametrize(
    "module",
    [
        changed(lambda m: m.linear.weight[0, 0].add_(1e-6)),
        changed(lambda m: m.scale.add_(1)),
        changed(lambda m: setattr(m, "linear", torch.nn.Linear(3, 2, bias=False))),
        changed(lambda m: m.eval()),
        Small(eps=1e-6),
        Small(dtype=torch.bfloat16),
        Other(),
    ],
    ids=["weight", "buffer", "structure", "mode", "epsilon", "dtype", "class"],
)
def test_module_digest_sees_every_change_of_what_is_computed(module):
    assert module_digest(module) != module_digest(Small())


def read_setting(x):
    return x * SETTINGS["factor"]


SETTINGS = {"factor": 1.0}


class Holding(torch.nn.Module):
    """Keeps what it computes with neither as a parameter nor as a plain setting."""

    factor: object = 1.0

    def __init__(self, **held):
        super().__init__()
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x):
        return read_setting(x)


def closed_over(factor):
    class Closed(torch.nn.Module):
        def forward(self, x):
            return x * factor

    return Closed()


def patched(factor):
    module = Holding()
    module.forward = lambda x: x * factor
    return module


def hooked(factor):
    module = Holding()
    module.register_forward_hook(lambda module, args, result: result * factor)
    return module


def with_global(factor):
    """The digest, not the module: the global is one for both."""
    SETTINGS["factor"] = factor
    return module_digest(Holding())


def with_class_attribute(factor):
    Holding.factor = factor
    return module_digest(Holding())


KINDS = {
    "tensor": lambda v: Holding(held=torch.tensor([v, 0.0])),
    "dict": lambda v: Holding(held={"a": [1, {"b": v}]}),
    "array": lambda v: Holding(held=np.array([v, 0.0])),
    "scalar": lambda v: Holding(held=np.float32(v)),
    "set": lambda v: Holding(held={"a", str(v)}),
    "object": lambda v: Holding(held=SimpleNamespace(factor=v)),
    "slots": lambda v: Holding(held=Fraction(int(v), 7)),
    "function": lambda v: Holding(held=(lambda x: x * 1.0) if v == 1.0 else (lambda x: x * 3.0)),
    "builtin": lambda v: Holding(held=torch.relu if v == 1.0 else torch.tanh),
    "partial": lambda v: Holding(held=partial(torch.mul, v)),
    "method": lambda v: Holding(held=SimpleNamespace(f=Fraction(int(v), 7).limit_denominator)),
    "module in a list": lambda v: Holding(held=[torch.nn.Hardtanh(0.0, v)]),
    "closure": closed_over,
    "patched forward": patched,
    "hook": hooked,
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_module_digest_sees_state_that_is_no_parameter(make):
    first, again, other = (module_digest(make(v)) for v in (1.0, 1.0, 3.0))
    assert first == again
    assert first != other


@pytest.mark.parametrize("digest", [with_global, with_class_attribute])
def test_module_digest_sees_what_lies_outside_of_the_module(digest):
    first, other, again = (digest(v) for v in (1.0, 3.0, 1.0))
    assert first == again
    assert first != other


def test_state_that_holds_itself_and_the_process_ends():
    held: dict = {"log": logging.getLogger(__name__), "lock": threading.Lock(), "environment": os.environ}
    held["self"] = held
    assert module_digest(Holding(held=held)) == module_digest(Holding(held=held))


def test_a_set_of_what_leads_back_to_it_has_a_state():
    family = type("Family", (), {})
    family.members = {family, type("Other", (family,), {"factor": 2.0})}
    assert module_digest(Holding(held=family)) == module_digest(Holding(held=family))


def test_module_digest_is_the_same_in_another_process_whatever_its_hashes_are(tmp_path):
    code = (
        "import torch; from models import bert, llama; from ditto_core.system.fingerprint import module_digest;"
        "print(module_digest(llama()), module_digest(bert()[0]))"
    )
    tests = str(Path(__file__).parents[1])

    def printed(seed):
        path = os.pathsep.join([tests, str(Path(tests).parent)])
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout

    assert printed("1") == printed("2")
