"""The bisecting tools of ``ditto debug``: reduce, precision, build, repeat and diff-tactics."""
