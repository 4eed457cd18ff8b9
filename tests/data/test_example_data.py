from pathlib import Path

from megatron_rl.data.files import read_rows
from megatron_rl.data.preferences import PreferenceOptions, load_preferences
from megatron_rl.data.prompts import PromptOptions, load_prompts

DATA = Path(__file__).parents[2] / "examples" / "data"


def test_shipped_prompts_load(tokenizer):
    """Every prompt that ships loads whole and once; arithmetic labels are what Python computes."""
    for name, rows in (("topics", 320), ("arithmetic", 200)):
        data = load_prompts(PromptOptions((str(DATA / f"{name}.jsonl"),), max_prompt_length=200), tokenizer)
        assert (len(data), len({p.text for p in data.items})) == (rows, rows) and data.summary.endswith("file(s)")
    for row in read_rows(str(DATA / "arithmetic.jsonl")):
        question = row.values["prompt"][0]["content"]
        assert str(eval(question.removeprefix("What is ").partition("?")[0])) == row.values["label"]


def test_shipped_pairs_load_and_the_eval_split_is_held_out(tokenizer):
    """Every pair loads untouched, and no evaluation question stands in the training file."""
    questions = []
    for name, rows in (("preferences", 300), ("preferences_eval", 64)):
        file = str(DATA / f"{name}.jsonl")
        data = load_preferences(PreferenceOptions((file,), max_length=400), tokenizer)
        assert data.summary == f"{rows:,} pairs from 1 file(s)"
        questions.append({row.values["prompt"][0]["content"] for row in read_rows(file)})
    assert not questions[0] & questions[1]
