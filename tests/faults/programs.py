"""Faults in engines that are built from the traced module and not from an ONNX file."""

import copy
from dataclasses import replace

import torch

from ditto_core.model.program import trace_program


def scaled_in_program(monkeypatch, site, factor):
    """Let the engine be built from a module whose weight at a site is scaled."""

    def trace_faulty(model, *arguments, **options):
        module = copy.deepcopy(model.module)
        with torch.no_grad():
            module.get_submodule(site).weight.mul_(factor)
        return trace_program(replace(model, module=module), *arguments, **options)

    monkeypatch.setattr("ditto_core.model.program.trace_program", trace_faulty)
