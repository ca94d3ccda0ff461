"""MiniCPM 2B, OpenBMB's chat model; remote code only."""

model = dict(path="openbmb/MiniCPM-2B-sft-bf16", remote_code=True)
