"""Which policy version sampled which token of which request."""

import re
from collections.abc import Iterable, Mapping, Sequence
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
    is_finished: bool = False
    is_asked: bool = False


class VersionSpans:
    """Counts the tokens that each engine step samples for each request, and notes where the version changes.

    It counts what the sampler returned, at the moment when it did. So it needs no assumption about waiting, preempted or
    recomputed requests or about prefill in chunks: a step that samples nothing for a request adds nothing.

    The history of a request is kept until it has been asked for and the request is finished; of finished requests that nobody
    asks for, the newest `max_unclaimed` are kept. Cost: a few dictionary look-ups per request and step.
    """

    def __init__(self, max_unclaimed: int = 16384):
        self._max_unclaimed = max_unclaimed
        self._histories: dict[str, _History] = {}  # by engine id
        self._engine_ids: dict[str, str] = {}  # client id -> engine id
        self._unclaimed: dict[str, None] = {}  # engine ids of finished requests that nobody asked for, oldest first

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
        for engine_id in engine_ids:
            history = self._histories.get(engine_id)
            if history is None:
                continue  # it never got a token
            history.is_finished = True
            if history.is_asked:
                self._forget(engine_id)
            else:
                self._unclaimed[engine_id] = None
        while len(self._unclaimed) > self._max_unclaimed:
            self._forget(next(iter(self._unclaimed)))

    def ask(self, client_ids: Iterable[str]) -> Mapping[str, list[Span]]:
        """The spans of each request that has generated a token; unknown and forgotten ones are left out."""
        answer = {}
        for client_id in client_ids:
            engine_id = self._engine_ids.get(client_id)
            if engine_id is None:
                continue
            history = self._histories[engine_id]
            answer[client_id] = list(history.spans)
            history.is_asked = True
            if history.is_finished:
                self._forget(engine_id)
        return answer

    def _forget(self, engine_id: str) -> None:
        del self._histories[engine_id]
        self._unclaimed.pop(engine_id, None)
        client_id = client_request_id(engine_id)
        if self._engine_ids.get(client_id) == engine_id:  # a later request may have taken the id over
            del self._engine_ids[client_id]
