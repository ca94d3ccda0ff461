"""Qwen1.5 MoE A2.7B, Alibaba's base model of 14B with 60 experts, 2.7B active."""

model = dict(path="Qwen/Qwen1.5-MoE-A2.7B", chat_template="chatml")
architecture = dict(
    model_type="qwen2_moe",
    num_hidden_layers=24,
    hidden_size=2048,
    intermediate_size=5632,
    num_attention_heads=16,
    num_key_value_heads=16,
    vocab_size=151936,
    tie_word_embeddings=False,
    max_position_embeddings=8192,
    num_experts=60,
    num_experts_per_tok=4,
    moe_intermediate_size=1408,
    shared_expert_intermediate_size=5632,
)
