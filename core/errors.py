"""Every error Baton raises on purpose, as one tree; each leaf fixes its gRPC code, HTTP status and who retries.

    BatonError
    ├── InvalidRequest                 the client must change the request
    │   ├── EmptyPrompt
    │   ├── PromptTooLong
    │   ├── InvalidSampling
    │   ├── InvalidGrammar             a schema, regex or grammar that is malformed, too large, or that nothing fits
    │   ├── ConflictingOptions
    │   ├── InvalidText                not UTF-8
    │   ├── MalformedMessage           not the protobuf message it should be
    │   └── ModelNotFound
    ├── AccessRefused                  the caller must change who it is, or what it asks for
    │   ├── Unauthenticated            no API key, an unknown, revoked or expired one
    │   └── PermissionDenied           a key that is good, for something else
    ├── ServingError                   the request was fine; serving it was not possible
    │   ├── Overloaded                 a bounded queue is full
    │   ├── Draining                   the deployment is shutting down
    │   ├── NoWorker                   no live worker of a role that is needed
    │   ├── WorkersIncompatible        live workers of both roles, but no two that may hand over
    │   ├── HandoffTooLong             no hand-off can carry the prompt, and no decode worker may compute it
    │   ├── WorkerLost                 a worker died, was fenced or was restarted under the request
    │   ├── TransferFailed             the KV hand-off could not be completed and verified
    │   ├── ModelOutputInvalid         the model gave numbers that are not finite; nothing chosen from them is sent
    │   ├── RequestQuarantined         workers died of it; refused for a while
    │   ├── GrammarBudgetExceeded      following its grammar costs more than one request may spend
    │   ├── RequestCancelled
    │   ├── RequestDeadlineExceeded
    │   └── DeploymentLost             what a deployment cannot do without has ended
    │       ├── RouterLost             the router, more often than it is started again
    │       └── RayLost                a process of the Ray that `baton serve` started
    ├── StartupError                   a precondition of starting does not hold (exit code 3; ConfigInvalid is usage, 2)
    │   ├── ModelMissing
    │   ├── ModelFileDamaged
    │   ├── ModelTensorMissing
    │   ├── ModelTensorUnexpected
    │   ├── ModelTensorMisshapen
    │   ├── ModelUnsupported
    │   ├── ConfigInvalid
    │   ├── FeatureNotBuilt
    │   ├── PackageMissing
    │   ├── PortInUse
    │   ├── RayUnavailable
    │   │   └── RayAccessRefused       no token or certificate for a cluster, or not its own
    │   ├── RayVersionMismatch
    │   ├── WorkerStartFailed
    │   └── NumericsUnsupported
    ├── OperationError                 a step of a runbook
    │   ├── PreconditionUnmet          nothing was changed (exit code 3)
    │   └── StepFailed                 what it wanted did not come about
    ├── KernelArgumentInvalid          a tensor or option that a kernel is not made for; nothing was launched
    ├── InternalError                  an exception without a name of its own ended one request
    └── ProtocolError                  a peer broke the hand-off protocol; the frame or message is dropped

Operating errors live here and carry fields; programmer errors are asserts. `to_wire` and `from_wire` carry an error
across gRPC without losing its type.
"""

import json
import logging
from enum import Enum
from typing import Any, ClassVar

log = logging.getLogger(__name__)


class Retry(Enum):
    """Whether a retry of the same request may succeed, and who makes it."""

    NEVER = "never"  # the same request will fail again
    LATER = "later"  # the client, after a pause
    ELSEWHERE = "elsewhere"  # the router, on another worker


class BatonError(Exception):
    """Base of all errors. `fields` are the keyword arguments it was raised with.

    Args:
        message: one sentence that says what is wrong and, where it helps, what to do.
        **fields: JSON-able facts that a program may need (limits, names, values).
    """

    grpc_code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    retry: ClassVar[Retry] = Retry.NEVER

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions with keyword arguments do not pickle by default, and Ray pickles what an actor raises.
        return _rebuild, (type(self), self.message, self.fields)

    def to_wire(self) -> str:
        """Serialize type, message and fields as JSON (ASCII), for gRPC trailing metadata `baton-error`."""
        data = {"error": type(self).__name__, "message": self.message, "fields": self.fields}
        return json.dumps(data, default=str)  # a field that is not JSON-able must not hide the error


