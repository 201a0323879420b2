"""Replacement as the proof of a localization: the first fault is taken out, and what remains is localized by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ditto_core.errors import RunError, UsageError
from ditto_core.pair.localizing import localized, open_localizer

if TYPE_CHECKING:
    from ditto_core.compare.blame import Localization
    from ditto_core.pair.replacing import Replaced
    from ditto_core.pair.sessions import Sessions
    from ditto_core.stepping.sides import TapReader

SECONDS = 10.0
"""A run that took more of this process's time is not run again for a proof."""

Replace = Callable[[Sequence[str], "TapReader | None"], "Replaced"]
"""Runs once more with the model's tensors at sites; what reads the engine's taps may look on."""


def proven(sessions: Sessions, run: Replace, found: Localization) -> Localization:
    """Return a localization with the proof of its first fault, and with faults that it hid or that hid its cause.

    The final outputs' error heals where the first fault is all of it. Else the rest is localized with that one taken
    out, and a fault without a cause with all others taken out: a field of the configuration, say, explains no site
    beside another fault. An engine that cannot be cut proves nothing.
    """
    first, *others = faults(found)
    try:
        proof = run(first, None)
        notes = [f"proof: {proof}"]
        if not proof:
            found = merged(found, alone(sessions, run, first))
            if others and not named(found, first):
                found = merged(found, alone(sessions, run, [site for group in others for site in group]))
            every = [item.site for item in found.blamed]
            notes += [f"proof: {run(every, None)}"] if len(every) > len(first) else []
    except UsageError:
        return found
    except RunError as error:
        notes = [f"no proof: {error}"]
    return replace(found, notes=(*notes, *found.notes))


def faults(found: Localization) -> list[list[str]]:
    """Return the blamed sites, those of one module together: a rotary embedding's cosine and sine are one fault."""
    modules: dict[str, list[str]] = {}
    for item in found.blamed:
        modules.setdefault(item.module or item.site, []).append(item.site)
    return list(modules.values())


def named(found: Localization, sites: Sequence[str]) -> bool:
    """Tell whether a cause is at one of the sites."""
    return any(cause.site in sites for cause in found.causes)


def alone(sessions: Sessions, run: Replace, sites: Sequence[str]) -> Localization | None:
    """Localize with the model's tensors at ``sites``."""
    localizer = open_localizer(sessions)
    return localized(sessions, localizer, run(sites, localizer).comparison).localization


def merged(found: Localization, other: Localization | None) -> Localization:
    """Add the sites and the causes that only the other run shows; what whole runs show is the first one's."""
    if other is None:
        return found
    known, kinds = {item.site for item in found.blamed}, {cause.kind for cause in found.causes}
    order = {result.site: result.order for result in (*other.results, *found.results)}
    blamed = (*found.blamed, *(item for item in other.blamed if item.site not in known))
    new = (cause for cause in other.causes if cause.kind not in kinds and not cause.rule.startswith("runs."))
    causes = [*found.causes, *(cause for cause in new if not named(found, [cause.site]))]
    return replace(
        found,
        blamed=tuple(sorted(blamed, key=lambda item: (item.step, order[item.site]))),
        causes=tuple(sorted(causes, key=lambda cause: not cause.fault)),
    )
