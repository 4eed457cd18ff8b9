import json

import pytest

from megatron_rl.data.preferences import PreferenceOptions, load_preferences, shared_text

USER = {"role": "user", "content": "Hi there"}
YES, NO = ({"role": "assistant", "content": text} for text in ("Yes I do", "No"))
CHAT_START = "<s><|start|>user\nHi there<|end|>\n<|start|>assistant\n"


def load(tmp_path, tokenizer, *rows, **options):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    options = {"max_length": 200, "shuffle": False, "drop_last": False} | options
    return load_preferences(PreferenceOptions((str(path),), **options), tokenizer)


def spelled(tokenizer, pair):
    return tuple(tokenizer.decode(ids) for ids in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
        {"chosen": [USER, YES], "rejected": [USER, NO]},
        {"prompt": "Hi there", "chosen": "Yes I do", "rejected": "No"},
        {"prompt": "Hi there", "chosen": [USER, YES], "rejected": [USER, NO]},
        {"prompt": [USER], "chosen": YES, "rejected": NO},
        {"prompt": None, "chosen": [USER, YES], "rejected": [USER, NO]},
    ],
)
@pytest.mark.parametrize("template_has_bos", [True, False])
def test_chat_pairs_in_every_form(tmp_path, make_tokenizer, row, template_has_bos):
    """Explicit and implicit prompts, lists and text give the same ids: one BOS, end-of-turn last, nothing behind."""
    tokenizer = make_tokenizer(template_has_bos=template_has_bos)
    (pair,) = load(tmp_path, tokenizer, row).items
    assert spelled(tokenizer, pair) == (CHAT_START, "Yes I do<|end|>", "No<|end|>")
    whole = tokenizer.apply_chat_template([USER, YES], tokenize=False)
    assert ("<s>" + whole.removeprefix("<s>")).rstrip() == tokenizer.decode(pair.prompt_ids + pair.chosen_ids)
    assert (pair.prompt_ids + pair.chosen_ids).count(tokenizer.bos_token_id) == 1


def test_conversations_share_their_first_messages(tmp_path, tokenizer):
    """An implicit prompt is all common messages; a system prompt is added once."""
    first = [USER, NO, {"role": "user", "content": "Sure?"}]
    data = load(tmp_path, tokenizer, {"chosen": [*first, YES], "rejected": [*first, NO]}, system_prompt="be")
    prompt, chosen, _ = spelled(tokenizer, data.items[0])
    assert prompt.startswith("<s><|start|>system\nbe<|end|>\n<|start|>user") and prompt.count("system") == 1
    assert (
        prompt.endswith("No<|end|>\n<|start|>user\nSure?<|end|>\n<|start|>assistant\n") and chosen == "Yes I do<|end|>"
    )


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "Q:", "chosen": " yes", "rejected": " no"}, ("<s>Q:", " yes</s>", " no</s>")),
        ({"prompt": "Q:", "chosen": " yes</s>", "rejected": " no"}, ("<s>Q:", " yes</s>", " no</s>")),
        ({"chosen": "Q: yes it is", "rejected": "Q: yet"}, ("<s>Q:", " yes it is</s>", " yet</s>")),
        ({"chosen": "Q\nyes", "rejected": "Q\nno"}, ("<s>Q\n", "yes</s>", "no</s>")),
    ],
)
@pytest.mark.parametrize("pad", [None, "</s>"])
def test_text_pairs_end_with_one_eos(tmp_path, make_tokenizer, row, expected, pad):
    """Text completions end with exactly one EOS, also where pad is EOS; prompts begin with one BOS."""
    tokenizer = make_tokenizer(eos="</s>", pad=pad)
    (pair,) = load(tmp_path, tokenizer, row, apply_chat_template=False).items
    assert spelled(tokenizer, pair) == expected


def test_a_template_without_end_of_turn_gets_eos(tmp_path, make_tokenizer):
    """Where the template writes no mark behind the answer, EOS ends it."""
    tokenizer = make_tokenizer(eos="</s>")
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}assistant: {% endif %}"
    (pair,) = load(tmp_path, tokenizer, {"chosen": [USER, YES], "rejected": [USER, NO]}).items
    assert spelled(tokenizer, pair) == ("<s>user: Hi there\nassistant: ", "Yes I do\n</s>", "No\n</s>")


