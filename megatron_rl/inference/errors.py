"""The typed errors of inference servers and their clients."""

from megatron_rl.errors import RunError, UserError


class ServerError(RunError):
    """An inference server that has exited, hangs, or answers with an error.

    Args:
        server: Name or URL of the server.
        asked: The request, such as "POST /pause".
        answer: What came back, or why nothing did.
    """

    def __init__(self, server: str, asked: str, answer: str) -> None:
        self.server, self.asked, self.answer = server, asked, answer
        super().__init__(f"{server}: {asked}: {answer}")

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return ServerError, (self.server, self.asked, self.answer)


class PromptError(UserError):
    """A prompt that this run can never sample: too long for the model, or refused by the server as bad input."""


class UnsupportedByEngineError(UserError, ValueError):
    """A setting that the run's inference engine does not offer, or an engine that is not registered."""
