"""Calls of tools in text: what is written is read, and what cannot be is said to be so."""

from __future__ import annotations

import json
from keyword import iskeyword

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymeflow.environments.messages import Call
from rhymeflow.environments.parsing import parse_calls
from rhymeflow.environments.tools import CallRefused, arguments_of, fits, schema_of
from rhymeflow.errors import UserError
from tests.environments import worlds

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)  # fmt: skip
ARGUMENTS = st.dictionaries(st.text(), JSON)
NAMES = st.text(min_size=1)


@given(
    st.lists(st.tuples(NAMES, ARGUMENTS), max_size=3),
    st.sampled_from(["", " ", "\n", "let me see\n"]),
)
def test_json_calls_come_back_as_they_were_written(calls, between) -> None:
    text = between.join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    )
    read = parse_calls(text)
    assert [(each.name, json.loads(each.arguments), each.error) for each in read] == [
        (name, arguments, "") for name, arguments in calls
    ]


def test_the_end_of_a_call_may_stand_in_a_string_and_arguments_be_one() -> None:
    arguments = {"text": "</tool_call><tool_call>{"}
    for given_ in (arguments, json.dumps(arguments)):
        text = json.dumps({"name": "say", "arguments": given_})
        [call] = parse_calls(f"<tool_call>{text}</tool_call>")
        assert json.loads(call.arguments) == arguments


@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[a-z_]+", fullmatch=True),
            st.dictionaries(
                st.from_regex(r"[a-z_]+", fullmatch=True),
                st.text().filter(lambda value: "</parameter>" not in value),
            ),
        ),
        max_size=3,
    )
)
def test_xml_calls_come_back_as_they_were_written(calls) -> None:
    text = "".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given_.items())
        + "</function>\n</tool_call>"
        for name, given_ in calls
    )
    read = parse_calls(text)
    assert [(each.name, json.loads(each.arguments)) for each in read] == calls
    assert all(each.is_text and not each.error for each in read)


WORDS = st.from_regex(r"[a-z_]+", fullmatch=True).filter(lambda word: not iskeyword(word))


@settings(max_examples=30)
@given(st.lists(st.tuples(WORDS, st.dictionaries(WORDS, JSON)), max_size=2), st.booleans())
def test_calls_in_python_come_back_as_they_were_written(calls, as_json: bool) -> None:
    write = (lambda x: json.dumps(x, ensure_ascii=False)) if as_json else repr
    written = [
        f"{name}({', '.join(f'{key}={write(value)}' for key, value in given_.items())})"
        for name, given_ in calls
    ]
    read = parse_calls(f"so <|tool_call_start|>[{', '.join(written)}]<|tool_call_end|> then")
    assert [(each.name, json.loads(each.arguments)) for each in read] == calls


def test_text_in_a_python_call_may_hold_its_punctuation_and_ends_of_lines() -> None:
    [call] = parse_calls("<|tool_call_start|>[run(code='f(1, g(2))\nh()')]<|tool_call_end|>")
    assert json.loads(call.arguments) == {"code": "f(1, g(2))\nh()"}
    for bad in ("[f(1)]", "[f(a=b)]", "[f(a='x]", "f", "[f(a=1e999)]", "(" * 9**6, "-" * 9**6):
        [call] = parse_calls(f"<|tool_call_start|>{bad}<|tool_call_end|>")
        assert "it is not [NAME(ARGUMENT=VALUE, ...), ...]" in call.error
    assert parse_calls("<|tool_call_start|>[f()]")[0].error


@given(st.text(alphabet='<>/{}[]":, tool_calfunctiparme=\n1'))
def test_every_opened_call_is_read_or_said_to_be_malformed(text) -> None:
    for part in (text, f"<tool_call>{text}", f"<tool_call>{text}</tool_call>"):
        calls = parse_calls(part)
        assert bool(calls) == ("<tool_call>" in part)
        assert all(bool(each.error) != bool(each.name) for each in calls)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"name": "add"', "it is no JSON"),
        ('{"name": "add"} so', "it does not end with </tool_call>"),
        ("[1]", "no JSON object"),
        ('{"arguments": {}}', 'no "name"'),
        ('{"name": "add", "arguments": [1]}', '"arguments" is no JSON object'),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is no JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("<function=>", "names no tool"),
        ("<function=a><parameter=x>1", "does not end with </parameter>"),
        ("<function=a>", "does not end with </function>"),
    ],
)
def test_a_malformed_call_says_what_is_wrong_and_hides_no_other(text: str, error: str) -> None:
    good = '<tool_call>{"name": "b"}</tool_call>'
    bad, other = parse_calls(f"<tool_call>{text}</tool_call>{good}")
    assert error in bad.error
    assert other == Call("b")


SCHEMAS = {"add": schema_of(worlds.Counter.add, "tool add")}


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (Call("", error="it is odd"), "cannot be read: it is odd"),
        (Call("ad"), "no tool 'ad'; did you mean add?"),
        (Call("add"), "add needs the argument 'amount'"),
        (Call("add", '{"amount": 1, "time": 2}'), "no argument 'time'; did you mean times?"),
        (Call("add", '{"amount": "1"}'), "'amount' is \"1\", should be integer"),
        (Call("add", '{"amount": true}'), "'amount' is true, should be integer"),
        (Call("add", '{"amount": 1.5}'), "'amount' is 1.5, should be integer"),
        (Call("add", '{"amount": "one"}', is_text=True), "'amount' is \"one\", should be integer"),
    ],
)
def test_what_does_not_fit_the_tool_is_refused(call: Call, error: str) -> None:
    with pytest.raises(CallRefused) as refused:
        arguments_of(call, SCHEMAS)
    assert error in str(refused.value)


def test_types_of_schemas() -> None:
    def tool(a: int | None, b: list[str], c: dict[str, float], d: tuple[int, str]) -> None:
        """Do.

        Args:
            a: one.
            b: two.
            c: three.
            d: four.
        """

    a, b, c, d = schema_of(tool, "tool")["function"]["parameters"]["properties"].values()
    one_of = {"type": "string", "enum": ["x", "y"]}
    good = [(None, a), (1, a), (["x"], b), ({"x": 1}, c), ([1, "x"], d), ("x", one_of)]
    bad = [("1", a), ([1], b), ({"x": "1"}, c), ([1], d), ("z", one_of)]
    assert all(fits(*each) for each in good)
    assert not any(fits(*each) for each in bad)


LOOK = {"type": "object", "properties": {"deep": {"type": "boolean"}}}


@pytest.mark.parametrize(
    ("given_", "is_text", "expected"),
    [
        ({"amount": 3, "times": 2}, False, {"amount": 3, "times": 2}),
        ({"amount": "3"}, True, {"amount": 3}),
        ({"deep": "True"}, True, {"deep": True}),
        ({"deep": "true"}, True, {"deep": True}),
        ({"deep": "False"}, True, {"deep": False}),
        ({"deep": "yes"}, True, None),
    ],
)
def test_arguments_that_fit_are_given(given_, is_text: bool, expected) -> None:
    schemas = SCHEMAS | {"look": {"function": {"name": "look", "parameters": LOOK}}}
    call = Call("look" if "deep" in given_ else "add", json.dumps(given_), is_text)
    if expected is None:
        with pytest.raises(CallRefused, match="should be boolean"):
            arguments_of(call, schemas)
    else:
        assert arguments_of(call, schemas) == expected


def test_a_tool_whose_arguments_have_no_names_is_refused() -> None:
    with pytest.raises(UserError, match="'rest' cannot be given by name"):
        schema_of(lambda *rest: None, "tool odd")