def test_ids_are_never_tokenised_across_the_border(tmp_path):
    """With merges, the ids are those of the prompt and those of the completion, not those of the whole text."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocab = {t: i for i, t in enumerate(["</s>", "a", "b", "c", "ab", "bc"])}
    core = Tokenizer(models.BPE(vocab, [("a", "b"), ("b", "c")]))
    core.add_special_tokens(["</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    row = {"prompt": "ca", "chosen": "bc", "rejected": "b"}
    (pair,) = load(tmp_path, tokenizer, row, apply_chat_template=False).items
    assert (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids) == ((3, 1), (5, 0), (2, 0))
    assert tokenizer("cabc")["input_ids"] == [3, 4, 3]


def test_truncation_leaves_a_response_token(tmp_path, make_tokenizer):
    """Prompts lose their left, completions their right end; every half that is kept has a response token."""
    tokenizer = make_tokenizer(eos="</s>")
    rows = [
        {"prompt": "abcdefghij", "chosen": "1", "rejected": "1234567890"},
        {"prompt": "ab", "chosen": "1", "rejected": "12"},
    ]
    data = load(tmp_path, tokenizer, *rows, apply_chat_template=False, max_length=8, max_prompt_length=5)
    assert [spelled(tokenizer, p) for p in data.items] == [("<s>ghij", "1</s>", "123"), ("<s>ab", "1</s>", "12</s>")]
    assert data.summary == (
        "2 pairs from 1 file(s), 1 with the prompt cut from the left, 1 with a completion cut from the right"
    )


def test_a_pair_without_room_is_dropped_and_counted(tmp_path, tokenizer):
    """Prompt of 64 tokens, limit 64, chosen 1 token and rejected 200: dropped and counted, or cut to leave room."""
    row = {"prompt": "p" * 63, "chosen": "c", "rejected": "r" * 199}
    small = {"prompt": "p", "chosen": "c", "rejected": "r"}
    data = load(tmp_path, tokenizer, row, small, apply_chat_template=False, max_length=64)
    assert [p.index for p in data.items] == [1]
    assert data.summary == "1 pairs from 1 file(s), 1 dropped without a response token"
    data = load(tmp_path, tokenizer, row, apply_chat_template=False, max_length=64, max_prompt_length=63)
    assert (len(data.items[0].chosen_ids), len(data.items[0].rejected_ids)) == (1, 1)
    with pytest.raises(ValueError, match="none of the 1 pairs is left within --max-length 64"):
        load(tmp_path, tokenizer, row, apply_chat_template=False, max_length=64)


def test_filtering_and_empty_completions_are_counted(tmp_path, tokenizer):
    """ "filter" leaves over-long pairs out, empty completions drop the pair; both are counted, indices stay."""
    rows = [
        {"prompt": "Hi there", "chosen": "x" * 300, "rejected": "y"},
        {"prompt": "Hi there", "chosen": "", "rejected": "y"},
        {"prompt": "Hi there", "chosen": "x", "rejected": "y"},
    ]
    for chat in (True, False):
        data = load(tmp_path, tokenizer, *rows, overlong="filter", apply_chat_template=chat)
        assert [p.index for p in data.items] == [2]
        assert data.summary.endswith(", 1 over-long left out, 1 dropped without a response token")


def test_equal_completions_are_dropped_and_counted(tmp_path, tokenizer):
    """A pair in which nothing is preferred, from the file or after cutting, is no pair; alone it ends the run."""
    rows = [
        {"prompt": "ab", "chosen": "same", "rejected": "same"},
        {"prompt": "ab", "chosen": "x" * 50 + "y", "rejected": "x" * 50 + "z"},
        {"prompt": "ab", "chosen": "yes", "rejected": "no"},
    ]
    data = load(tmp_path, tokenizer, *rows, apply_chat_template=False, max_length=20)
    assert [p.index for p in data.items] == [2]
    assert data.summary == "1 pairs from 1 file(s), 2 dropped with two equal completions"
    with pytest.raises(ValueError, match="none of the 1 pairs is left .* 1 dropped with two equal completions"):
        load(tmp_path, tokenizer, rows[0], apply_chat_template=False)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"chosen": [USER, YES]}, {}, "row 2: no key 'rejected'.*--rejected-key"),
        ({"chosen": [USER, YES], "rejected": 3}, {}, "row 2: 'rejected' is int '3', not text or a list"),
        ({"chosen": [YES], "rejected": [NO]}, {}, "row 2: 'chosen' and 'rejected' share no message"),
        ({"chosen": "a", "rejected": "b"}, {}, "row 2: .* share no message .*--no-apply-chat-template"),
        (
            {"chosen": [USER, YES, USER], "rejected": [USER, NO]},
            {},
            "row 2: .*found .'assistant', 'user'. .--chosen-key",
        ),
        ({"chosen": [USER, YES], "rejected": [USER, NO]}, {"prompt_key": "question"}, "row 2: no key 'question'"),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, {}, "row 2: 'prompt' is empty"),
        (
            {"prompt": " ", "chosen": "a", "rejected": "b"},
            {"apply_chat_template": False},
            "row 2: the prompt is empty",
        ),
        ({"chosen": "ab", "rejected": "ac"}, {"apply_chat_template": False}, "row 2: .*share no beginning"),
        ({"chosen": [USER], "rejected": "a"}, {"apply_chat_template": False}, "row 2: .*give --apply-chat-template"),
    ],
)
def test_bad_pairs_are_named(tmp_path, tokenizer, row, options, message):
    """A row of the wrong form is a ValueError that names file, row, key and flag."""
    good = {"question": "q", "prompt": "q", "chosen": "a", "rejected": "b"}
    with pytest.raises(ValueError, match=f"pairs.jsonl, {message}"):
        load(tmp_path, tokenizer, good, row, **options)


def test_shared_text_splits_no_word():
    """The shared beginning ends at white space; spaces go with the completions, line ends with the prompt."""
    assert shared_text("a cat", "a car") == "a"
    assert shared_text("a\ncat", "a\ndog") == "a\n"
    assert shared_text("a b", "a b c") == "a"
    assert shared_text("cat", "car") == ""


def test_batches_restart_identically(tmp_path, tokenizer):
    """Pairs are shuffled and restored as prompts are."""
    rows = [{"prompt": str(i), "chosen": "a", "rejected": "b"} for i in range(10)]
    data = load(tmp_path, tokenizer, *rows, shuffle=True)
    first = data.next_batch(4)
    state = data.state()
    expected = [data.next_batch(4) for _ in range(4)]
    again = load(tmp_path, tokenizer, *rows, shuffle=True)
    again.restore(state)
    assert [again.next_batch(4) for _ in range(4)] == expected and first != data.items[:4]
