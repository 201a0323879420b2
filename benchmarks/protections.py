"""Take out each protection once and see its test fail.

python benchmarks/protections.py [--only WORD] [--table]

A protection is a piece of code; without it the test has to fail. The code is changed in a copy of the project, in a
forked process, so that torch is loaded once. Exit code 1 when a test passes without what it protects.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 120
"""Seconds until a test counts as failed: without a lock it may never end."""
PARTS = ("ditto_core", "pytest_ditto", "tests", "conftest.py", "pyproject.toml")


class Protection(NamedTuple):
    """What protects, the code that does (``file``: ``old`` becomes ``new``), and the test that must fail then."""

    what: str
    file: str
    old: str
    new: str
    test: str


UNIT = "tests/unit/"
PROTECTIONS = (
    Protection(
        "pickled code in a file of torch is not run",
        "dumps/files.py",
        'map_location="cpu", weights_only=True, mmap',
        'map_location="cpu", weights_only=False, mmap',
        "dumps/test_files.py::test_code_pickled_into_a_file_is_not_run",
    ),
    Protection(
        "pickled code in an archive of arrays is not run",
        "dumps/files.py",
        "np.load(path, allow_pickle=False) as archive",
        "np.load(path, allow_pickle=True) as archive",
        "dumps/test_files.py::test_code_pickled_into_a_file_is_not_run",
    ),
    Protection(
        "pickled code in Polygraphy's JSON is not run",
        "dumps/polygraphy.py",
        "read_array(data, allow_pickle=False)",
        "read_array(data, allow_pickle=True)",
        "dumps/test_files.py::test_code_pickled_into_a_file_is_not_run",
    ),
    Protection(
        "a tokenizer's own code is not run unasked",
        "model/checkpoint.py",
        'how = {"trust_remote_code": trust_remote_code, "revision": revision or "main"}',
        'how = {"revision": revision or "main"}',
        "test_models.py::test_a_tokenizers_own_code_does_not_run_untrusted_whatever_stdin_says",
    ),
    Protection(
        "a server that trusts unasked gets no untrusted code",
        "backends/trtllm/backend.py",
        "if source.factory is None and not source.trust_remote_code and names_code(Path(model)):",
        "if False:",
        "test_own_code.py::test_its_pytorch_backend_is_not_opened_with_untrusted_code_either",
    ),
    Protection(
        "trusted code in another repository is refused",
        "model/own_code.py",
        "found = [*code_elsewhere(directory)] if source.trust_remote_code else []",
        "found: list[str] = []",
        "test_own_code.py::test_trusted_code_of_another_repository_is_refused",
    ),
    Protection(
        "code that was compiled for another CPU is not opened",
        "engines/engine.py",
        'if missing := lacking(self.versions.get(INSTRUCTIONS, "")):',
        "if missing := list[str]():",
        "test_machine_code.py::test_code_of_a_cpu_with_more_instructions_is_refused_in_one_line",
    ),
    Protection(
        "weights outside of a model's folder are refused",
        "graphs/files.py",
        'if PurePath(name).is_absolute() or ".." in PurePath(name).parts:',
        "if False:",
        "test_bad_values.py::test_weights_outside_of_a_models_folder",
    ),
    Protection(
        "JSON that is nested too deeply is one line",
        "system/files.py",
        "except RecursionError:",
        "except ZeroDivisionError:",
        "test_deep_json.py::test_json_that_is_nested_too_deeply_is_one_line",
    ),
    Protection(
        "control characters are escaped",
        "visible.py",
        "if not value.isprintable():",
        "if False:",
        "test_visible.py::test_no_sink_shows_a_name_raw",
    ),
    Protection(
        "commands of CI systems are escaped",
        "visible.py",
        "return COMMAND.sub(_escaped, value) if COMMAND.search(value) else value",
        "return value",
        "test_visible.py::test_no_sink_shows_a_name_raw",
    ),
    Protection(
        "errors show no name raw",
        "errors.py",
        "text = lines(super().__str__())",
        "text = super().__str__()",
        "test_visible.py::test_an_error_shows_no_name_raw",
    ),
    Protection(
        "every read of the cache is verified",
        "cache/_store.py",
        "found = damage(path, self._large.digest)\n        if not found:",
        "found = []\n        if not found:",
        "test_cache.py::test_a_flipped_byte_is_noticed_rebuilt_and_said",
    ),
    Protection(
        "a failed build leaves nothing",
        "cache/_store.py",
        "        except BaseException:\n            shutil.rmtree(work, ignore_errors=True)\n",
        "        except BaseException:\n",
        "test_cache.py::test_a_build_that_fails_leaves_nothing_and_its_error_passes",
    ),
    Protection(
        "what killed builds left goes at the next start",
        "cache/_store.py",
        "self._sweep_builds()\n            leased",
        "leased",
        "test_cache.py::test_a_killed_build_leaves_a_cache_that_the_next_run_uses_without_help",
    ),
    Protection(
        "one process builds, the others wait",
        "cache/_locks.py",
        'lock = lock_of(root, kind, key)\n    try:\n        _acquire(lock, f"{kind}/{key[:12]}", say)',
        "lock = lock_of(root, kind, key)\n    try:\n        pass",
        "test_cache.py::test_eight_processes_build_once_and_the_waiting_ones_say_so",
    ),
    Protection(
        "pruning leaves what others read",
        "cache/_store.py",
        'if f"{entry.kind}/{entry.key}" in leased(self.root):',
        "if False:",
        "test_cache.py::test_entries_that_eight_processes_read_stay_while_another_prunes",
    ),
    Protection(
        "a key is a plain name",
        "cache/_place.py",
        "if not _NAME.fullmatch(name) or name in OWN:",
        "if False:",
        "test_cache.py::test_a_key_that_is_no_plain_name_is_refused",
    ),
    Protection(
        "a full cache is one line",
        "cache/_place.py",
        'errno.ENOSPC: "is full",',
        "",
        "test_cache.py::test_a_full_disk_is_one_clear_line",
    ),
    Protection(
        "a read-only cache gives what it holds",
        "cache/_store.py",
        "if error.errno not in READ_ONLY or damage(self.root / kind / key, self._large.digest):",
        "if True:",
        "test_cache_of_others.py::test_a_read_only_cache_gives_the_engine_that_it_holds",
    ),
    Protection(
        "a damaged engine of a read-only cache is not used",
        "cache/_store.py",
        "if error.errno not in READ_ONLY or damage(self.root / kind / key, self._large.digest):",
        "if error.errno not in READ_ONLY:",
        "test_cache_of_others.py::test_a_damaged_engine_in_a_read_only_cache_is_not_used",
    ),
    Protection(
        "an object of a store has the size of its manifest",
        "cache/_remote.py",
        'if size != facts["size"]:  # before',
        "if False:  # before",
        "test_remote_cache.py::test_what_has_another_size_than_its_manifest_says_is_not_downloaded",
    ),
    Protection(
        "an object of a store has the digest of its manifest",
        "cache/_remote.py",
        'if hash_file(target) != facts["sha256"]:',
        "if False:",
        "test_remote_cache.py::test_damage_in_the_store_is_noticed_built_anew_and_mended",
    ),
    Protection(
        "a manifest names files inside of its entry",
        "cache/_remote.py",
        'if not parts or ".." in parts or PurePosixPath(name).is_absolute():',
        "if False:",
        "test_remote_cache.py::test_a_manifest_that_points_outside_the_entry_is_refused",
    ),
    Protection(
        "a manifest names objects by digest",
        "cache/_remote.py",
        'if not re.fullmatch("[0-9a-f]{64}", digest):',
        "if False:",
        "test_remote_cache.py::test_a_manifest_that_names_another_object_by_a_path_is_refused",
    ),
    Protection(
        "a manifest has an end",
        "cache/_remote.py",
        "if len(text) > LARGEST_MANIFEST:",
        "if False:",
        "test_remote_cache.py::test_a_manifest_without_end_is_not_read",
    ),
    Protection(
        "a file is replaced as a whole",
        "system/atomic.py",
        "    temporary = temporary_name(target)\n",
        "    temporary = target\n",
        "test_whole.py::test_a_write_that_fails_keeps_the_old_content_and_leaves_nothing",
    ),
    Protection(
        "a pipe in the place of a file is refused",
        "system/files.py",
        "    if not stat.S_ISREG(mode):\n",
        "    if False:\n",
        "test_pipes.py::test_a_pipe_in_the_place_of_a_file_is_one_line",
    ),
    Protection(
        "a pipe or a device is not replaced by a file",
        "system/atomic.py",
        "    if target.exists() and not target.is_file():\n",
        "    if False:\n",
        "test_whole.py::test_a_pipe_is_written_to_and_stays_one",
    ),
    Protection(
        "a copied engine that was damaged is refused",
        "engines/copied.py",
        "    if problem:\n",
        "    if False:\n",
        "test_bad_values.py::test_a_copied_engine_that_was_damaged",
    ),
    Protection(
        "native work has a time limit",
        "system/isolate.py",
        "cause_of(child.wait(timeout))",
        "cause_of(child.wait())",
        "test_isolate.py::test_a_hang_ends_at_the_timeout_and_the_child_is_gone",
    ),
    Protection(
        "a child does not outlive its parent",
        "system/isolate.py",
        '    die_with(order["parent"])\n',
        "",
        "test_isolate.py::test_the_child_does_not_outlive_its_parent_and_no_file_stays",
    ),
    Protection(
        "a child's error is of this project or none",
        "system/isolate.py",
        'if module.partition(".")[0] != "ditto_core":\n        return None',
        "",
        "test_isolate.py::test_a_class_that_a_child_names_is_not_imported_from_elsewhere",
    ),
    Protection(
        "a noise floor that was changed is not used",
        "stepping/floor.py",
        'if data["sha256"] == fingerprint(data["floor"]):',
        "if True:",
        "test_step_parts.py::test_a_floor_that_was_changed_is_not_used_and_said",
    ),
    Protection(
        "a gate's result that was edited is refused",
        "gates/result.py",
        'if fingerprint(body) != data["digest"]:',
        "if False:",
        "test_gate_result.py::test_a_result_that_was_changed_by_hand_is_refused",
    ),
    Protection(
        "a result that another key signed is refused",
        "gates/result.py",
        "if key and not hmac.compare_digest(sign(digest, key), str(signature)):",
        "if False:",
        "test_gate_floor.py::test_a_key_signs_results_and_refuses_those_it_did_not_sign",
    ),
    Protection(
        "a baseline that was edited is refused",
        "gates/baseline.py",
        "if digest != fingerprint(data):",
        "if False:",
        "test_gate_result.py::test_a_baseline_survives_its_file_and_an_edit_is_noticed",
    ),
    Protection(
        "a line of a journal that was cut is not read",
        "gates/journal.py",
        "except (ValueError, KeyError, TypeError, AttributeError):",
        "except ZeroDivisionError:",
        "test_gate_scoring.py::test_a_journal_gives_back_whole_lines_and_goes_on_after_one_that_was_cut",
    ),
    Protection(
        "NaN never passes",
        "compare/verdict.py",
        "passes = value >= bound if at_least else value <= bound",
        "passes = value >= bound if at_least else not value > bound",
        "test_judging_parts.py::test_a_number_that_is_none_never_passes",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="protections whose text has this word")
    parser.add_argument("--table", action="store_true", help="print a row of Markdown for each")
    options = parser.parse_args()
    chosen = [each for each in PROTECTIONS if options.only in each.what]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    warm_up()
    sound: dict[str, bool] = {}
    failed = 0
    for each in chosen:
        start = time.perf_counter()
        found = outcome(each, sound)
        failed += found != "fails"
        line = f"| {each.what} | `{each.test.partition('::')[2] or each.test}` | {found} |"
        print(line if options.table else f"{found:24} {time.perf_counter() - start:6.1f} s  {each.what}", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} tests fail without what they protect")
    sys.exit(bool(failed))


def warm_up() -> None:
    """Load what every test loads; nothing of this project."""
    import hypothesis
    import numpy
    import onnx
    import pytest
    import torch
    import transformers

    assert all((hypothesis, numpy, onnx, pytest, torch, transformers))
    assert not any(name.startswith(("ditto_core", "pytest_ditto")) for name in sys.modules)


def outcome(protection: Protection, sound: dict[str, bool]) -> str:
    """Run the test of a protection as it is (once for each test) and without it; it should be ``fails`` without."""
    with tempfile.TemporaryDirectory(prefix="protections-") as folder:
        place = Path(folder)
        for part in PARTS:
            (shutil.copytree if (ROOT / part).is_dir() else shutil.copyfile)(ROOT / part, place / part)
        file = place / "ditto_core" / protection.file
        code = file.read_text()
        if protection.old not in code:
            return "the code is not there"
        if protection.test not in sound:
            sound[protection.test] = run(place, UNIT + protection.test) == 0
        if not sound[protection.test]:
            return "fails with it too"
        file.write_text(code.replace(protection.old, protection.new))
        code = run(place, UNIT + protection.test)
        return "passes" if code == 0 else "fails" if code == 1 else f"cannot be run ({code})"


def run(place: Path, test: str) -> int:
    """Run a test of the copy in a forked process and return pytest's exit code."""
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what a test that hung has started
        return code
    import pytest

    os.setsid()
    os.chdir(place)
    sys.path[:] = [
        str(place),
        *(path for path in sys.path if Path(path or ".").resolve() not in (ROOT, ROOT / "benchmarks")),
    ]
    sys.dont_write_bytecode = True
    os.environ["PYTHONPATH"] = str(place)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        options = ("-q", "-x", "-p", "no:cacheprovider", "-p", "pytest_timeout", f"--timeout={PATIENCE}")
        code = pytest.main([*options, test])
    import ditto_core

    inside = Path(ditto_core.__file__).is_relative_to(place)
    os._exit(int(code) if inside else 9)


if __name__ == "__main__":
    main()
