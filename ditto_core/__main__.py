"""``python -m ditto_core``: the `ditto` command, also where another program has that name."""

from ditto_core.cli import main

main()
