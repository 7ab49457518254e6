"""What the endpoints share: who generates, by which tokenizer and template, and the limits of HTTP."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from baton.core.errors import ModelFileDamaged
from baton.proto import inference_pb2
from baton.router.access.authenticator import Authenticator
from baton.router.inference import InferenceService
from baton.router.metrics import RouterMetrics
from baton.router.openai.chat_template import ChatTemplate
from baton.router.served_model import ServedModel

if TYPE_CHECKING:
    from baton.router.openai.body_reader import BodyReader

MAX_BODY_BYTES: Final = 16 << 20
_DEFAULTS: Final = {"temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """What the HTTP side of a router is started with.

    Attributes:
        port: 0 picks a free one.
        template: for chats; without one they are refused.
        defaults: sampling values of requests that name none.
        max_body_bytes: a larger body is refused unread.
        allowed_origins: web pages from these may call (CORS); "*" is any.
    """

    port: int
    template: ChatTemplate | None = None
    defaults: dict[str, Any] = field(default_factory=dict)
    max_body_bytes: int = MAX_BODY_BYTES
    allowed_origins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """What a body is understood by: no more than another process can be told.

    Attributes:
        name: of the model.
        encode: text to tokens.
        template: for chats; without one they are refused.
        defaults: sampling values of requests that name none.
    """

    name: str
    encode: Callable[[str], list[int]]
    template: ChatTemplate | None
    defaults: Mapping[str, Any]

    def with_defaults(self, sampling: inference_pb2.Sampling) -> inference_pb2.Sampling:
        """Fill in what the model's makers advise where the client said nothing."""
        for name, value in self.defaults.items():
            if not sampling.HasField(name):
                setattr(sampling, name, value)
        return sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """What every endpoint is given."""

    inference: InferenceService
    model: ServedModel
    metrics: RouterMetrics
    config: HttpConfig
    is_serving: Callable[[], bool]
    authenticator: Authenticator
    operators: Authenticator
    reader: "BodyReader"
    now_unix_s: Callable[[], float] = time.time


def advised_sampling(directory: Path) -> dict[str, Any]:
    """What a model's generation_config.json advises, as vLLM does by default.

    Raises:
        ModelFileDamaged: the file is there and cannot be read as what it should be.
    """
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        values = {name: kind(found[name]) for name, kind in _DEFAULTS.items() if found.get(name) is not None}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise ModelFileDamaged(f"{path} holds no usable sampling values: {error}", path=str(path)) from error
    return values
