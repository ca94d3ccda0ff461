"""Qwen2 57B-A14B, Alibaba's base model with 64 experts, 14B active."""

model = dict(path="Qwen/Qwen2-57B-A14B", chat_template="chatml")
architecture = dict(
    model_type="qwen2_moe",
    num_hidden_layers=28,
    hidden_size=3584,
    intermediate_size=18944,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=151936,
    tie_word_embeddings=False,
    max_position_embeddings=131072,
    num_experts=64,
    num_experts_per_tok=8,
    moe_intermediate_size=2560,
    shared_expert_intermediate_size=20480,
)
