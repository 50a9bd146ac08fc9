"""The error for unreadable YAML names the place and the remedy, and shows no value."""

import pytest
import yaml

from gpuledger.settings.yaml_errors import explain_yaml

PASSWORDS = ["@hunter", "`hunter", "%hunter", "*hunter", "!hunter", "|hunter", ">hunter", "'hunter"]
PASSWORDS += ['"hunter', '"hunt"er', "[hunter", "{hunter", "]hunter", ", hunter", "hun: ter"]


def message_of(text: str) -> str:
    with pytest.raises(yaml.YAMLError) as caught:
        yaml.safe_load(text)
    return explain_yaml(caught.value)


@pytest.mark.parametrize("password", PASSWORDS)
def test_a_text_that_begins_with_a_yaml_indicator_must_be_quoted(password: str) -> None:
    message = message_of(f"kafka:\n  sasl_password: {password}\n  client_id: x\n")
    assert "line " in message
    assert "quote a text that begins with one of @ ` % * & ! |" in message
    assert "hun" not in message


@pytest.mark.parametrize("text", ["a:\n\tb: 1\n", "\0"])
def test_quotes_are_not_suggested_for_other_errors(text: str) -> None:
    assert "quote" not in message_of(text)
