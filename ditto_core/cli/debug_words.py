"""The words of a ``ditto debug`` command line, as Polygraphy's users write them."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from ditto_core.errors import UsageError

CHECK = "--check"
SEPARATOR = "\x1f"

MADE_UP = "inputs are never made up: give --inputs FILE"
INSTEAD = {
    "--mode": "it needs none, delta debugging takes the place of bisect and linear",
    "--min-good": "the result is minimal, it passes without any one of its operators",
    "--no-reduce-inputs": "parts may begin at any captured activation",
    "--no-reduce-outputs": "parts may end at any activation",
    "--dir": "operators are ranked by their own error, in no direction",
    "--precision": "the low dtype is the model's own, --keep names the other",
    "--model-input-shapes": "the shapes are those of the data in --inputs FILE",
    "--seed": MADE_UP,
    "--val-range": MADE_UP,
    "--data-loader-script": MADE_UP,
}
"""Options of ``polygraphy debug`` without a counterpart, and what to do instead."""


class CheckingCommand(TyperCommand):
    """A command whose options take words as Polygraphy's do.

    ``--check`` takes one quoted string or all words that follow it. The options of a list take several words at once
    (``--fail-regex A B``), as far as no argument needs them. Polygraphy's options without a counterpart are
    an error that says what to do instead.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Join the words of the check into one value, and repeat the options of lists."""
        words: list[str] = []
        if CHECK in args:
            at = args.index(CHECK)
            args, words = args[:at], args[at + 1 :]
            if len(words) > 1 and not any(c.isspace() for c in words[0]):
                words = [SEPARATOR.join(words)]
            words = [CHECK, *words]
        before = args[: args.index("--")] if "--" in args else args
        self._refuse(before, str(ctx.info_name))
        surplus = self._surplus(ctx, before, ended=bool(words) or "--" in args)
        return super().parse_args(ctx, [*self._repeated(before, surplus), *args[len(before) :], *words])

    def _refuse(self, args: list[str], command: str) -> None:
        own = {name for parameter in self.params for name in parameter.opts}
        for name in (word.partition("=")[0] for word in args):
            if name in INSTEAD and name not in own:
                raise UsageError(f"ditto debug {command} has no {name}: {INSTEAD[name]}")

    def _surplus(self, ctx: Any, args: list[str], *, ended: bool) -> int:
        """Return how many words belong to options of lists, as no argument takes them; one that takes any number of
        words takes those behind ``--`` or none, if the options are ``ended`` so.
        """
        if any(parameter.nargs == -1 for parameter in self.params):
            return len(args) if ended else 0
        plain = [word.lstrip("-") if word[1:].isdigit() else word for word in args]  # exit statuses may be negative
        return len(self.make_parser(ctx).parse_args(args=plain)[1])

    def _repeated(self, args: list[str], surplus: int) -> list[str]:
        """Write ``--name A B`` as ``--name A --name B``, for the first ``surplus`` such words."""
        lists = {name for parameter in self.params if getattr(parameter, "multiple", False) for name in parameter.opts}
        spread: list[str] = []
        name, taken = "", 0
        for word in args:
            if word.startswith("-") and not word[1:].isdigit():
                name, taken = word if word in lists else "", 0
            elif name and taken and surplus:
                spread.append(name)
                surplus -= 1
            taken += name != word
            spread.append(word)
        return spread
