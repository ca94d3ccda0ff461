"""gpt-oss 120B, OpenAI's chat model with 128 experts that thinks first; 4-bit experts."""

model = dict(path="openai/gpt-oss-120b")
architecture = dict(
    model_type="gpt_oss",
    num_hidden_layers=36,
    hidden_size=2880,
    intermediate_size=2880,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=201088,
    tie_word_embeddings=False,
    max_position_embeddings=131072,
    num_experts_per_tok=4,
    num_local_experts=128,
)
