"""A page about the endpoints, made from the OpenAPI description. It loads nothing from elsewhere."""

from __future__ import annotations

from html import escape
from typing import Any

STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
code,pre{font-family:ui-monospace,monospace;font-size:.93em}
pre{white-space:pre-wrap}
details{border:1px solid #8886;border-radius:6px;margin:.4rem 0;padding:.4rem .8rem}
summary{cursor:pointer}
.m{display:inline-block;min-width:4.2em;font-weight:700}
table{border-collapse:collapse;margin:.5rem 0}
td,th{text-align:left;vertical-align:top;padding:.15rem 1rem .15rem 0}
"""


def page(openapi: dict[str, Any]) -> str:
    """The whole page, as HTML."""
    groups: dict[str, list[str]] = {}
    for path, methods in openapi["paths"].items():
        for method, endpoint in methods.items():
            group = (endpoint.get("tags") or ["other"])[0]
            groups.setdefault(group, []).append(_endpoint(openapi, method, path, endpoint))
    body = "".join(f"<h2>{escape(group)}</h2>{''.join(parts)}" for group, parts in groups.items())
    title = escape(f"{openapi['info']['title']} {openapi['info']['version']}")
    about = escape(openapi["info"].get("description", ""))
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title><style>{STYLE}</style>"
        f"<h1>{title}</h1><pre>{about}</pre>"
        f"<p>The same for programs: <a href='/openapi.json'>/openapi.json</a></p>{body}</html>"
    )


def _endpoint(openapi: dict[str, Any], method: str, path: str, endpoint: dict[str, Any]) -> str:
    rows = [
        _row(
            one["name"],
            one.get("schema", {}),
            one.get("required", False),
            one.get("description", ""),
            openapi,
        )
        for one in endpoint.get("parameters", ())
    ]
    content = endpoint.get("requestBody", {}).get("content", {})
    for kind in content.values():
        rows += _fields(openapi, kind.get("schema", {}))
    answers = [
        _type(openapi, kind.get("schema", {}))
        for status, answer in endpoint.get("responses", {}).items()
        if status.startswith("2")
        for kind in answer.get("content", {}).values()
    ]
    table = f"<table>{''.join(rows)}</table>" if rows else "<p>no parameters</p>"
    answer = f"<p>Answer: <code>{escape(', '.join(answers) or 'nothing')}</code></p>"
    head = f"<span class='m'>{method.upper()}</span><code>{escape(path)}</code>"
    return (
        f"<details><summary>{head} {escape(endpoint.get('summary', ''))}</summary>{table}{answer}</details>"
    )


def _fields(openapi: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    found = _resolved(openapi, schema)
    needed = found.get("required", ())
    return [
        _row(name, one, name in needed, one.get("description", ""), openapi)
        for name, one in found.get("properties", {}).items()
    ]


def _row(name: str, schema: dict[str, Any], required: bool, about: str, openapi: dict[str, Any]) -> str:
    default = "required" if required else f"default {schema.get('default')!r}" if "default" in schema else ""
    cells = (f"<code>{escape(name)}</code>", escape(_type(openapi, schema)), escape(default), escape(about))
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _type(openapi: dict[str, Any], schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rsplit("/", 1)[1])
    if "anyOf" in schema:
        return " or ".join(_type(openapi, one) for one in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    kind = str(schema.get("type", "any"))
    return f"list of {_type(openapi, schema['items'])}" if kind == "array" and "items" in schema else kind


def _resolved(openapi: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in schema:
        return schema
    found: dict[str, Any] = openapi["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    return found
