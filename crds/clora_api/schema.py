"""Pydantic models -> structural OpenAPI v3 schemas as CustomResourceDefinitions want them.

A structural schema has no $ref, no null, no title and no `const`; optional fields are just not required, and what is
absent stays absent. A part of the spec that has defaults throughout gets them even when it is absent as a whole: CEL
rules may so compare it without has(), and people see what they get. Leaves out what clora's models do not use (unions
of objects, recursive models).
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

_DROPPED = {"title", "additionalProperties_false", "discriminator"}


class _Generator(GenerateJsonSchema):
    """Writes out the default of a field whose default is a whole model (pydantic leaves factories out)."""

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        json_schema = super().default_schema(schema)
        factory = schema.get("default_factory")
        if isinstance(factory, type) and issubclass(factory, BaseModel):
            default = factory()
            json_schema["default"] = default.model_dump(mode="json", by_alias=True, exclude_none=True)
        return json_schema


def structural_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The structural schema of `model`, by alias.

    Raises ValueError for a construct that a structural schema cannot express.
    """
    raw = model.model_json_schema(by_alias=True, mode="validation", schema_generator=_Generator)
    definitions = raw.pop("$defs", {})
    schema = _convert(raw, definitions, at=model.__name__)
    assert isinstance(schema, dict)
    return schema


def _convert(node: dict[str, Any], definitions: dict[str, Any], at: str) -> dict[str, Any]:
    node = _resolve(node, definitions, at)
    out: dict[str, Any] = {}
    for key, value in node.items():
        if key in _DROPPED:
            continue
        if key == "pattern" and "x-kubernetes-validations" in node:
            continue  # the rule says the same, with a sentence
        if key == "properties":
            out[key] = {name: _convert(sub, definitions, f"{at}.{name}") for name, sub in value.items()}
        elif key == "items":
            out[key] = _convert(value, definitions, f"{at}[]")
        elif key == "additionalProperties":
            if isinstance(value, dict):
                out[key] = _convert(value, definitions, f"{at}{{}}")
            elif value is True and not node.get("x-kubernetes-preserve-unknown-fields"):
                raise ValueError(f"{at}: a free-form object needs x-kubernetes-preserve-unknown-fields")
        elif key == "patternProperties":
            # not part of structural schemas: the values' schema stays, a CEL rule may check the keys
            (values,) = value.values()
            out["additionalProperties"] = _convert(values, definitions, f"{at}{{}}")
        elif key == "const":
            out["enum"] = [value]
        elif key == "propertyNames":
            continue  # not part of structural schemas; the engine's models check names again
        else:
            out[key] = value
    if "description" in out and isinstance(out["description"], str):
        out["description"] = " ".join(out["description"].split())
    return out


def _resolve(node: dict[str, Any], definitions: dict[str, Any], at: str) -> dict[str, Any]:
    """Follows $ref, and takes the one non-null branch of an optional field; siblings of the reference win."""
    node = dict(node)
    while "$ref" in node or "anyOf" in node or "allOf" in node:
        if "$ref" in node:
            target = definitions[node.pop("$ref").rsplit("/", 1)[1]]
            node = {**target, **node}
            continue
        key = "anyOf" if "anyOf" in node else "allOf"
        branches = [b for b in node.pop(key) if b.get("type") != "null"]
        if len(branches) != 1:
            raise ValueError(f"{at}: a union has no structural schema")
        node = {**branches[0], **node}
    if node.get("default", ...) is None:
        del node["default"]
    return node
