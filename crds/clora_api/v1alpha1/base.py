"""What the models of both kinds share: field types in the conventions of the Kubernetes API, and the base model.

Conventions: camelCase names, no floats (decimals are checked strings), durations as fooSeconds, every string, list and
map bounded, every field described so that `kubectl explain` teaches.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

# A decimal such as 0.95, 5e-4 or 1.0E-5, written as a string because the Kubernetes API has no floats.
DECIMAL_PATTERN = r"^[0-9]{1,9}(\.[0-9]{1,12})?([eE][+-]?[0-9]{1,2})?$"
DNS_LABEL_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
# A path below a root: no leading slash, no empty, "." or ".." segment.
RELATIVE_PATH_PATTERN = r"^([^/.][^/]*|\.[^/.][^/]*|\.\.[^/]+)(/([^/.][^/]*|\.[^/.][^/]*|\.\.[^/]+))*$"

OBJECT_NAME_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
ObjectName = Annotated[str, Field(pattern=OBJECT_NAME_PATTERN, min_length=1, max_length=253)]
LabelName = Annotated[str, Field(pattern=DNS_LABEL_PATTERN, min_length=1, max_length=63)]


def _said(pattern: str, message: str) -> dict[str, Any]:
    """In the CRD, the pattern becomes a rule: a sentence that says what to write, instead of the expression."""
    return {"x-kubernetes-validations": [{"rule": f"self.matches(r'{pattern}')", "message": message}]}


DecimalString = Annotated[
    str,
    Field(
        pattern=DECIMAL_PATTERN,
        max_length=32,
        json_schema_extra=_said(DECIMAL_PATTERN, "must be a decimal number in quotes, such as '5e-4' or '0.95'"),
    ),
]
RelativePath = Annotated[
    str,
    Field(
        pattern=RELATIVE_PATH_PATTERN,
        min_length=1,
        max_length=512,
        json_schema_extra=_said(
            RELATIVE_PATH_PATTERN, "must be a path within the volume: no leading slash, no '.', '..' or empty part"
        ),
    ),
]


class ApiModel(BaseModel):
    """camelCase outside, snake_case inside; unknown fields are an error, as with `kubectl --validate=strict`."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)

    def to_api(self) -> dict[str, Any]:
        """As the API server would store it: camelCase, without unset optional fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class StatusModel(ApiModel):
    """Status is read back after upgrades and downgrades: unknown fields are ignored rather than refused."""

    model_config = ConfigDict(extra="ignore")


def number(value: str) -> float:
    """The value of a DecimalString."""
    return float(Decimal(value))


def rules(*pairs: tuple[str, str]) -> ConfigDict:
    """CEL rules of a model, as (rule, message) pairs; messages say what to do.

    Rules that compare with oldSelf sit on the parent of the fields they guard and use has(): a rule on an optional
    field itself is skipped when the field comes or goes.
    """
    return ConfigDict(json_schema_extra={"x-kubernetes-validations": [{"rule": r, "message": m} for r, m in pairs]})
