"""Tiny random models of every supported family, saved by transformers, and a tokenizer of single characters."""

import string
from pathlib import Path
from typing import Any

import torch

SIZES = {
    "vocab_size": 131,  # a multiple of nothing
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,  # 2 + 1 on two stages
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 4}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "use_sliding_window": False}),
    "qwen3": ("Qwen3", {"head_dim": 32, "hidden_size": 96, "num_attention_heads": 4}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mixtral": ("Mixtral", {**EXPERTS, "sliding_window": None, "router_jitter_noise": 0.0}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "head_dim": 32,
            "norm_topk_prob": True,
        },
    ),
}
DENSE = ("llama", "llama3", "llama_linear", "qwen2", "qwen3", "mistral")


def tiny_model(folder: str | Path, family: str, head: str = "CausalLM", seed: int = 0, **overrides: Any) -> Path:
    """Saves a random float32 model of `family` under `folder` (no tokenizer) and returns the folder.

    head "SequenceClassification" gives a `score.weight` of one row. `overrides` are config.json's own keys;
    `dtype` (a torch dtype) is what the weights are saved in.
    """
    import transformers

    name, own = FAMILIES[family]
    dtype = overrides.pop("dtype", torch.float32)
    if head == "SequenceClassification":
        overrides.setdefault("num_labels", 1)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **own, **overrides})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}For{head}")(config).to(torch.float32)
    with torch.no_grad():
        for key, param in model.named_parameters():
            is_norm = "norm" in key
            param.normal_(1.0 if is_norm else 0.0, 0.2 if is_norm or key.endswith("bias") else 0.08)
    model.to(dtype).save_pretrained(folder)
    return Path(folder)


def tiny_tokenizer(folder: str | Path, vocab_size: int = 131) -> Path:
    """Saves a tokenizer of single printable characters (eos 1, pad 0) with a chat template into `folder`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = string.printable.replace("\x0b", "").replace("\x0c", "").replace("\r", "")
    words = ["<pad>", "<eos>", "<unk>", *letters]
    words += [f"<{i}>" for i in range(len(words), vocab_size)]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words[:vocab_size])}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return Path(folder)
