import json

import pytest

from megatron_rl.data.prompts import PromptOptions, load_prompts

CHAT = [{"role": "user", "content": "hi"}]


def save(tmp_path, rows, name="a.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def load(tmp_path, tokenizer, rows, **options):
    options = {"max_prompt_length": 100, "shuffle": False, "apply_chat_template": False} | options
    return load_prompts(PromptOptions((save(tmp_path, rows),), **options), tokenizer)


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("in_template", [True, False])
@pytest.mark.parametrize("chat", [True, False])
def test_exactly_one_bos(tmp_path, make_tokenizer, adds, in_template, chat):
    """One BOS in front where tokenizer or template puts one, never two, whichever of them writes it."""
    tokenizer = make_tokenizer(adds, in_template)
    prompt = load(tmp_path, tokenizer, [{"prompt": CHAT if chat else "hi"}], apply_chat_template=chat).items[0]
    expected = "<|start|>user\nhi<|end|>\n<|start|>assistant\n" if chat else "hi"
    has_bos = adds or (chat and in_template)
    assert tokenizer.decode(prompt.token_ids) == ("<s>" if has_bos else "") + expected
    assert prompt.token_ids.count(tokenizer.bos_token_id) == has_bos


def test_text_becomes_a_user_message_and_the_system_prompt_stands_first(tmp_path, tokenizer):
    """With the chat template text is the user's message; a system prompt is added where the chat has none."""
    own = [{"role": "system", "content": "own"}, *CHAT]
    rows = [{"prompt": "hi"}, {"prompt": CHAT}, {"prompt": own}]
    texts = [p.text for p in load(tmp_path, tokenizer, rows, apply_chat_template=True, system_prompt="be").items]
    assert texts[0] == texts[1] == "<s><|start|>system\nbe<|end|>\n<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert texts[2] == texts[0].replace("be", "own")


def test_overlong_prompts_are_filtered_with_a_count(tmp_path, tokenizer):
    """One prompt of 32 that is one token over is left out and counted; the others keep their row numbers."""
    rows = [{"prompt": "x" * (10 if i == 5 else 9)} for i in range(32)]
    data = load(tmp_path, tokenizer, rows, max_prompt_length=10)
    assert len(data) == 31
    assert [p.index for p in data.items] == [i for i in range(32) if i != 5]
    assert "1 longer than 10 tokens (--max-prompt-length) left out" in data.summary


def test_overlong_prompts_are_truncated_from_the_left(tmp_path, tokenizer):
    """Truncation keeps BOS and the end of the prompt, and text says what the ids spell."""
    data = load(
        tmp_path, tokenizer, [{"prompt": "abcdef"}, {"prompt": "ab"}], max_prompt_length=4, overlong="truncate"
    )
    assert [tokenizer.decode(p.token_ids) for p in data.items] == ["<s>def", "<s>ab"]
    assert data.items[0].text == "<s>def"
    assert data.summary.endswith(", 1 longer than 4 tokens (--max-prompt-length) cut from the left")


def test_all_prompts_overlong_is_an_error(tmp_path, tokenizer):
    """A limit that leaves nothing names the file, the flag and the shortest length."""
    with pytest.raises(ValueError, match="all 1 prompts are longer than --max-prompt-length 3 .*has 7 tokens"):
        load(tmp_path, tokenizer, [{"prompt": "abcdef"}], max_prompt_length=3)


def test_label_key_puts_the_label_where_rules_look(tmp_path, tokenizer):
    """--label-key copies that key to "label", keeps the whole row, and is an error where a row lacks it."""
    rows = [{"prompt": "a", "answer": 7}]
    assert load(tmp_path, tokenizer, rows, label_key="answer").items[0].row == {**rows[0], "label": 7}
    with pytest.raises(ValueError, match=r"a.jsonl, row 1: no key 'solution'.*'answer'.*--label-key"):
        load(tmp_path, tokenizer, rows, label_key="solution")


@pytest.mark.parametrize(
    ("row", "chat", "message"),
    [
        ({"text": "a"}, False, r"row 2: no key 'prompt'; its keys are 'text' \(change --prompt-key"),
        ({"prompt": 3}, False, "row 2: 'prompt' is int '3', not text"),
        ({"prompt": " "}, False, "row 2: 'prompt' is empty"),
        ({"prompt": CHAT}, False, "row 2: 'prompt' is a list of messages: give --apply-chat-template"),
        ({"prompt": ""}, True, "row 2: 'prompt' is empty"),
        ({"prompt": []}, True, "row 2: 'prompt' is list"),
        ({"prompt": ["hi"]}, True, "row 2: message 1 of 'prompt' is str 'hi', without role and content"),
        ({"prompt": [{"role": "user", "content": None}]}, True, "row 2: message 1 .* must be text"),
        ({"prompt": [*CHAT, {"role": "assistant", "content": "x"}]}, True, "row 2: .*nothing to answer"),
    ],
)
def test_bad_rows_are_named(tmp_path, tokenizer, row, chat, message):
    """A row of the wrong form is a ValueError that names file, row, key and flag; nothing is dropped in silence."""
    with pytest.raises(ValueError, match=f"a.jsonl, {message}"):
        load(tmp_path, tokenizer, [{"prompt": "good"}, row], apply_chat_template=chat)


def test_bad_options_are_named(tmp_path, make_tokenizer):
    """Flags that exclude each other are refused before a row is read."""
    bare = make_tokenizer()
    bare.chat_template = None
    with pytest.raises(ValueError, match="--apply-chat-template: the tokenizer of --hf-model has no chat template"):
        load(tmp_path, bare, [{"prompt": "a"}], apply_chat_template=True)
    with pytest.raises(ValueError, match="--system-prompt needs --apply-chat-template"):
        load(tmp_path, bare, [{"prompt": "a"}], system_prompt="be")
    with pytest.raises(ValueError, match="--overlong-prompts drop"):
        load(tmp_path, bare, [{"prompt": "a"}], overlong="drop")


def test_indices_count_over_files_and_a_restored_data_set_goes_on(tmp_path, tokenizer):
    """Sample ids count rows over all files and are the same in every epoch; a restored run sees the same ones."""
    files = tuple(save(tmp_path, [{"prompt": f"{n}{i}"} for i in range(4)], f"{n}.jsonl") for n in "xy")
    options = PromptOptions(files, max_prompt_length=9, apply_chat_template=False, seed=3, drop_last=False)
    data = load_prompts(options, tokenizer)
    assert [(p.index, p.row["prompt"]) for p in data.items[3:5]] == [(3, "x3"), (4, "y0")]
    data.next_batch(5)
    state = data.state()
    expected = [[p.index for p in data.next_batch(5)] for _ in range(3)]
    again = load_prompts(options, tokenizer)
    again.restore(state)
    assert [[p.index for p in again.next_batch(5)] for _ in range(3)] == expected
    assert [len(b) for b in expected] == [3, 5, 3]
