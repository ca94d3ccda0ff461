"""Kimi K2 Instruct 1T-A32B, Moonshot AI's chat model; remote code only; 8-bit weights; sizes from memory."""

model = dict(path="moonshotai/Kimi-K2-Instruct", remote_code=True)
architecture = dict(
    _base_="deepseek_v3",
    num_attention_heads=64,
    num_key_value_heads=64,
    vocab_size=163840,
    max_position_embeddings=131072,
    n_routed_experts=384,
    first_k_dense_replace=1,
)
