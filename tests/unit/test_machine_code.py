"""Engines with machine code are of the CPU and the compiler that made them; others are of no machine."""

import pytest
import torch

from ditto_core.backends.inductor import InductorBackend
from ditto_core.engines.engine import Engine
from ditto_core.engines.keys import engine_key, versions_of
from ditto_core.errors import BuildError
from ditto_core.spec import EngineSpec
from ditto_core.system.cpu import instruction_sets

AVX2 = {"avx2": True, "avx512_f": False, "fma3": True, "l1d_cache_size": 49152}
AVX512 = {**AVX2, "avx512_f": True}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return what takes the place of this CPU, and of its compiler's version."""

    def be(capabilities=AVX2, vectors="AVX2", compiler="12.2.0", threads=1):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors)
        (tmp_path / "c++").write_text(f"#!/bin/sh\necho 'c++ {compiler}'\necho 'no warranty'\n")
        (tmp_path / "c++").chmod(0o700)
        monkeypatch.setenv("CXX", str(tmp_path / "c++"))

    return be


def spec(compiler):
    return EngineSpec.of("model", backend="inductor", options={"compiler": compiler})


@pytest.mark.parametrize(("compiler", "keys"), [("aot_inductor", 5), ("inductor", 1), ("aot_eager", 1)])
def test_the_key_has_cpu_and_compiler_where_code_is_compiled_when_the_engine_is_built(compiler, keys, machine):
    found = set()
    for other in ({}, {"capabilities": AVX512}, {"vectors": "DEFAULT"}, {"compiler": "14.1.0"}, {"threads": 2}):
        machine(**other)
        found.add(engine_key(spec(compiler), InductorBackend(), "content"))
    assert len(found) == keys


@pytest.mark.parametrize(("compiler", "same"), [("aot_inductor", False), ("inductor", True)])
def test_the_key_has_the_settings_of_what_compiles(compiler, same):
    from torch._inductor import config

    before = engine_key(spec(compiler), InductorBackend(), "content")
    with config.patch(emulate_precision_casts=True):
        assert (engine_key(spec(compiler), InductorBackend(), "content") == before) is same
    assert engine_key(spec(compiler), InductorBackend(), "content") == before


def test_code_of_a_cpu_with_more_instructions_is_refused_in_one_line(machine, tmp_path):
    machine(AVX512, "AVX512")
    made = versions_of(spec("aot_inductor"), InductorBackend())
    assert made["instruction sets"] == "avx2 avx512_f fma3" and made["compiler"] == "c++ 12.2.0"
    machine()
    with pytest.raises(BuildError, match=r"compiled for a CPU with avx512_f, which this one lacks: build it here$"):
        Engine(tmp_path, spec("aot_inductor"), (), False, versions=made).open()


def test_code_of_a_cpu_with_less_is_opened(machine, tmp_path):
    machine()
    made = versions_of(spec("aot_inductor"), InductorBackend())
    machine(AVX512, "AVX512")
    with pytest.raises(BuildError, match=r"signature\.json cannot be read"):
        Engine(tmp_path, spec("aot_inductor"), (), False, versions=made).open()


def test_a_torch_that_lists_no_instructions_names_those_of_its_kernels(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert instruction_sets() == "avx512"