def _rebuild(kind: type["BatonError"], message: str, fields: dict[str, Any]) -> "BatonError":
    return kind(message, **fields)


class InvalidRequest(BatonError):
    """The request can never be served as it is."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 400


class EmptyPrompt(InvalidRequest):
    """No prompt, or one that tokenizes to nothing."""


class PromptTooLong(InvalidRequest):
    """Prompt, or prompt plus `max_tokens`, exceeds the model's length or the whole pool of a worker."""


class InvalidSampling(InvalidRequest):
    """A sampling value is NaN, negative or out of its range."""


class InvalidGrammar(InvalidRequest):
    """A JSON schema, regex or grammar is malformed, beyond a limit, or leaves no token to choose."""


class ConflictingOptions(InvalidRequest):
    """Two options that exclude each other were both given."""


class InvalidText(InvalidRequest):
    """Text that is not valid UTF-8."""


class MalformedMessage(InvalidRequest):
    """Bytes that do not parse as the protobuf message expected, or lack a required field."""


class ModelNotFound(InvalidRequest):
    """The request names a model this deployment does not serve."""

    grpc_code = "NOT_FOUND"
    http_status = 404


class AccessRefused(BatonError):
    """The caller lacks the permission for what it requests."""

    grpc_code = "PERMISSION_DENIED"
    http_status = 403


class Unauthenticated(AccessRefused):
    """No API key was presented, or one that is unknown, revoked or expired."""

    grpc_code = "UNAUTHENTICATED"
    http_status = 401


class PermissionDenied(AccessRefused):
    """The caller is known, and may not do this; another tenant's requests are not its own."""


class ServingError(BatonError):
    """A well-formed request that could not be served."""

    grpc_code = "UNAVAILABLE"
    http_status = 503
    retry = Retry.LATER


class Overloaded(ServingError):
    """A bounded queue is full; try again after a pause."""

    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429


class Draining(ServingError):
    """The deployment is shutting down: it accepts no new requests, and ends those that do not finish in time."""


class NoWorker(ServingError):
    """No live worker of a needed role."""


class WorkersIncompatible(ServingError):
    """Workers of both roles are alive, but every pair has refused: layout, model, TP or version differ."""


class HandoffTooLong(ServingError):
    """No hand-off to a decode worker can carry the prompt, and no decode worker may compute it."""

    retry = Retry.NEVER


class WorkerLost(ServingError):
    """A worker that served this request died, was fenced or was restarted."""

    retry = Retry.ELSEWHERE


class TransferFailed(ServingError):
    """The KV hand-off was not completed and verified; no token was decoded from it."""

    grpc_code = "ABORTED"
    retry = Retry.ELSEWHERE


class ModelOutputInvalid(ServingError):
    """The model returned NaN or an infinity for a token to be sampled; no token of that step was sent."""

    grpc_code = "INTERNAL"
    http_status = 500
    retry = Retry.ELSEWHERE


class RequestQuarantined(ServingError):
    """This prompt with these parameters was present at the deaths of several workers, and is refused for a while."""

    grpc_code = "FAILED_PRECONDITION"
    http_status = 422
    retry = Retry.NEVER


class GrammarBudgetExceeded(ServingError):
    """Following the grammar of a valid answer takes more time or memory than one request may spend."""

    grpc_code = "FAILED_PRECONDITION"
    http_status = 422
    retry = Retry.NEVER


class RequestCancelled(ServingError):
    """The client disconnected or cancelled the request."""

    grpc_code = "CANCELLED"
    http_status = 499
    retry = Retry.NEVER


class RequestDeadlineExceeded(ServingError):
    """The request's deadline passed; tokens generated before were streamed."""

    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 504
    retry = Retry.NEVER


