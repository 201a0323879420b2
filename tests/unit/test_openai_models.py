"""Which of a server's models is asked: the one that is named, or the only one."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from ditto_core.backends.openai.openai_options import OpenAIOptions
from ditto_core.backends.openai.server import served_model
from ditto_core.errors import BackendError


class Handler(BaseHTTPRequestHandler):
    """Lists the models of its server."""

    def do_GET(self):
        body = json.dumps({"data": [{"id": name} for name in self.server.names]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        """Say nothing."""


@pytest.fixture
def asked():
    """Return what a server with some models takes the options for."""
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=http.serve_forever, daemon=True).start()

    def ask(names, model=""):
        http.names = names
        return served_model(OpenAIOptions(f"http://127.0.0.1:{http.server_port}/v1", model))

    yield ask
    http.shutdown()
    http.server_close()


def test_the_only_model_needs_no_name(asked):
    assert asked(["base"]) == asked(["base"], "base") == "base"


def test_of_several_models_one_has_to_be_named(asked):
    with pytest.raises(BackendError, match=r"serves base, adapter: choose one with the option model"):
        asked(["base", "adapter"])
    assert asked(["base", "adapter"], "adapter") == "adapter"


def test_a_name_that_is_not_served_is_said(asked):
    with pytest.raises(BackendError, match=r"serves no 'adaptor', it serves base, adapter"):
        asked(["base", "adapter"], "adaptor")
