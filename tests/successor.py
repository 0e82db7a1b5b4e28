"""A model made by hand: it answers a prompt with its last digit plus one, where that is even, and then ends."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fastgrpo.tools.demo.toy import toy_tokenizer


def successor_model() -> LlamaForCausalLM:
    """Answers a prompt with its last digit plus one, then ends: attention writes nothing, the head looks the answer up."""
    tokenizer = toy_tokenizer()
    size = len(tokenizer)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size,
            hidden_size=32,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    following = {str(d): str(d + 1) for d in range(0, 9, 2)}  # after an even digit the next
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight[:, :size] = torch.eye(size)
        head = model.lm_head.weight
        head[tokenizer.eos_token_id, :size] = 0.5  # where nothing follows
        for token, successor in following.items():
            column = tokenizer.convert_tokens_to_ids(token)
            head[tokenizer.convert_tokens_to_ids(successor), column] = 1.0
    return model
