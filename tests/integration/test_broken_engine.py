"""An engine that is installed and does not start fails the test; it is no reason to skip it."""

VLLM = """
def LLM(model, **settings):
    raise RuntimeError("Engine core initialization failed")
"""

TEST = """
import pytest
from tiny import tiny_llama

@pytest.mark.ditto_engine(model=tiny_llama, backend="vllm")
def test_engine(ditto): pass
"""


def test_a_vllm_that_does_not_start_is_an_error_in_one_line(project):
    project.makepyfile(vllm=VLLM, test_broken=TEST)
    info = project.mkdir("vllm-1.dist-info")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 1\n")
    result = project.runpytest_inprocess("-rs")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["vLLM does not serve tiny_llama: Engine core initialization failed"])
