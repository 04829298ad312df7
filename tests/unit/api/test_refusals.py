"""Every rule of the generated CRDs is in a table of refusals, which integration/test_crds.py puts to the API server."""

from __future__ import annotations

import pytest
import yaml

from clora_api import GROUP
from tests.integration.test_crds import CRDS, REFUSED_CHANGES, REFUSED_ENGINES, REFUSED_EXPERIMENTS
from tests.integration.test_crds_status import RULES, schemas

REFUSED = {
    "loraexperiments": [words for _, words in REFUSED_EXPERIMENTS],
    "loraengines": [words for _, words in REFUSED_ENGINES],
}
for plural, _, _, words in REFUSED_CHANGES:
    REFUSED[plural].append(words)


@pytest.mark.parametrize("plural", sorted(REFUSED))
def test_every_rule_has_a_row_that_it_refuses(plural: str) -> None:
    definition = yaml.safe_load((CRDS / f"{plural}.{GROUP}.yaml").read_text())
    found = [rule for schema in schemas(definition) for rule in schema.get(RULES, ())]
    assert found
    assert all(rule.get("message") for rule in found), "a rule without a sentence says only which rule it is"
    messages = {rule["message"] for rule in found}
    assert [message for message in sorted(messages) if not any(words in message for words in REFUSED[plural])] == []
