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
    reads = {
        "/health": ("Is the model really scoring?", "application/json", {"200": "It is.", "503": "It is not."}),
        "/metrics": ("Counts for Prometheus.", "text/plain", {"200": "The text format."}),
    }
    paths: dict[str, Any] = {path: {"post": _post(body)} for path, body in requests.items()}
    for path, (summary, media, answers) in reads.items():
        responses = {status: _answer(text, media, {}) for status, text in answers.items()}
        paths[path] = {"get": {"summary": summary, "responses": responses}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "streamrl reward server", "version": version("streamrl")},
        "paths": paths,
        "components": {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }


def _post(body: type[BaseModel]) -> dict[str, Any]:
    rewards = {
        "type": "object",
        "required": ["rewards"],
        "properties": {"rewards": {"type": "array", "items": {"type": "number"}}},
    }
    error = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
    responses = {"200": _answer("A reward a row, in their order.", "application/json", rewards)}
    responses |= {status: _answer(text, "application/json", error) for status, text in _REASONS.items()}
    return {
        "summary": (body.__doc__ or "").strip(),
        "security": [{"bearer": []}, {}],
        "requestBody": {"required": True, "content": {"application/json": {"schema": body.model_json_schema()}}},
        "responses": responses,
    }


def _answer(description: str, media: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {media: {"schema": schema}}}
