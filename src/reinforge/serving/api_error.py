"""What a request is refused with, in the form of the API that was called."""

from __future__ import annotations

from collections.abc import Mapping

from reinforge.dialects.chat_call import BadRequest


class ApiError(BadRequest):
    """A request that is refused, or that failed; the server writes it in OpenAI's form.

    Example: `raise ApiError(404, "there is no file 'file-1'", param="file_id", code="file_not_found")`.

    Args:
        status: The HTTP status.
        message: What is wrong and what is allowed.
        type: OpenAI's `error.type`; None: the usual one of the status.
        param: The field of the request.
        code: A machine-readable name of the error.
        headers: Headers of the response, such as `retry-after`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message, param, status=status, code=code)
        self.type, self.headers = type, dict(headers or {})
