"""A server that speaks OpenAI's protocol, over real HTTP on loopback: a tiny Llama computes behind it."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from ditto_core.errors import BackendError, RunError, UsageError
from ditto_core.gates import Gate
from ditto_core.gates.calibration import Calibration
from ditto_core.gates.gate import prepare
from ditto_core.model.loading import tiny_decoder
from ditto_core.pair.pair import Pair, PairOptions
from ditto_core.spec import EngineSpec
from tests.gate_suites import tiny_suite

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    tiny_decoder("llama", architectures=["LlamaForCausalLM"]).save_pretrained(path)
    return path


class Handler(BaseHTTPRequestHandler):
    """Answers as `vllm serve` does: all log-probabilities that are asked for, tokens by their ids."""

    def log_message(self, *args) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self.answer({"version": self.server.version} if self.path == "/version" else {"data": [self.server.serves]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            said = body["messages"][0]["content"] if "messages" in body else body["prompt"]
            self.answer({"tokens": self.server.tokens(said)})
            return
        self.server.asked.append(body)
        choices = [{"index": i, **self.server.choose(body, row)} for i, row in enumerate(body["prompt"])]
        self.answer({"choices": choices[::-1]})  # the order is not promised

    def answer(self, data) -> None:
        text = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def server(folder):
    model = tiny_decoder("llama")
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.serves, http.version = {"id": "tiny"}, "1.0"
    http.asked, http.model, http.tokens = [], model, lambda text: [1, *map(ord, text)]

    def choose(body, row):
        with torch.inference_mode():
            logprobs = http.model(input_ids=torch.tensor([row])).logits[0, -1].log_softmax(-1)
        values, ids = logprobs.topk(body["logprobs"])
        top = {f"token_id:{i}": v for i, v in zip(ids.tolist(), values.tolist(), strict=True)}
        return {"logprobs": {"top_logprobs": [top]}}

    http.choose = choose
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield http
    http.shutdown()
    http.server_close()
    thread.join()


def run(workspace, folder, http, outputs=(), **options):
    url = f"http://127.0.0.1:{http.server_port}/v1"
    spec = EngineSpec.of(str(folder), backend="openai", outputs=outputs, options={"url": url, **options})
    pair = Pair(workspace, spec, PairOptions(observer=False))
    try:
        return pair.generate(PROMPTS, max_new_tokens=3)
    finally:
        pair.close()


def test_a_server_of_the_model_agrees(workspace, folder, server):
    found = run(workspace, folder, server)
    found.assert_close()
    found.assert_same_tokens()
    assert max(step.kl_mean for step in found.logits) < 1e-6
    assert found.engine.facts["served model"] == "tiny"
    # two rows, three steps; each step sends all tokens so far
    assert [[len(row) for row in body["prompt"]] for body in server.asked] == [[3, 5], [4, 6], [5, 7]]


def test_a_server_of_another_model_fails(workspace, folder, server):
    server.model = tiny_decoder("llama", seed=1)
    found = run(workspace, folder, server)
    assert not found
    assert max(step.kl_mean for step in found.logits) > 0.05


def test_what_a_server_runs_now_is_part_of_the_gate_and_the_calibration(workspace, folder, server):
    url = f"http://127.0.0.1:{server.server_port}/v1"
    gate = Gate(EngineSpec.of(str(folder), backend="openai", options={"url": url}), tiny_suite(1, 0, 0))
    beside = Gate(EngineSpec.of(str(folder)), gate.suite, gate.spec)
    calibration = Calibration.of(gate, (), workspace)

    def keys():
        gates = [prepare(each, workspace, None)[1].key for each in (gate, beside)]
        return (*gates, calibration.key(gate.suite, workspace))

    known = keys()
    assert keys() == known
    seen = [known]
    for serves, version in (({"id": "b"}, "1.0"), ({"id": "tiny", "root": "/b"}, "1.0"), ({"id": "tiny"}, "1.1")):
        server.serves, server.version = serves, version
        seen.append(keys())
    assert [len(set(column)) for column in zip(*seen, strict=True)] == [4, 4, 4]


def test_the_server_tells_how_it_reads_a_text(workspace, folder, server):
    spec = EngineSpec.of(
        str(folder), backend="openai", outputs=(), options={"url": f"http://127.0.0.1:{server.server_port}/v1"}
    )
    session = workspace.build(spec).open()
    assert session.tokens("Hi") == [1, 72, 105]


def test_the_server_tells_how_it_reads_a_conversation(workspace, folder, server):
    spec = EngineSpec.of(
        str(folder), backend="openai", outputs=(), options={"url": f"http://127.0.0.1:{server.server_port}/v1"}
    )
    session = workspace.build(spec).open()
    messages = [{"role": "user", "content": "Hi"}]
    assert session.chat(messages) == [1, 72, 105]
    server.tokens = lambda text: []
    assert session.chat(messages) is None
    assert session.generation() is None


def test_a_few_log_probabilities_are_completed_and_said(workspace, folder, server):
    found = run(workspace, folder, server, top=20)
    assert "20 of" in found.engine.facts["log-probabilities"]
    found.assert_same_tokens()
    assert server.asked[0]["logprobs"] == 20


def test_a_site_is_refused_with_the_reason(workspace, folder, server):
    found = run(workspace, folder, server, outputs=["model.norm"])
    assert found.missing == {"model.norm": "a server shows its log-probabilities alone"}


def test_tokens_by_their_text_are_refused(workspace, folder, server):
    server.choose = lambda body, row: {"logprobs": {"top_logprobs": [{" the": -0.5}]}}
    with pytest.raises(RunError, match="names tokens by their text"):
        run(workspace, folder, server)


def test_a_server_without_log_probabilities_is_an_error(workspace, folder, server):
    server.choose = lambda body, row: {"logprobs": None}
    with pytest.raises(RunError, match="gives no log-probabilities"):
        run(workspace, folder, server)


def test_a_model_that_is_not_served_names_those_that_are(workspace, folder, server):
    with pytest.raises(BackendError, match="serves no 'other', it serves tiny"):
        run(workspace, folder, server, model="other")


def test_an_address_where_nobody_answers_is_an_error(workspace, folder):
    spec = EngineSpec.of(str(folder), backend="openai", outputs=(), options={"url": "http://127.0.0.1:9/v1"})
    with pytest.raises(BackendError, match=r"http://127\.0\.0\.1:9/v1/models gave no answer"):
        workspace.build(spec).open()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs the option url"),
        ({"url": "file:///etc"}, "needs the option url"),
        ({"urll": "x"}, "no option 'urll'"),
    ],
)
def test_a_wrong_option_is_an_error(options, message):
    from ditto_core.backends.openai import OpenAIBackend

    with pytest.raises(UsageError, match=message):
        OpenAIBackend().check(EngineSpec.of("m", backend="openai", options=options))
