"""InternLM2.5 7B, Shanghai AI Laboratory's base model of the second generation's update."""

model = dict(path="internlm/internlm2_5-7b", chat_template="internlm2")
architecture = "internlm2_7b"
