"""Phi-3 Small 7B Instruct, Microsoft's chat model with blocks of sparse attention; remote code only."""

model = dict(path="microsoft/Phi-3-small-8k-instruct", remote_code=True)
