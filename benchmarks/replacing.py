"""Put the model's tensor into faulty engines, at the blamed site and at its neighbours upstream: what heals?

``python benchmarks/replacing.py --cache DIR [--cases NAME …] > table.md``: each fault of ``tests/faults/cases.py`` in a
real ONNX Runtime engine of two steps; the table of ``benchmarks/localize.md``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ditto_core.cache import Cache
from ditto_core.engines.workspace import Workspace
from ditto_core.errors import DittoError
from ditto_core.graphs.graph import Graph
from ditto_core.localize import EVERYTHING
from ditto_core.pair.pair import Pair
from ditto_core.pair.pair_options import PairOptions
from ditto_core.pair.replacing import percent
from ditto_core.spec import EngineSpec
from tests.faults import FaultyWorkspace
from tests.faults.case import ALONE
from tests.faults.cases import CASES, NAMELESS
from tests.models import DECODERS, MORE

HEAD = "| fault | blamed | error | left | healed | healed upstream |\n| --- | --- | --- | --- | --- | --- |"


def main() -> None:
    """Print a row a fault, then how many healed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", required=True)
    parser.add_argument("--cases", nargs="*", default=[])
    given = parser.parse_args()
    workspace = Workspace(Cache(Path(given.cache)))
    chosen = [case for case in (*CASES, *NAMELESS) if not given.cases or case.name in given.cases]
    print(HEAD)
    healed = []
    for case in chosen:
        with tempfile.TemporaryDirectory() as folder:
            share, text = row(FaultyWorkspace(workspace.cache, case.fault, Path(folder)), case)
        print(text, flush=True)
        healed += [share] if share is not None else []
    print(f"\n{sum(share >= 0.99 for share in healed)} of {len(healed)} heal by 99 % or more, {len(chosen)} faults")


def row(workspace: Workspace, case: Any) -> tuple[float | None, str]:
    """Run one fault; return the share that heals at the blamed sites, None where it cannot be said, and a line."""
    spec = EngineSpec.of({**DECODERS, **MORE}[case.model], dtype=case.dtype, outputs=EVERYTHING)
    pair = Pair(workspace, spec, PairOptions(observer=False))
    head = f"| {case.name} | {case.site}"
    try:
        pair.generate(case.prompts or ALONE, max_new_tokens=2)
        here = pair.replace(case.site, *case.also)
        rest = ", ".join(f"{percent(pair.replace(site).healed)} ({site})" for site in upstream(pair, case)[-2:])
    except DittoError as error:
        return None, f"{head} | {error} | | | |"
    else:
        left = f"{here.before:.1e} | {here.after:.1e} | {percent(here.healed)}"
        return here.healed, f"{head} | {left} | {rest or 'nothing upstream'} |"
    finally:
        pair.close()


def upstream(pair: Pair, case: Any) -> Sequence[str]:
    """Return the sites that the blamed one is computed from; what the graph takes from outside cannot be replaced."""
    sites = {tap.value: tap.site for tap in pair.engine.taps}
    value = next(value for value, site in sites.items() if site == case.site)
    inputs = Graph.read(pair.sessions.export.graph_path()).segment(value, set(sites)).inputs
    return [sites[name] for name in inputs if name in sites and sites[name] not in (case.site, *case.also)]


if __name__ == "__main__":
    main()
