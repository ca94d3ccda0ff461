"""OLMoE 7B, Ai2's open base model with 64 experts, 1B active."""

model = dict(path="allenai/OLMoE-1B-7B-0924", chat_template="zephyr")
architecture = dict(
    model_type="olmoe",
    num_hidden_layers=16,
    hidden_size=2048,
    intermediate_size=1024,
    num_attention_heads=16,
    num_key_value_heads=16,
    vocab_size=50304,
    tie_word_embeddings=False,
    max_position_embeddings=4096,
    num_experts=64,
    num_experts_per_tok=8,
)
