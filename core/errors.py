"""The error taxonomy: each class knows its code, its HTTP status and whose fault it is.

Route groups render these in their own wire form; nothing else in the project invents a status.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

Fault = Literal["client", "server"]
StoreFailure = Literal["full", "readonly", "locked", "corrupt", "version", "other"]


class StartError(Exception):
    """The server cannot start: one sentence naming the cause and the way out. The process exits with 1."""


class SettingsError(StartError):
    """A setting is unknown, contradictory or out of range."""


class CheckpointError(StartError):
    """A model file cannot be used; the message says what is wrong with it and what to do."""


class PluginError(StartError):
    """A plugin failed to load, clashes with another, or implements a hook that does not exist."""


class StoreError(Exception):
    """A state store failed; what it holds is as it was before the call.

    For the log and the health page, never for a client: the message names the file and the way out.

    Args:
        reason: 'full' (no space), 'readonly', 'locked' (by another program), 'corrupt', 'version' (written by a newer
            version) or 'other'.
    """

    def __init__(self, message: str, reason: StoreFailure) -> None:
        super().__init__(message)
        self.reason = reason


class RequestError(Exception):
    """A request that ends in an error.

    Args:
        message: what is wrong and the way out; never a path, a prompt or a stack trace.
        param: dotted path of the field at fault, e.g. ``messages.0.content``; None when no field is.
        retry_after: seconds after which trying again makes sense.
        extra: further members some route groups put beside the message.
    """

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    fault: ClassVar[Fault] = "server"
    should_retry: ClassVar[bool | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.extra = extra or {}


class ClientError(RequestError):
    code = "invalid_request"
    status = 400
    fault = "client"


class BadRequest(ClientError):
    """The request as a whole cannot be served: invalid JSON, two bodies in one, too many rows."""


class InvalidField(ClientError):
    """A field fails validation. Its status is the route group's own validation status (400 or 422)."""

    code = "invalid_value"


class MissingField(InvalidField):
    code = "missing_required_parameter"


class UnsupportedField(ClientError):
    code = "unsupported_parameter"


class Unauthorized(ClientError):
    code = "invalid_api_key"
    status = 401


class NotFound(ClientError):
    code = "not_found"
    status = 404


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(ClientError):
    code = "method_not_allowed"
    status = 405


class SessionBusy(ClientError):
    """A session's queue of waiting turns is full."""

    code = "session_busy"
    status = 409


class StateExists(ClientError):
    """An import would replace a state."""

    code = "state_exists"
    status = 409


class BodyTooLarge(ClientError):
    code = "body_too_large"
    status = 413


class RateLimited(ClientError):
    code = "rate_limit_exceeded"
    status = 429


class ClientClosedRequest(ClientError):
    """The client left before its answer was ready; nobody reads this one but the log."""

    code = "client_closed_request"
    status = 499


class InternalError(RequestError):
    """Something unexpected; the log holds the traceback under the request's trace id."""


class RowFailed(RequestError):
    """One row could not go on, e.g. its logits were NaN; the other rows did."""

    code = "row_failed"


class Overloaded(RequestError):
    """Too much is waiting already."""

    code = "server_overloaded"
    status = 503

    def __init__(self, message: str, *, retry_after: float = 1.0, **kwargs: Any) -> None:
        super().__init__(message, retry_after=retry_after, **kwargs)


class Draining(Overloaded):
    """The server is shutting down."""


class ModelLoading(Overloaded):
    code = "model_loading"


class EngineDead(RequestError):
    """The engine thread has ended; only a restart helps."""

    code = "engine_dead"
    status = 503
    should_retry = False


class OutOfMemory(RequestError):
    code = "out_of_memory"
    status = 503
    should_retry = False


class StateError(RequestError):
    """A stored state cannot be used; it is never loaded, and never replaced by the zero state. Counted by `code`."""

    code = "state_unusable"
    should_retry = False


class StateCorrupt(StateError):
    """A stored state is damaged: truncated, changed, or not the record of its key."""

    code = "state_corrupt"


class StateVersion(StateError):
    """A stored state has a format version that this server does not read."""

    code = "state_version"
    status = 409
    fault = "client"


class StateForeign(StateError):
    """A stored state belongs to another model, another initial state or another state type."""

    code = "state_foreign"
    status = 409
    fault = "client"


class StateLost(StateError):
    """A session's last state was lost: the store failed, or memory was short. An older one is not given instead."""

    code = "state_lost"


class StateUnavailable(Overloaded):
    """The state store cannot be asked at the moment; what is in memory goes on."""

    code = "state_unavailable"
