# SPDX-License-Identifier: Apache-2.0
"""A stand-in for an OpenAI-compatible server: echoes the prompt's ids, well or badly by mode."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.data.tiny import EOS_ID, make_tokenizer

TOKENIZER = make_tokenizer()


def echo(request):
    """The plain ids at the end of the prompt, and their text."""
    ids = [i for i in request["prompt"] if i > EOS_ID][-12:]
    return ids, TOKENIZER.decode(ids)


def body_of(request, **changes):
    ids, text = echo(request)
    choice = {"text": text, "finish_reason": "stop", "token_ids": [*ids, EOS_ID], **changes}
    return {"choices": [{key: value for key, value in choice.items() if value is not ...}]}


# What the stand-in sends for a request, by mode: status, headers, body.
MODES = {
    "ids": lambda server, request: (200, {}, body_of(request)),
    "no eos": lambda server, request: (200, {}, body_of(request, token_ids=echo(request)[0])),
    "text": lambda server, request: (200, {}, body_of(request, token_ids=...)),
    "length": lambda server, request: (
        (200, {}, body_of(request))
        if server.num_asked % 2
        else (200, {}, body_of(request, finish_reason="length", token_ids=echo(request)[0]))
    ),
    "busy": lambda server, request: (
        (200, {}, body_of(request))
        if server.num_asked > 3
        else (429, {"Retry-After": "0"}, b"busy")
    ),
    "500": lambda server, request: (500, {}, b"<h1>out of memory</h1>"),
    "400": lambda server, request: (400, {}, {"error": {"message": "too\nlong " * 100}}),
    "404": lambda server, request: (404, {}, {"error": "no such model"}),
    "422": lambda server, request: (422, {}, {"detail": [{"loc": "prompt"}]}),
    "malformed": lambda server, request: (200, {}, b'{"choices": ['),
    "deep": lambda server, request: (200, {}, b"[" * 100_000),
    "surrogate": lambda server, request: (200, {}, b'{"choices": [{"text": "\\ud800"}]}'),
    "no choices": lambda server, request: (200, {}, {"choices": []}),
    "foreign": lambda server, request: (200, {}, body_of(request, token_ids=[5, 259])),
    "negative": lambda server, request: (200, {}, body_of(request, token_ids=[-1])),
    "no list": lambda server, request: (200, {}, body_of(request, token_ids=[True])),
    "abort": lambda server, request: (200, {}, body_of(request, finish_reason="abort")),
    "other prompt": lambda server, request: (200, {}, body_of(request, prompt_token_ids=[1])),
    "special": lambda server, request: (
        200, {}, body_of(request, token_ids=..., text="a<|im_start|>b")
    ),
    "half": lambda server, request: (200, {}, body_of(request, token_ids=..., text="a\ufffd")),
    "nothing": lambda server, request: (
        200, {}, body_of(request, token_ids=[], text="", finish_reason="length")
    ),
    "slow": lambda server, request: time.sleep(0.2) or (200, {}, body_of(request)),
}  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        assert self.path == "/v1/models"
        self._send(200, {}, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self):
        assert self.path == "/v1/completions"
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.num_asked += 1
            self.server.requests.append((request, self.headers.get("Authorization")))
            answer = None if self.server.mode == "slow" else self.server.answer(request)
        self._send(*(answer or self.server.answer(request)))

    def _send(self, status, headers, body):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def log_message(self, *_):
        pass


class StandIn(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.mode, self.models, self.num_asked, self.requests = "ids", ["tiny"], 0, []
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def answer(self, request):
        return MODES[self.mode](self, request)
