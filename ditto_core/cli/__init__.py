"""The `ditto` command."""
