import json
import math

import pytest

from megatron_rl.rewards.rules import RULES, load_rule, rule_name


def score(spec, response, **row):
    return load_rule(spec)("a prompt", response, row)


def test_exact_match():
    """1 for the label or one of several labels, spaces around aside; a row without a label is an error."""
    assert score("exact_match", " 42\n", label=42) == 1 and score("exact_match", "42.", label="42") == 0
    assert score("exact_match", "b", label=["a", "b"]) == 1
    with pytest.raises(ValueError, match="the row has no 'label', only 'answer' .*--label-key"):
        score("exact_match", "42", answer=42)


def test_format():
    """1 where the whole response matches; think and answer tags unless another expression is given."""
    assert score("format", "<think>a\nb</think>\n<answer>7</answer>\n") == 1
    assert score("format", "<answer>7</answer>") == 0 and score("format", "so <think></think><answer></answer>") == 0
    assert score(r"format:a:\d+=b", "a:12=b") == 1 and score(r"format:\d+", "12 and more") == 0
    with pytest.raises(ValueError, match=r"--reward format:\(: not a regular expression"):
        load_rule("format:(")


@pytest.mark.parametrize(
    ("label", "response", "expected"),
    [
        ("42", "So it is \\boxed{42}.", 1),
        ("1/2", "The answer is $0.5$", 1),
        ("\\frac{1}{2}", "it is 1/2", 1),
        (7, "3 + 5 = 8", 0),
        ("42", "I do not know", 0),
    ],
)
def test_math_verify(label, response, expected):
    """Equal values in other spellings are right; other values and no value at all are wrong."""
    assert score("math_verify", response, label=label) == expected


def test_length():
    """1 at the target, falling linearly on both sides to 0."""
    assert [score("length:10", "x" * n) for n in (10, 5, 15, 20, 0, 99)] == [1, 0.5, 0.5, 0, 0, 0]
    for bad in ("length:0", "length:x", "length:"):
        with pytest.raises(ValueError, match="--reward length:.*positive number of characters"):
            load_rule(bad)


def test_sentiment():
    """Cheerful is positive, gloomy negative, neutral zero; the bounds are -1 and 1."""
    assert score("sentiment", "I love this wonderful day!") > 0.5
    assert score("sentiment", "This is a horrible, sad mess.") < -0.5
    assert score("sentiment", "The table has legs.") == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", ["chain_sum", "countdown", "sudoku", "arc_agi", "leg_counting"])
def test_reasoning_gym(task):
    """The task's own verifier gives its own answer 1 and nonsense less, for rows that were written as JSON."""
    import reasoning_gym

    entry = json.loads(json.dumps(reasoning_gym.create_dataset(task, size=1, seed=1)[0], default=str))
    right = f"<think>hm</think><answer>{entry['answer']}</answer>"
    assert score("reasoning_gym", right, **entry) == 1
    assert score("reasoning_gym", "<answer>pears</answer>", **entry) < 0.5
    assert score("reasoning_gym", right, **{**entry, "metadata": json.dumps(entry["metadata"])}) == 1


def test_every_rule_is_finite_on_odd_responses():
    """No shipped rule fails or leaves the finite numbers on empty, long or odd text."""
    row = {"label": "4", "answer": "4", "metadata": {"source_dataset": "chain_sum"}}
    for name in RULES:
        for response in ("", " ", "x" * 5000, "\x00\u2028é漢", "\\boxed{", "<answer>"):
            assert math.isfinite(score(name, response, **row)), (name, response)


def test_functions_of_files_and_unknown_names(tmp_path):
    """file.py:function is loaded; unknown names, options nobody reads, missing files and functions are named."""
    file = tmp_path / "mine.py"
    file.write_text("def half(prompt, response, row):\n    return row['x'] / 2\nnumber = 3\n")
    assert score(f"{file}:half", "", x=3) == 1.5
    assert (rule_name(f"{file}:half"), rule_name("format:a:b"), rule_name("length")) == ("half", "format", "length")
    for spec, message in [
        ("sentimental", "no such rule; known are exact_match, format"),
        ("sentiment:3", "takes no option; those that do: format, length"),
        (f"{tmp_path}/none.py:half", "no such file"),
        (f"{file}:third", "has no 'third'; it has half, number"),
        (f"{file}:number", "is a int, not a function"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_rule(spec)
