"""gpt-oss 120B, OpenAI's chat model with 128 experts that thinks first; 4-bit experts."""

model = dict(path="openai/gpt-oss-120b")
architecture = dict(_base_="gpt_oss_20b", num_hidden_layers=36, num_local_experts=128)
