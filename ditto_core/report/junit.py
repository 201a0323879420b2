"""A comparison as JUnit XML: one test case a site."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from ditto_core.compare import text

if TYPE_CHECKING:
    from ditto_core.compare.comparison import Comparison
    from ditto_core.compare.result import SiteResult


def junit(comparison: Comparison) -> str:
    """Return JUnit XML: a site fails when any step of it does, and is skipped when one could not be compared."""
    comparison = comparison.shown
    by_site: dict[str, list[SiteResult]] = {site: [] for site in comparison.sites}
    for result in comparison.results:
        by_site[result.site].append(result)
    failed = {site for site, results in by_site.items() if not all(r.ok for r in results)}
    missing = [site for site in comparison.missing if site not in failed]
    counts = {"tests": len({*by_site, *missing}), "failures": len(failed), "errors": 0, "skipped": len(missing)}
    attributes = {"name": comparison.engine.label} | {name: str(count) for name, count in counts.items()}
    root = ET.Element("testsuites")
    suite = ET.SubElement(root, "testsuite", attributes)
    properties = ET.SubElement(suite, "properties")
    for name, value in facts(comparison).items():
        ET.SubElement(properties, "property", name=f"ditto_{name}", value=value)
    cases = {site: add_site(suite, comparison, site, results) for site, results in by_site.items()}
    for site in missing:
        case = cases[site] if site in cases else add_case(suite, comparison, site)
        ET.SubElement(case, "skipped", message=comparison.missing[site])
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def facts(comparison: Comparison) -> dict[str, str]:
    """Return the suite's properties."""
    receipt = comparison.receipt.facts() if comparison.receipt else {}
    return {
        "engine": comparison.engine.label,
        "reference": comparison.reference.label,
        "verdict": text.headline(comparison),
        "ok": str(bool(comparison)).lower(),
        "steps": str(comparison.steps),
        "observer": text.observer_effect(comparison),
        **{f"receipt_{name.replace(' ', '_')}": value for name, value in receipt.items()},
    }


def add_site(suite: ET.Element, comparison: Comparison, site: str, results: list[SiteResult]) -> ET.Element:
    """Add a site's test case, with its worst result's numbers."""
    worst = max(results, key=lambda r: (not r.ok, r.verdict.margin))
    case = add_case(suite, comparison, site)
    properties = ET.SubElement(case, "properties")
    for name, value in (("margin", worst.verdict.margin), ("step", worst.step), ("rel_l2", worst.metrics.rel_l2)):
        ET.SubElement(properties, "property", name=f"ditto_{name}", value=f"{value:.6g}")
    if not worst.ok:
        failure = ET.SubElement(case, "failure", message=f"step {worst.step}: {worst.verdict}", type="Divergence")
        failure.text = "\n".join(filter(None, (f"{site}, step {worst.step}: {worst.verdict}", text.numbers(worst))))
    return case


def add_case(suite: ET.Element, comparison: Comparison, site: str) -> ET.Element:
    """Add an empty test case."""
    return ET.SubElement(suite, "testcase", classname=comparison.engine.label, name=site, time="0")
