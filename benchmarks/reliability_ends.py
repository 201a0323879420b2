"""Work that ends badly, for the child processes of :mod:`reliability`; run with a folder, it fills its disk."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SLEEP = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); time.sleep(600)"


def fine() -> str:
    return "fine"


def abort(file: str) -> None:
    os.abort()


def segfault(file: str) -> None:
    ctypes.string_at(0)


def killed(file: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave(file: str) -> None:
    os._exit(0)


def leave_with_code(file: str) -> None:
    os._exit(3)


def hang(file: str) -> None:
    Path(file).write_text(f"{os.getpid()}\n")
    while True:
        time.sleep(0.01)


def fork_and_hang(file: str) -> None:
    """Start a process of its own, which must not outlive the call either, and wait for it."""
    subprocess.run([sys.executable, "-c", SLEEP, file], check=False)


def use_memory(file: str) -> None:
    """Ask for memory until there is none: of this process, not of the machine."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    held = []
    while True:
        held.append(bytearray(64 << 20))


def print_without_end(file: str) -> None:
    while True:
        print("line " * 20)
        time.sleep(0.0005)


def written(folder: Path) -> dict[str, Callable[[], Any]]:
    """Return everything that writes files, by name."""
    import torch

    from ditto_core.cache import Cache
    from ditto_core.compare.dumps import compare_dumps
    from ditto_core.gates.journal import Journal
    from ditto_core.report import history
    from ditto_core.report.write import write_report
    from ditto_core.session import SessionInfo
    from ditto_core.sites import Tap
    from ditto_core.stepping.dumps import compare_offline
    from ditto_core.stepping.floor import Noise, write_floor
    from ditto_core.trace import TraceWriter

    scratch = Path(os.environ["TMPDIR"])
    held = {f"model.layers.{i}.mlp": torch.randn(1, 3, 64) for i in range(20)}
    torch.save(held, scratch / "a.pt")
    torch.save({name: tensor + 1e-3 for name, tensor in held.items()}, scratch / "b.pt")
    run = compare_offline(compare_dumps(scratch / "a.pt", scratch / "b.pt"))
    taps = [Tap(name, value=name) for name in held]
    info = SessionInfo(label="eager", backend="eager", dtype="float32", model="tiny", facts={})

    def trace() -> None:
        with TraceWriter(folder / "trace", info, taps) as writer:
            writer.write_step({"input_ids": torch.arange(3)[None]}, {"logits": torch.randn(1, 3, 5)}, held, tokens=[1])

    def build(made: Path) -> None:
        for i in range(5):
            (made / f"part{i}").write_bytes(b"x" * 10_000)

    kinds = ("json", "html", "markdown", "junit")
    reports = {kind: lambda kind=kind: write_report(kind, {"": run}, folder / f"r.{kind}") for kind in kinds}
    return {
        **reports,
        "trace": trace,
        "cache": lambda: Cache(folder / "cache").get_or_build("engine", "k", build, describe={}),
        "noise floor": lambda: write_floor(folder / "floor.json", {"a": {0: Noise(1e-3)}}),
        "journal": lambda: Journal(folder / "j.jsonl", str, str).append("a", "b" * 100),
        "history": lambda: history.update(folder / "h.jsonl", {"test": run}),
    }


def main() -> None:
    """Write everything; each is there as a whole, or refused in one line and not there."""
    from ditto_core.errors import DittoError

    folder = Path(sys.argv[1])
    said = {}
    for name, write in written(folder).items():
        try:
            write()
            said[name] = "written"
        except (DittoError, OSError) as error:
            said[name] = f"{type(error).__name__}: {error}"
            assert "\n" not in said[name], said[name]
    print(json.dumps(said))


if __name__ == "__main__":
    main()
