"""From samples to what a loss sees: masks come from lengths, whatever the token ids are."""

import torch

from megatron_rl.batch import Prompt, Response, Sample, batch_of, pack

PAD = 0  # and EOS


def test_eos_that_is_the_padding_token_has_loss():
    """A generated EOS is predicted and masked in, also where it is the id that padding has, in prompts of that id too;
    a truncated response keeps its real last token."""
    answers = [((5, 6), (7, PAD), False), ((PAD, PAD, 8), (9, 9, 9), True), ((4,), (PAD,), False)]
    samples = [
        Sample(Prompt(i, prompt, "", {}), Response(ids, (-0.5,) * len(ids), truncated, 1), i)
        for i, (prompt, ids, truncated) in enumerate(answers)
    ]
    batch = batch_of(samples)
    assert batch.mask_BR.tolist() == [[True, True, False], [True] * 3, [True, False, False]]
    micro = pack(batch, [0, 1, 2], torch.device("cpu"), multiple=8)
    assert micro.labels_K.tolist() == [7, PAD, 9, 9, 9, PAD]
    assert micro.predict_K.tolist() == [1, 2, 6, 7, 8, 10]
    assert micro.rollout_logprobs_K.tolist() == [-0.5] * 6 and micro.tokens_1T.shape[1] == 16
    assert batch.truncated_B.tolist() == [False, True, False]
