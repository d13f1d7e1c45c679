"""The reward server's OpenAPI document, made from the same classes that check its requests."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel

_REASONS = {
    "400": "The body ended early.",
    "401": "A bearer token is needed, and this is not it.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large: send fewer rows at once.",
    "422": "The request is not one that can be scored; `error` says why.",
    "500": "The model gave no finite number; `error` says why.",
    "503": "Too many rows wait already, or the server is ending: try again.",
}


def document(requests: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    """`requests`: the body of each POST route, by path."""
    health = {"200": _answer("It is."), "503": _answer("It is not.")}
    metrics = {"200": _answer("The text format.", media="text/plain")}
    paths: dict[str, Any] = {path: {"post": _post(body)} for path, body in requests.items()}
    paths["/health"] = {"get": {"summary": "Is the model really scoring?", "responses": health}}
    paths["/metrics"] = {"get": {"summary": "Counts for Prometheus.", "responses": metrics}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "streamrl reward server", "version": version("streamrl")},
        "paths": paths,
        "components": {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }


def _post(body: type[BaseModel]) -> dict[str, Any]:
    numbers = {"type": "array", "items": {"type": "number"}}
    responses = {"200": _answer("A reward a row, in their order.", rewards=numbers)}
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
