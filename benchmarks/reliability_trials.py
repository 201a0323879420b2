"""What is done to the project, one trial at a time: a trial returns what was found, ``ok`` tells whether it held."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from reliability_pytest import PLACES, build_once, interrupt_pytest

from ditto_core.cache import Cache
from ditto_core.errors import DittoError
from ditto_core.system.isolate import run_isolated

HERE = Path(__file__).parent
Trial = Callable[[Path], dict[str, Any]]

BUILDER = """
    import sys, time
    from pathlib import Path
    from ditto_core.cache import Cache
    root, number = sys.argv[1:]
    cache = Cache(root)

    def build(folder):
        for i in range(20):
            (folder / f"part{i}").write_bytes(bytes([i]) * 50_000)

    print("started", flush=True)
    while True:
        for key in "abc":
            path = cache.get_or_build("engine", key, build, describe={})
            for i in range(20):
                assert (path / f"part{i}").read_bytes() == bytes([i]) * 50_000
        cache.prune(max_size=0)
"""
RUNNER = """
    import sys, time
    from ditto_core.system.isolate import run_isolated
    sys.path.insert(0, sys.argv[2])
    run_isolated("reliability_ends:hang", {"file": sys.argv[1]})
"""


def started(script: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start a script with this process's import path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), **options.pop("env", {})}
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def kill(seed: int) -> Trial:
    """Kill one of two processes that build, read and prune one cache; another start has to find it sound."""

    def trial(work: Path) -> dict[str, Any]:
        chance = random.Random(seed)
        pair = [started(BUILDER, work / "cache", i) for i in range(2)]
        for process in pair:
            assert process.stdout is not None
            process.stdout.readline()
        time.sleep(chance.uniform(0, 0.3))
        pair[0].kill()
        time.sleep(0.1)
        survivor = pair[1].poll()
        for process in pair:
            process.kill()
            process.wait()
        cache = Cache(work / "cache")
        cache.get_or_build("engine", "next", lambda folder: (folder / "x").write_text("x") and None, describe={})
        problems = [problem.what for problem in cache.verify()]
        left = [path.name for path in cache.root.glob("*/.*.tmp")]
        return {"ok": survivor is None and not problems and not left, "problems": problems, "left": left}

    return trial


def full_disk(size: int) -> Trial:
    """Write everything that is written onto a disk of so many bytes (tmpfs; needs the right to mount)."""

    def trial(work: Path) -> dict[str, Any]:
        disk, scratch = work / "disk", work / "scratch"
        disk.mkdir()
        scratch.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
        try:
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                "TMPDIR": str(scratch),
            }
            command = [sys.executable, HERE / "reliability_ends.py", disk]
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            left = [str(path.relative_to(work)) for path in disk.rglob("*.tmp")]
        finally:
            subprocess.run(["umount", disk], check=True)
        said = json.loads(done.stdout) if done.returncode == 0 else {}
        return {"ok": done.returncode == 0 and not left, "said": said, "left": left, "error": done.stderr[-500:]}

    return trial


ENDS = {
    "abort": "signal 6",
    "segfault": "signal 11",
    "killed": "signal 9",
    "leave": "without a result",
    "leave_with_code": "code 3",
    "hang": "still running",
    "fork_and_hang": "still running",
    "use_memory": "(MemoryError|signal 9|signal 6|code)",
    "print_without_end": "still running",
}


def crash(end: str) -> Trial:
    """Let native work end in some way in a child process."""

    def trial(work: Path) -> dict[str, Any]:
        sys.path.insert(0, str(HERE))
        before, patience = children(), 5 if ENDS[end] == "still running" else 60
        start = time.perf_counter()
        file = str(work / "pid")
        environment = {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
        try:
            run_isolated(f"reliability_ends:{end}", {"file": file}, timeout=patience, env=environment)
            said = "no error"
        except DittoError as error:
            said = str(error).splitlines()[0]
        seconds = time.perf_counter() - start
        again = run_isolated("reliability_ends:fine", {}, env=environment)
        alive = [pid for pid in noted(Path(file)) if is_alive(pid)]
        ok = bool(re.search(ENDS[end], said)) and again == "fine" and not alive and children() == before
        return {"ok": ok, "said": said, "alive": alive, "end_seconds": round(seconds, 2)}

    return trial


def interrupt(seed: int) -> Trial:
    """Press Ctrl-C while a child process works; parent and child have to be gone, and nothing left behind."""

    def trial(work: Path) -> dict[str, Any]:
        temporary = work / "temporary"
        temporary.mkdir()
        parent = started(RUNNER, work / "pid", HERE, env={"TMPDIR": str(temporary)})
        while not noted(work / "pid"):
            time.sleep(0.01)
        time.sleep(random.Random(seed).uniform(0, 0.2))
        start = time.perf_counter()
        parent.send_signal(signal.SIGINT)
        parent.wait(timeout=60)
        child = noted(work / "pid")[0]
        while is_alive(child) and time.perf_counter() - start < 30:
            time.sleep(0.005)
        seconds = time.perf_counter() - start
        left = [path.name for path in temporary.iterdir()]
        ok = not is_alive(child) and not left and parent.returncode != 0
        return {"ok": ok, "gone_after_seconds": round(seconds, 3), "left": left}

    return trial


def noted(file: Path) -> list[int]:
    """Return the processes that wrote themselves down."""
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH):
            return False
        raise


def children() -> set[str]:
    """Return this process's children."""
    return {child for path in Path("/proc/self").glob("task/*/children") for child in path.read_text().split()}


def trials(count: int) -> Iterator[tuple[str, Trial]]:
    """Yield every trial but those of fuzzing, by name; ``count`` of the kinds that are drawn at random."""
    for seed in range(count):
        yield f"kill {seed}", kill(seed)
    for pages in (1, 2, 4, 8, 16, 24, 32, 64, 512):
        yield f"disk {4 * pages} KiB", full_disk(4096 * pages)
    for end in ENDS:
        yield f"crash {end}", crash(end)
    for seed in range(max(1, count // 5)):
        yield f"interrupt {seed}", interrupt(seed)
    for place in PLACES:
        for workers in (0, 2):
            yield f"ctrl-c {place} {workers}", interrupt_pytest(place, workers)
    yield "once 8", build_once(8)