class DeploymentLost(ServingError):
    """A process that the deployment needs has ended, and is not restarted."""

    retry = Retry.NEVER


class RouterLost(DeploymentLost):
    """The router ended more often than it is restarted."""


class RayLost(DeploymentLost):
    """A process of the private Ray ended, so no more workers can be started."""


class StartupError(BatonError):
    """A precondition of starting Baton does not hold. The CLI exits with 3, or with 2 for ConfigInvalid."""

    grpc_code = "FAILED_PRECONDITION"


class ModelMissing(StartupError):
    """The model directory or one of its required files does not exist."""


class ModelFileDamaged(StartupError):
    """A file of the model directory is truncated or not what its name says."""


class ModelTensorMissing(StartupError):
    """The checkpoint lacks tensors the architecture needs."""


class ModelTensorUnexpected(StartupError):
    """The checkpoint holds tensors the architecture has no place for."""


class ModelTensorMisshapen(StartupError):
    """A tensor's shape or dtype differs from what config.json implies."""


class ModelUnsupported(StartupError):
    """config.json describes an architecture or option Baton does not implement."""


class ConfigInvalid(StartupError):
    """An unknown configuration key, or a value out of range."""


class FeatureNotBuilt(StartupError):
    """A documented option whose feature is not in this version."""


class PackageMissing(StartupError):
    """An optional feature was requested, and the package it needs cannot be imported."""


class PortInUse(StartupError):
    """A port Baton was told to listen on is taken."""


class RayUnavailable(StartupError):
    """Ray is not installed, or no cluster answers at the address given."""


class RayAccessRefused(RayUnavailable):
    """A cluster requires a token or certificate, and this process has none, or the wrong one. Waiting does not help."""


class RayVersionMismatch(StartupError):
    """The installed Ray has a version that Baton is not tested with, or differs from the cluster's."""


class WorkerStartFailed(StartupError):
    """A worker process ended, or did not report in time, while starting."""


class NumericsUnsupported(StartupError):
    """This machine failed the self-test of the requested numerics mode."""


class OperationError(BatonError):
    """A step of a runbook did not succeed."""

    grpc_code = "FAILED_PRECONDITION"


class PreconditionUnmet(OperationError):
    """A precondition of a runbook does not hold; nothing was changed."""


class StepFailed(OperationError):
    """A runbook's step was carried out, and its intended result did not come about."""


class KernelArgumentInvalid(BatonError):
    """A public function of `kernels` got an unsupported tensor or option; nothing was allocated or launched."""


class ProtocolError(BatonError):
    """A peer violated the hand-off protocol; its message changed no state."""


class InternalError(BatonError):
    """An unexpected exception while this request was served; only this request ends with it."""


def as_internal(where: str, error: BaseException) -> BatonError:
    """Convert any exception into a request's error, at a boundary; log it with its traceback if it is not Baton's.

    Args:
        where: what failed; clients see it and the exception's type, but not its text.
        error: the exception.
    """
    if isinstance(error, BatonError):
        return error
    log.error("%s failed", where, exc_info=error)
    return InternalError(f"{where} failed: {type(error).__name__}", cause_type=type(error).__name__)


def _leaves(kind: type[BatonError]) -> dict[str, type[BatonError]]:
    found = {kind.__name__: kind}
    for child in kind.__subclasses__():
        found |= _leaves(child)
    return found


def from_wire(text: str) -> BatonError:
    """Parse the error that `to_wire` wrote. An unknown type (from a newer peer) becomes a plain BatonError.

    Raises:
        MalformedMessage: `text` is not what `to_wire` writes.
    """
    try:
        data = json.loads(text)
        kind, message, fields = data["error"], data["message"], data["fields"]
        return _leaves(BatonError).get(kind, BatonError)(message, **fields)
    except (ValueError, KeyError, TypeError) as error:
        raise MalformedMessage(f"not an error of Baton's: {text[:200]!r}") from error
