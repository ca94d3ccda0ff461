"""Phi-3.5 MoE Instruct, Microsoft's chat model with 16 experts, 6.6B active."""

model = dict(path="microsoft/Phi-3.5-MoE-instruct")
architecture = dict(
    model_type="phimoe",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=6400,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=32064,
    tie_word_embeddings=False,
    max_position_embeddings=131072,
    attention_bias=True,
    lm_head_bias=True,
    num_experts_per_tok=2,
    num_local_experts=16,
)
