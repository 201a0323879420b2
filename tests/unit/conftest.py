"""What tests of commands share."""

import pytest

from ditto_core.cli import main


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """Run the command as the entry point does; return exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["ditto", "compare", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            main()
        printed = capsys.readouterr()
        return int(done.value.code or 0), printed.out + printed.err

    return run
