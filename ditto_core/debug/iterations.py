"""What all the tools share: numbered iterations that are judged, sorted, recorded, resumed and cleaned up after."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from ditto_core.debug.check import Check, Verdict, tail
from ditto_core.debug.journal import DEFAULT_NAME, Journal
from ditto_core.errors import UsageError

Say = Callable[[str], None]
Made = Verdict | Mapping[str, Any]
Make = Callable[[], Made]
"""Makes the iteration's artifact. A verdict that it returns stands; else the check command decides and facts return."""


@dataclass(frozen=True)
class Until:
    """When a loop ends: at the first ``good`` or ``bad`` iteration, or after a number of them."""

    word: str
    count: int = 0

    @classmethod
    def parse(cls, text: str) -> Until:
        """Read ``good``, ``bad`` or a number. Raises :class:`UsageError`."""
        if text in ("good", "bad"):
            return cls(text)
        if re.fullmatch("[0-9]{1,18}", text) and int(text) > 0:
            return cls("count", int(text))
        raise UsageError(f"--until got {text!r}, expected good, bad or a number of iterations")

    def reached(self, done: int, last: Verdict) -> bool:
        """Tell whether the loop ends after ``done`` iterations, of which ``last`` is the last."""
        return done >= self.count if self.word == "count" else last.word == self.word


@dataclass(frozen=True)
class IterationOptions:
    """The options common to Polygraphy's tools, with the same names.

    ``check``: what judges. ``iter_artifact``: where each iteration's artifact is written. ``artifacts``:
    files that are moved to ``art_dir``/good or /bad after each iteration. ``iter_info``: JSON about the iteration that
    runs. ``load_replay``, ``save_replay``: verdicts of an earlier run, and where those of this run are kept.
    """

    check: Check | None = None
    iter_artifact: Path | None = None
    artifacts: tuple[Path, ...] = ()
    art_dir: Path = Path("ditto_debug_artifacts")
    iter_info: Path = Path("iteration.json")
    remove_intermediate: bool = True
    show_output: bool = False
    hide_fail_output: bool = False
    load_replay: Path | None = None
    save_replay: Path | None = None


@dataclass
class Iterations:
    """Runs iterations. Use it in a ``with`` block: an end without an error removes what only the search needed.

    After an error, a Ctrl-C or a kill the replay stays, and the same command does not repeat what was judged.
    """

    options: IterationOptions
    search: str
    say: Say = lambda message: None
    companions: Sequence[Path] = ()
    count: int = 0
    judged: int = 0
    seconds: float = 0.0
    journal: Journal = field(init=False)

    def __enter__(self) -> Iterations:
        if self.options.show_output and self.options.hide_fail_output:
            raise UsageError("--show-output and --hide-fail-output exclude each other, expected one of them")
        path, made = self.options.save_replay or Path(DEFAULT_NAME), self.options.iter_artifact
        if made is not None and made.exists() and not path.is_file() and self.options.load_replay is None:
            raise UsageError(f"{made} exists and would be overwritten: name another --iter-artifact")
        self.journal = Journal.open(path, self.search, self.options.load_replay)
        if self.journal.resumed:
            self.say(f"going on from {self.journal.resumed} verdicts of {self.options.load_replay or path}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.options.remove_intermediate:
            self._clean()
        if not self.journal.verdicts or (kind is None and self.options.save_replay is None):
            self.journal.remove()
        elif kind is not None:
            self.say(
                f"{len(self.journal.verdicts)} verdicts are in {self.journal.path}; the same command resumes from there"
            )

    def run(self, key: str, make: Make, what: str = "", info: Mapping[str, Any] | None = None) -> Verdict:
        """Make and judge one iteration, or return what an earlier run of this search judged under ``key``."""
        index, self.count = self.count, self.count + 1
        known = self.journal.verdicts.get(key)
        if known is not None:
            self.say(f"{index}: {known.word}, from the replay ({what})")
            return known
        data = {"iteration": index, "what": what, **(info or {})}
        self.options.iter_info.write_text(json.dumps(data, indent=1) + "\n")
        start = time.perf_counter()
        made = make()
        verdict = made if isinstance(made, Verdict) else replace(self._check(index, what), facts=made)
        verdict = replace(verdict, seconds=round(time.perf_counter() - start, 3))
        self._sort(index, verdict)
        self.journal.add(key, verdict)
        self.judged, self.seconds = self.judged + 1, self.seconds + verdict.seconds
        self.say(f"{index}: {verdict.word} in {verdict.seconds:.1f} s, {verdict.reason} ({what})")
        return verdict

    def pointless(self, message: str) -> UsageError:
        """Return the error that ends a search which only another command can mend.

        Its verdicts go, unless they were asked for: the changed command would be refused because of them.
        """
        if self.options.save_replay is None:
            self.journal.verdicts.clear()
        return UsageError(message)

    def judge(self, check: Check, environment: Mapping[str, str], what: str = "") -> Verdict:
        """Run a check, and show the end of its output as the options say."""
        verdict, output = check.run(environment, what)
        if output and (self.options.show_output or not (verdict.good or self.options.hide_fail_output)):
            self.say(f"output of the check:{tail(output)}")
        return verdict

    def _check(self, index: int, what: str) -> Verdict:
        if self.options.check is None:
            raise UsageError("nothing judges the iterations: give --check COMMAND or --interactive")
        return self.judge(self.options.check, {"DITTO_ITERATION": str(index)}, what)

    def _sort(self, index: int, verdict: Verdict) -> None:
        """Move the artifacts to the good or the bad folder, as ``NAME_ITERATION_rcCODE.EXT``."""
        folder = self.options.art_dir / verdict.word
        for path in self.options.artifacts:
            if not path.exists():
                self.say(f"artifact {path} was not written in iteration {index}")
                continue
            folder.mkdir(parents=True, exist_ok=True)
            code = "" if verdict.returncode is None else f"_rc{verdict.returncode}"
            shutil.move(path, free_name(folder / f"{path.stem}_{index:04d}{code}{path.suffix}"))

    def _clean(self) -> None:
        for path in (self.options.iter_info, self.options.iter_artifact, *self.companions):
            if path is not None:
                with suppress(OSError):
                    path.unlink(missing_ok=True)


def free_name(path: Path) -> Path:
    """Return ``path``, or the first ``path.N`` that is free: an earlier search's artifacts are never overwritten."""
    candidate, number = path, 1
    while candidate.exists():
        candidate, number = path.with_name(f"{path.stem}.{number}{path.suffix}"), number + 1
    return candidate
