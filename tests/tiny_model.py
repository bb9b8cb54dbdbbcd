"""A tiny random model for tests: real architecture, real tokenizer, no download."""

from __future__ import annotations

from pathlib import Path

VOCAB_SIZE = 4096


def make_tiny_model(folder: Path, *, tied: bool = False) -> Path:
    """Write a random Llama (4 layers, hidden 256, 8 heads, 4 KV heads, float32) to a folder.

    Args:
        tied: the output head shares the embedding's weights, and is not in the checkpoint.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=tied,
        # Larger than the default, so that the prompt matters and greedy text does not repeat.
        initializer_range=0.12,
    )
    model = LlamaForCausalLM(config).float()
    model.save_pretrained(folder)
    _make_tokenizer().save_pretrained(folder)
    return folder


def _make_tokenizer() -> object:
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "<unk>", *(f"w{i}" for i in range(3, VOCAB_SIZE))]
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
