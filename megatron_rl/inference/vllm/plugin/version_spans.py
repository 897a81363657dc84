"""Which policy version sampled which token of which request."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Span = tuple[int, int]
"""(index of the first generated token, policy version): it holds up to the next span's start, or to the end."""

_ENGINE_ID = re.compile(r"(?P<choice>\d+_)?(?:generate-tokens-|cmpl-|chatcmpl-)?(?P<id>.*)-[0-9a-f]{8}")


def client_request_id(engine_id: str) -> str:
    """The request id that the client gave, from the one used inside the engine.

    `generate-tokens-<id>-<8 hex>` becomes `<id>`. With n > 1 the engine numbers the choices: `2_generate-tokens-<id>-<8 hex>`
    becomes `2_<id>`.
    """
    match = _ENGINE_ID.fullmatch(engine_id)
    return (match["choice"] or "") + match["id"] if match else engine_id


@dataclass
class _History:
    num_tokens: int = 0
    spans: list[Span] = field(default_factory=list)


class VersionSpans:
    """Counts the tokens that each engine step samples for each request, and records where the version changes.

    It counts what the sampler returned, when it returned it. So it needs no assumption about waiting, preempted or
    recomputed requests or about prefill in chunks: a step that samples nothing for a request adds nothing.

    Of the finished requests, the newest `max_finished` are kept, whether or not somebody has asked for them: asking changes
    nothing, so it may be repeated. Cost: a few dictionary look-ups per request and step.
    """

    def __init__(self, max_finished: int = 16384) -> None:
        self._max_finished = max_finished
        self._histories: dict[str, _History] = {}  # by engine id
        self._engine_ids: dict[str, str] = {}  # client id -> engine id
        self._finished: dict[str, None] = {}  # engine ids, oldest first

    def record(self, engine_ids: Sequence[str], sampled: Sequence[Sequence[int]], version: int) -> None:
        """One engine step: request `engine_ids[i]` got the tokens `sampled[i]` (often one, none during prefill)."""
        for engine_id, tokens in zip(engine_ids, sampled, strict=True):
            if not tokens:
                continue
            history = self._histories.get(engine_id)
            if history is None:
                history = self._histories[engine_id] = _History()
                self._engine_ids[client_request_id(engine_id)] = engine_id
            if not history.spans or history.spans[-1][1] != version:
                history.spans.append((history.num_tokens, version))
            history.num_tokens += len(tokens)

    def finish(self, engine_ids: Iterable[str]) -> None:
        """The engine has dropped these requests: they will get no more tokens."""
        self._finished.update((engine_id, None) for engine_id in engine_ids if engine_id in self._histories)
        while len(self._finished) > self._max_finished:
            self._forget(next(iter(self._finished)))

    def ask(self, client_ids: Iterable[str]) -> dict[str, list[Span]]:
        """The spans of each request that has generated a token; unknown and forgotten ones are left out."""
        engine_ids = {client_id: self._engine_ids[client_id] for client_id in client_ids if client_id in self._engine_ids}
        return {client_id: list(self._histories[engine_id].spans) for client_id, engine_id in engine_ids.items()}

    def _forget(self, engine_id: str) -> None:
        del self._histories[engine_id], self._finished[engine_id]
        client_id = client_request_id(engine_id)
        if self._engine_ids[client_id] == engine_id:  # a later request may have taken the id over
            del self._engine_ids[client_id]
