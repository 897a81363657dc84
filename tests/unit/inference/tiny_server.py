"""The server of `tiny_engine`: `python -m tests.unit.inference.tiny_server HOST PORT`. Standard library only.

It holds a policy version; its "model" samples tokens at random; its "weights" are names and sums of the last update's tensors.
"""

import json
import os
import random
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY_VARIABLE, KEY_HEADER = "MEGATRON_RL_KEY", "x-megatron-rl-key"


class Server:
    """`calls` is the order in which the calls of updates came."""

    def __init__(self):
        self.calls, self.version, self.is_paused = [], None, False
        self.weights, self.expected = {}, None
        self.changed = threading.Condition()

    def answer(self, path, body):
        if path == "/sample":
            with self.changed:
                self.changed.wait_for(lambda: not self.is_paused)
                count = random.randint(1, body["most"])
                return {"ids": [random.randrange(body["vocab_size"]) for _ in range(count)], "version": self.version}
        with self.changed:
            if path == "/load":
                self.weights[body["name"]] = body["sum"]
            else:
                self.calls.append(path)
                getattr(self, path.strip("/"))(body)
            self.changed.notify_all()
        return {"calls": self.calls, "version": self.version, "weights": self.weights}

    def pause(self, body):
        self.is_paused = True

    def start_update(self, body):
        self.version, self.weights = None, {}

    def receive(self, body):
        assert self.changed.wait_for(lambda: sorted(self.weights) == sorted(body["names"]), timeout=30)

    def finish_update(self, body):
        self.version = body["version"]

    def reset_prefix_cache(self, body): ...

    def resume(self, body):
        self.is_paused = False

    def state(self, body):
        self.calls.pop()  # this one


def serve(host, port, key):
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.reply(200 if self.path == "/health" else 404, {})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.headers[KEY_HEADER] != key:
                self.reply(401, {})
            else:
                self.reply(200, server.answer(self.path, body))

        def reply(self, status, answer):
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_): ...

    http = ThreadingHTTPServer((host, port), Handler)
    http.daemon_threads = True
    http.serve_forever()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), os.environ[KEY_VARIABLE])
