"""A stand-in for a rollout server's weight routes: no vLLM and no model, but real HTTP and a real Gloo receiver.

vLLM itself takes half a minute to start, and cannot be made to fail at a chosen point; tests/e2e/test_vllm_plugin.py has the
real one.
"""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import torch

from megatron_rl.inference.sender import ServerAddress
from megatron_rl.wire.tensor_spec import TensorSpec
from megatron_rl.wire.weights import NO_VERSION, join_weight_group, plan_buckets, unpack_bucket


class FakeServer:
    """fail: routes that answer 500. hang_s: seconds by route. leave_after: buckets after which it leaves the stream.

    load_s: seconds between the end of the stream and the answer to /update_weights.
    """

    def __init__(self, name: str, num_workers: int = 1):
        self.name, self.num_workers = name, num_workers
        self.calls: list[str] = []
        self.answered: list[str] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.held = self.incoming = NO_VERSION
        self.is_paused = False
        self.fail: set[str] = set()
        self.hang_s: dict[str, float] = {}
        self.leave_after: int | None = None
        self.load_s = 0.0
        self.reset_succeeds = True
        self.num_replicas = 1
        self.query = ""
        self._groups = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def address(self) -> ServerAddress:
        return ServerAddress(self.name, f"http://127.0.0.1:{self._http.server_port}")

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def _handler(fake) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                route, fake.query = urlsplit(self.path).path, urlsplit(self.path).query
                status, answer = fake._answer(route, json.loads(body or b"{}"))
                fake.answered.append(route)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                pass

        return Handler

    def _answer(self, route: str, body: dict) -> tuple[int, dict]:
        self.calls.append(route)
        time.sleep(self.hang_s.get(route, 0.0))
        if route in self.fail:
            return 500, {"error": {"message": f"{route} is out of order"}}
        try:
            return 200, getattr(self, "_" + route.strip("/"))(body) or {}
        except (RuntimeError, ValueError, AssertionError) as error:
            return 500, {"error": {"message": str(error)}}

    def _get_world_size(self, body: dict) -> dict:
        return {"world_size": self.num_workers * (self.num_replicas if "include_dp=true" in self.query else 1)}

    def _pause(self, body: dict) -> None:
        self.is_paused = True

    def _resume(self, body: dict) -> None:
        self.is_paused = False

    def _init_weight_transfer_engine(self, body: dict) -> None:
        info = body["init_info"]
        self._groups = [None] * self.num_workers

        def join(rank: int) -> None:
            self._groups[rank] = join_weight_group(info["host"], info["port"], 1 + rank, info["world_size"], info["timeout_s"])

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(self.num_workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _start_weight_update(self, body: dict) -> None:
        self.tensors, self.held = {}, NO_VERSION

    def _update_weights(self, body: dict) -> None:
        info = body["update_info"]
        specs = [
            TensorSpec(name, tuple(shape), dtype)
            for name, dtype, shape in zip(info["names"], info["dtypes"], info["shapes"], strict=True)
        ]
        for index, bucket in enumerate(plan_buckets(specs, info["bucket_bytes"])):
            if index == self.leave_after:
                self._groups = []
                raise RuntimeError("left the stream")
            buffers = [torch.empty(bucket.num_bytes, dtype=torch.uint8) for _ in self._groups]
            for work in [group.broadcast(buffer) for group, buffer in zip(self._groups, buffers, strict=True)]:
                work.wait()
            assert all(torch.equal(buffer, buffers[0]) for buffer in buffers)
            self.tensors |= dict(unpack_bucket(bucket, buffers[0]))
        time.sleep(self.load_s)
        self.incoming = info["version"]

    def _finish_weight_update(self, body: dict) -> None:
        self.held = self.incoming

    def _collective_rpc(self, body: dict) -> dict:
        assert body["method"] == "held_version"
        return {"results": [{"version": self.held}] * self.num_workers}

    def _reset_prefix_cache(self, body: dict) -> dict:
        return {"success": self.reset_succeeds}
