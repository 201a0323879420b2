"""Files are written as a whole or not at all."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ditto_core.system import files
from ditto_core.system.atomic import replacing, write_atomic
from ditto_core.system.files import check_writable, replace_text


def write_streamed(path, text):
    with files.replacing(path) as file:
        file.write(text)


WRITERS = (write_atomic, replace_text, write_streamed)


def test_text_and_bytes_replace_what_was_there(tmp_path):
    path = tmp_path / "file"
    write_atomic(path, "é")
    assert path.read_bytes() == "é".encode()
    write_atomic(path, b"\x00")
    assert path.read_bytes() == b"\x00"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_write_that_fails_keeps_the_old_content_and_leaves_nothing(tmp_path):
    path = tmp_path / "file"
    write_atomic(path, "old")
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"), replacing(path) as file:
        file.write(b"n")
        raise OSError(28, "No space left on device")
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("folder", "error"), [("absent", FileNotFoundError), ("plain", NotADirectoryError)])
def test_an_error_names_the_file_that_was_asked_for(tmp_path, folder, error):
    (tmp_path / "plain").touch()
    path = tmp_path / folder / "file"
    with pytest.raises(error) as caught:
        write_atomic(path, "new")
    assert caught.value.filename == str(path)


@pytest.mark.parametrize("write", WRITERS)
def test_a_link_stays_a_link(tmp_path, write):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"


@pytest.mark.parametrize("write", WRITERS)
def test_a_pipe_is_written_to_and_stays_one(tmp_path, write):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    check_writable(pipe)
    write(pipe, "text")
    reader.join(60)
    assert read == ["text"]
    assert pipe.is_fifo()


def test_standard_output_is_written_to_also_where_it_is_a_file(tmp_path):
    script = "import sys; from pathlib import Path; from ditto_core.system.atomic import write_atomic\n"
    script += "print('before'); write_atomic(Path('/dev/stdout'), 'whole\\n'); print('after')"
    with (tmp_path / "file").open("w") as file:
        subprocess.run([sys.executable, "-c", script], stdout=file, check=True)
    assert (tmp_path / "file").read_text() == "before\nwhole\nafter\n"


@pytest.mark.parametrize("write", WRITERS)
def test_a_file_keeps_its_mode(tmp_path, write):
    path = tmp_path / "file"
    path.touch(0o600)
    write(path, "secret")
    assert path.stat().st_mode & 0o777 == 0o600


def test_threads_do_not_meet_on_one_path(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: write_atomic(tmp_path / "file", str(i) * 1000), range(400)))
    assert len(set((tmp_path / "file").read_text())) <= 3
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
