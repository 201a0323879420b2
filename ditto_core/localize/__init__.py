"""Where an engine goes wrong: the error that each site adds by itself, from one build and one run."""

from ditto_core.compare.blame import Blame, Localization, LocalResult
from ditto_core.localize.diagnosis import conclude
from ditto_core.localize.local import FACTORS, Localizer
from ditto_core.sites import ALL, PORTS

EVERYTHING = (ALL, PORTS)
"""Selectors of all sites, ports included: the finest cuts that need no second build."""

__all__ = ["EVERYTHING", "FACTORS", "Blame", "LocalResult", "Localization", "Localizer", "conclude"]
