import pytest

from megatron_rl.rewards.conditions import parse_condition

ROW = {"data_source": "news", "level": 3, "tags": ["a", "b"], "ok": True}


@pytest.mark.parametrize(
    "text",
    [
        "data_source == 'news'",
        "data_source != 'math' and level >= 3",
        "not (level > 3) or ok == False",
        "data_source in ('math', 'news')",
        "data_source not in ['math']",
        "'a' in tags",
        "1 < level <= 3",
        "level > -1",
        "data_source == 'math' and missing > 1 or ok == True",
    ],
)
def test_conditions_mean_what_python_means(text):
    """A condition holds where Python's own evaluation of it does, and where that row is changed it does not."""
    known = {**ROW, "missing": 0}
    assert parse_condition(text)(ROW) is True and eval(text, {}, known)
    other = {"data_source": "math", "level": 9, "tags": [], "ok": False, "missing": 0}
    assert parse_condition(text)(other) == bool(eval(text, {}, other))


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true') == 0",
        "data_source.upper() == 'NEWS'",
        "level + 1 == 4",
        "data_source",
        "True",
        "(lambda: 1)() == 1",
        "[x for x in tags] == []",
        "tags[0] == 'a'",
        "(x := 1) == 1",
        "data_source is None",
        "data_source == f'{level}'",
        "data_source = 'news'",
        "",
        "level == (other, 1)",
    ],
)
def test_anything_else_is_refused(text):
    """Calls, attributes, arithmetic, bare names and broken text are refused when they are read, never run."""
    with pytest.raises(ValueError, match="allowed are row keys compared"):
        parse_condition(text)


def test_missing_keys_and_senseless_comparisons_are_named():
    """A row without the key, and a comparison of text with a number, are errors and not False."""
    with pytest.raises(ValueError, match="asks for the key 'topic'; the row has 'data_source', 'level'"):
        parse_condition("topic == 'x'")(ROW)
    with pytest.raises(ValueError, match="'<' not supported"):
        parse_condition("data_source < 3")(ROW)
