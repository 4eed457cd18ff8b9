"""Reward models: scores against transformers' in every layout, tokenizers that differ, heads that cannot score."""

import sys
from pathlib import Path

import launch
import pytest
import torch
from data.conftest import build
from models.tiny import tiny_model, tiny_tokenizer
from rewards.model_cases import TEXTS, samples
from safetensors.torch import load_file, save_file

from megatron_rl.arguments import parse, validate_ppo
from megatron_rl.flags import PPO
from megatron_rl.models.config import read_hf_config
from megatron_rl.rewards.model import RewardText, check_head, tokenizer_difference
from megatron_rl.roles import load_tokenizer
from megatron_rl.weights.dist_io import hf_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A policy, and reward models with its tokenizer, with one of its own, and with one that has no chat template."""
    folder = tmp_path_factory.mktemp("models")
    made = {"policy": tiny_model(folder / "policy", "llama3")}
    for seed, (name, family) in enumerate((("same", "llama3"), ("own", "qwen2"), ("plain", "qwen3")), start=1):
        made[name] = tiny_model(folder / name, family, head="SequenceClassification", seed=seed)
    for name in ("policy", "same"):
        tiny_tokenizer(made[name])
    for name in ("own", "plain"):
        tokenizer = build(eos="</s>")
        tokenizer.chat_template = tokenizer.chat_template if name == "own" else None
        tokenizer.save_pretrained(made[name])
    tool = launch.ROOT / "tools/convert_hf_to_megatron.py"
    launch.check(launch.run(sys.executable, tool, "--hf-model", made["same"], "--save", folder / "converted"))
    return made | {"critic": folder / "converted/iter_0000000/critic"}


def ids_by_transformers(name: str, folders: dict[str, Path]) -> list[list[int]]:
    """What each text is to the model, by its own tokenizer alone."""
    tokenizer = load_tokenizer(str(folders[name]))
    found = []
    for prompt, text, truncated in TEXTS:
        if name == "own":
            chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
            found.append(tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False))
        else:
            found.append(tokenizer(prompt + text)["input_ids"] + ([] if truncated else [tokenizer.eos_token_id]))
    return found


@torch.no_grad()
def scores_by_transformers(name: str, folders: dict[str, Path]) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(folders[name], dtype=torch.float32)
    return torch.tensor([float(model(torch.tensor([ids])).logits) for ids in ids_by_transformers(name, folders)])


def test_scores_equal_transformers(folders: dict[str, Path], tmp_path: Path):
    """TP 2, sequence parallel, PP 2 and DP 2, packed: the scores of transformers' classification to 1e-4, float32."""
    names = ("same", "own", "plain", "critic")
    layouts = ("2,1,0", "2,1,1", "1,2,0", "1,1,0")
    joined = ",".join(str(folders[name]) for name in names)
    program, out = "tests/rewards/model_program.py", tmp_path / "scores.pt"
    text = launch.check(launch.torchrun(2, program, out, folders["policy"], joined, *layouts, timeout=200))
    found = torch.load(out)
    for name in names:
        expected = scores_by_transformers("same" if name == "critic" else name, folders)
        assert float(expected.std()) > 0.01
        for layout in layouts:
            assert found[layout][name] == pytest.approx(expected.tolist(), abs=1e-4), (name, layout)
    assert "reward    same: its tokenizer is the policy's, token ids go in as they are" in text
    assert (
        "own: its tokenizer differs from the policy's (vocabulary), texts are tokenised again with its own chat"
        in (text)
    )


def test_roles_of_a_checkpoint_pass_the_checks_at_launch(folders: dict[str, Path]):
    """A critic and a reward model may be a role's folder of a checkpoint; one that is nowhere is named by its flag."""
    flags = ["--hf-model", folders["policy"], "--train-data", launch.ROOT / "examples/data/topics.jsonl", "--no-bf16"]
    flags += ["--max-prompt-length", 16, "--max-response-length", 16, "--rollout-batch-size", 2]

    def validated(*more: object) -> None:
        args = parse("train_ppo.py", PPO, [str(word) for word in (*flags, *more)])
        validate_ppo(args, read_hf_config(folders["policy"]))

    validated("--critic-hf-model", folders["critic"], "--reward-model", folders["critic"])
    for flag in ("--critic-hf-model", "--reference-hf-model"):
        with pytest.raises(ValueError, match=flag):
            validated(flag, folders["critic"].parent, "--reward", "length", "--kl-coef", "0.1")
    check_head(str(folders["critic"]), read_hf_config(hf_folder(folders["critic"])))


def test_a_text_that_is_too_long_loses_its_start(folders: dict[str, Path]):
    """Tokenised again, a text keeps its BOS and its end within the limit."""
    from megatron_rl.data.text import TextFormat

    own = load_tokenizer(str(folders["plain"]))
    text = RewardText(TextFormat(own, False), limit=9)
    (ids,) = text.ids(samples(own)[2:3], ["y" * 40])
    assert own.decode(ids) == "<s>x" + "y" * 40 and own.decode(text.fit(ids)) == "<s>yyyyyyyy"


def test_what_makes_tokenizers_differ(folders: dict[str, Path]):
    """Vocabulary, BOS, EOS, chat template and the model's number of ids count; the padding token does not."""
    policy, same = (load_tokenizer(str(folders[name])) for name in ("policy", "same"))
    same.pad_token = "<eos>"
    assert tokenizer_difference(policy, 131, same, 131) is None
    assert tokenizer_difference(policy, 131, same, 128) == "128 ids, the policy's 131"
    same.chat_template = "{{ messages }}"
    assert tokenizer_difference(policy, 131, same, 131) == "chat template"
    same.eos_token = "<unk>"
    assert tokenizer_difference(policy, 131, same, 131) == "EOS id 2, the policy's 1"
    assert tokenizer_difference(policy, 131, load_tokenizer(str(folders["own"])), 131) == "vocabulary"


def test_heads_that_cannot_score(folders: dict[str, Path], tmp_path: Path):
    """A language model, two labels, and a head of another size are refused; a head of transformers is not."""
    check_head(str(folders["same"]), read_hf_config(folders["same"]))
    with pytest.raises(ValueError, match="policy: a language model without score.weight"):
        check_head(str(folders["policy"]), read_hf_config(folders["policy"]))
    two = tiny_model(tmp_path / "two", "llama", head="SequenceClassification", num_labels=2)
    with pytest.raises(ValueError, match="one label, this one has 2"):
        read_hf_config(two)
    wide = tiny_model(tmp_path / "wide", "qwen2", head="SequenceClassification")
    tensors = load_file(wide / "model.safetensors") | {"score.weight": torch.zeros(2, 128)}
    save_file(tensors, wide / "model.safetensors")
    with pytest.raises(ValueError, match=r"score.weight is \(2, 128\), not \(1, 128\)"):
        check_head(str(wide), read_hf_config(wide))
