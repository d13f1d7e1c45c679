"""The reward server's OpenAPI document, built from the classes that validate its requests, and its Prometheus metrics.

The metrics have a registry of their own, since several servers may live in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel

_REASONS = {
    "400": "The body ended early.",
    "401": "The bearer token is missing or wrong.",
    "403": "The request comes from a page in a browser.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large: send fewer rows at once.",
    "422": "The request cannot be scored; `error` says why.",
    "429": "Too many rows are waiting: try again.",
    "500": "The model failed or returned no finite number; `error` says why.",
    "503": "The server is shutting down: try another one, or try again later.",
}


def document(requests: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    """`requests`: the body of each POST route, by path."""
    health = {"200": _answer("It is."), "503": _answer("It is not.")}
    metrics = {"200": _answer("The text format.", media="text/plain")}
    paths: dict[str, Any] = {path: {"post": _post(body)} for path, body in requests.items()}
    paths["/health"] = {"get": {"summary": "Whether the model is scoring.", "responses": health}}
    paths["/metrics"] = {"get": {"summary": "Counts for Prometheus.", "responses": metrics}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "streamrl reward server", "version": version("streamrl")},
        "paths": paths,
        "components": {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }


def _post(body: type[BaseModel]) -> dict[str, Any]:
    numbers = {"type": "array", "items": {"type": "number"}}
    responses = {"200": _answer("One reward per row, in order.", rewards=numbers)}
    responses |= {status: _answer(text, error={"type": "string"}) for status, text in _REASONS.items()}
    return {
        "summary": (body.__doc__ or "").strip(),
        "security": [{"bearer": []}, {}],
        "requestBody": {"required": True, "content": {"application/json": {"schema": body.model_json_schema()}}},
        "responses": responses,
    }


def _answer(description: str, *, media: str = "application/json", **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "required": list(properties), "properties": properties} if properties else {}
    return {"description": description, "content": {media: {"schema": schema}}}


_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class ServiceMetrics:
    def __init__(self, *, pending_rows: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "streamrl_reward_requests", "Requests for scores, by status.", ["status"], registry=self._registry
        )
        self.rows = Counter("streamrl_reward_rows", "Rows scored.", registry=self._registry)
        self.tokens = Counter("streamrl_reward_tokens", "Tokens of the rows scored.", registry=self._registry)
        self.seconds = Histogram(
            "streamrl_reward_request_seconds",
            "Time from a request's arrival to its answer.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        pending = Gauge("streamrl_reward_pending_rows", "Rows waiting for a batch.", registry=self._registry)
        pending.set_function(pending_rows)

    def text(self) -> bytes:
        return generate_latest(self._registry)
