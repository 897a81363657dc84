"""The typed errors of sampling."""


class ServerError(RuntimeError):
    """A vLLM server that is dead, hangs, or answers with an error: names the server, what was asked, and what came back."""

    def __init__(self, server: str, asked: str, answer: str):
        self.server, self.asked, self.answer = server, asked, answer
        super().__init__(f"{server}: {asked}: {answer}")

    def __reduce__(self):
        return ServerError, (self.server, self.asked, self.answer)


class PromptError(ValueError):
    """A prompt that this run can never sample: too long for the model, or refused by the server as bad input."""
