"""Bodies of other APIs, which ask for a chat in words of their own: each becomes the chat that it asks for."""

from typing import Any

from baton.core.errors import InvalidRequest
from baton.router.openai.body import as_model
from baton.router.openai.chat_request import ChatRequest
from baton.router.openai.options import Wire

_ONE_ANSWER = (None, 1)


class Translated(Wire):
    """One of them. Fields that it does not name are those of a chat, and are read, refused or ignored as there."""

    def data(self) -> dict[str, Any]:
        """The chat's body.

        Raises:
            InvalidRequest: it asks for what no chat can be.
        """
        raise NotImplementedError

    def echoed(self) -> dict[str, Any]:
        """What the reply repeats of it."""
        return {}

    def as_chat(self) -> ChatRequest:
        """The chat.

        Raises:
            InvalidRequest: it is none.
        """
        more = self.model_extra or {}
        if more.get("n") not in _ONE_ANSWER:
            raise InvalidRequest("n is not supported: there is one answer", field="n")
        return as_model(more | {name: value for name, value in self.data().items() if value is not None}, ChatRequest)
